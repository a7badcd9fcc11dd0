"""``sql``: one reading statement over the lake's tables, by DuckDB or by Spark."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import pyarrow as pa
import typer

from jobs.console import Format, FormatOption, chosen_settings, err, print_csv, print_rows
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.contract.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_PLAN = re.compile(r";\n|\n\nJVM stacktrace")  # of Spark's own, behind what a message says


class Engine(StrEnum):
    """What runs a statement."""

    duckdb = "duckdb"
    spark = "spark"


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the lake's tables.")],
    engine: Annotated[
        Engine, typer.Option(help="What runs it: duckdb in this process, or spark in a session of its own.")
    ] = Engine.duckdb,
    form: FormatOption = Format.TABLE,
) -> None:
    """Query the lake's tables with DuckDB, without Java, or with Spark.

    NAME__partials has the rows of a table of partials before they are folded, SOURCE__events the events of a source
    with the fields of their payloads as columns.
    """
    from serve.sql.payloads import payload_schemas
    from serve.sql.statement import rows_as_json, run_sql

    logging.getLogger("sqlglot").setLevel(logging.ERROR)  # what it warns of is refused
    settings = chosen_settings()
    try:
        sources = declared_pipeline(settings).sources
    except ConfigError:  # a lake can be read without its pipeline
        sources = {}
    if engine is Engine.spark:
        found = _by_spark(settings, sources, query)
    else:
        found = run_sql(Lake.of(settings), query, payloads=payload_schemas(sources.values()))
    if form is Format.JSON:
        sys.stdout.buffer.write(rows_as_json(found) + b"\n")
        return
    rows = json.loads(rows_as_json(found))
    if form is Format.CSV:
        print_csv(rows, found.schema.names)
        return
    print_rows(rows, found.schema.names)
    err.print(f"{found.num_rows} rows", style="dim")


def _by_spark(settings: Settings, sources: Mapping[str, Source], query: str) -> pa.Table:
    """The rows of a statement in Spark's SQL, by a session of its own.

    Raises:
        UnknownTable: it names a table that the lake does not have.
        SqlError: it does more than read, or Spark refuses it.
    """
    from pyspark.logger import PySparkLogger

    from lakehouse.session import build_session

    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # the errors say the same
    lake = Lake.of(settings)
    names = named_tables(lake, sources, query)
    with err.status("starting Spark …"):
        spark = build_session(settings, "millrace-sql")
    try:
        return spark_rows(spark, lake, sources, names, query)
    finally:
        spark.stop()


def named_tables(lake: Lake, sources: Mapping[str, Source], query: str) -> dict[str, str]:
    """The lake's tables that a statement in Spark's SQL names: name in it to name of the table.

    Raises:
        UnknownTable: the lake does not have one of them.
        SqlError: it is not a single reading statement.
    """
    from sqlglot import exp

    from serve.sql.payloads import EVENTS
    from serve.sql.statement import PARTIALS, read_statement

    tree = read_statement(query, "spark")
    known = sorted(table.name for table in lake.tables())
    defined = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    found = {}
    for table in tree.find_all(exp.Table):
        name = table.name.lower()
        if not isinstance(table.this, exp.Identifier) or table.db:
            continue  # a function, or what Spark itself knows
        source = name.removesuffix(EVENTS)
        base = name if name in known else source if source in sources else name.removesuffix(PARTIALS)
        if base in known:
            found[name] = base
        elif name not in defined:
            raise UnknownTable(table.name, known)
    return found


def spark_rows(
    spark: SparkSession, lake: Lake, sources: Mapping[str, Source], names: Mapping[str, str], query: str
) -> pa.Table:
    """The rows of a statement, in a session that has no views of these names.

    Args:
        names: what :func:`named_tables` found.

    Raises:
        SqlError: Spark refuses it, or it fails.
    """
    from pyspark.errors import PySparkException

    from serve.errors import SqlError

    try:
        for name, table in names.items():
            _rows(spark, lake, sources, name, table).createOrReplaceTempView(name)
        return spark.sql(query.strip().rstrip(";")).toArrow()
    except PySparkException as error:
        raise SqlError(_PLAN.split(str(error), maxsplit=1)[0].strip()) from None


def _rows(spark: SparkSession, lake: Lake, sources: Mapping[str, Source], name: str, base: str) -> DataFrame:
    """What a name in a statement stands for."""
    import sqlglot
    from deltalake import DeltaTable
    from pyspark.sql import functions as F

    from lakehouse.contract.rows import Fold
    from lakehouse.contract.storage import spark_uri
    from lakehouse.silver.conform import conform, payload_columns
    from serve.sql.payloads import EVENTS
    from serve.sql.statement import PARTIALS

    table = lake.find(base).path
    rows = spark.read.format("delta").load(spark_uri(table))
    if name == base + EVENTS:
        source = sources[base]
        envelope = ("event_id", "tenant", "received_at", "bronze_at", "origin", "event_time", "reason", "payload")
        text = conform(rows, source).withColumn("payload", F.expr("make_valid_utf8(payload)"))
        return text.select(*envelope, *payload_columns(source), *source.enrich)
    fold = Fold.from_properties(DeltaTable(str(table)).metadata().configuration) if name == base else None
    if fold is None:
        return rows
    rows.createOrReplaceTempView(base + PARTIALS)
    (folded,) = sqlglot.transpile(fold.sql(f'"{base}{PARTIALS}"', rows.columns), read="duckdb", write="spark")
    return spark.sql(folded)
