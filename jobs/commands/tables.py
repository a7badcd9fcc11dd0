"""``sql``, ``subscribe``, ``tables`` and ``state``: reading the lake's tables."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import pyarrow as pa
import typer
from rich.markup import escape

from jobs.console import (
    KEY_VARIABLE,
    Format,
    FormatOption,
    JsonOption,
    chosen_pipeline,
    chosen_settings,
    err,
    print_csv,
    print_json,
    print_rows,
    print_table,
    run_async,
    spark_session,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.contract.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lakehouse.sketches.kinds import Answer, Question
    from lakehouse.sketches.tables import SketchTable, Span
    from serve.client import Change, Snapshot, Subscription

_PLAN = re.compile(r";\n|\n\nJVM stacktrace")  # of Spark's own, behind what a message says
_COLOURS = {"ok": "green", "warn": "yellow", "alarm": "red"}


class Engine(StrEnum):
    """What runs a statement or a check."""

    DUCKDB = "duckdb"
    SPARK = "spark"


class Transport(StrEnum):
    """How the server is asked for changes."""

    AUTO = "auto"
    WEBSOCKET = "websocket"
    SSE = "sse"
    POLL = "poll"


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the lake's tables.")],
    engine: Annotated[
        Engine, typer.Option(help="What runs it: duckdb in this process, or spark in a session of its own.")
    ] = Engine.DUCKDB,
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
    if engine is Engine.SPARK:
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

    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # the errors say the same
    lake = Lake.of(settings)
    names = named_tables(lake, sources, query)
    with spark_session(settings, "millrace-sql") as (spark, status):
        status.update("asking …")
        return spark_rows(spark, lake, sources, names, query)


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


def subscribe(
    table: Annotated[str, typer.Argument(help="Name of the table.")],
    url: Annotated[str, typer.Option(help="Base URL of the server.")] = "http://127.0.0.1:8400",
    position_file: Annotated[
        Path | None, typer.Option(help="Keep the position in this file, and resume from it.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after this many messages.", min=1)] = None,
    where: Annotated[str, typer.Option(help="Only rows that fulfil this SQL condition.")] = "",
    columns: Annotated[str, typer.Option(help="Only these columns and the key's, separated by commas.")] = "",
    select: Annotated[str, typer.Option(help="A live aggregate instead of rows: SELECT … GROUP BY ….")] = "",
    transport: Annotated[
        Transport, typer.Option(help="How to connect; auto takes the first that gets through.")
    ] = Transport.AUTO,
    form: FormatOption = Format.JSON,
) -> None:
    """Follow a table: print a snapshot and then each change, one JSON object a line.

    As a table or CSV it prints rows with their change: snapshot, upsert or delete. Its API key is in MILLRACE_KEY.
    """
    from serve.client import ClientOptions, FileStore, SlowNotice, TableQuery
    from serve.client import subscribe as connect

    def warn(notice: SlowNotice) -> None:
        err.print(f"too slow: {notice.behind} messages or {notice.behind_ms / 1000:.0f} s behind", style="yellow")

    subscription = connect(
        url,
        table,
        FileStore(position_file) if position_file else None,
        key=os.environ.get(KEY_VARIABLE, ""),
        query=TableQuery(where, tuple(filter(None, columns.split(","))), select),
        options=ClientOptions(transport=transport.value, on_slow=warn),
    )
    run_async(lambda stop: _print_changes(stop, subscription, count, form))


async def _print_changes(stop: asyncio.Event, subscription: Subscription, count: int | None, form: Format) -> None:
    from serve.client import Snapshot

    async def follow() -> None:
        seen, columns = 0, list[str]()
        async with subscription as messages:
            async for message in messages:
                if form is Format.JSON:
                    kind = "snapshot" if isinstance(message, Snapshot) else "change"
                    line = orjson.dumps({"type": kind, **dataclasses.asdict(message)})
                    sys.stdout.buffer.write(line + b"\n")
                    sys.stdout.buffer.flush()
                else:
                    columns = _print_rows_of(message, form, columns)
                seen += 1
                if seen == count:
                    return

    task = asyncio.create_task(follow())
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        task.result()


def _print_rows_of(message: Snapshot | Change, form: Format, columns: list[str]) -> list[str]:
    """Print a message's rows; returns the columns of the rows printed last."""
    from serve.client import Snapshot

    if isinstance(message, Snapshot):
        rows = [{"change": "snapshot", **row} for row in message.rows]
    else:
        rows = [{"change": "upsert", **row} for row in message.upserts]
        rows += [{"change": "delete", **row} for row in message.deletes]
    found = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    if form is Format.CSV:
        print_csv(rows, found, header=found != columns)
    elif rows:
        print_rows(rows, found)
    return found


def tables(
    check: Annotated[bool, typer.Option("--check", help="End with exit status 1 if a table is in alarm.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the lake's tables: size, files, versions, lag, retention and health."""
    from jobs.local.broker import Topics
    from lakehouse.maintain.report import ALARM, table_facts

    settings, loaded = chosen_pipeline()
    found = table_facts(Lake.of(settings), loaded, Topics.of(settings).backlog)
    if as_json:
        print_json([{"table": facts.name, **dataclasses.asdict(facts)} for facts in found])
    else:
        numbers = ("rows", "bytes", "files", "versions", "kept", "behind")
        rows = [
            (
                f"{facts.layer}/{facts.name}",
                f"[{_COLOURS[facts.health]}]{facts.health}[/]",
                "" if facts.rows is None else f"{facts.rows:,}",
                _size(facts.bytes),
                f"{facts.files:,}",
                f"{facts.oldest}–{facts.version}",
                _span(facts.log_s),
                "" if facts.behind is None else f"{facts.behind:,}",
                ", ".join(f"{count:,} ({text})" for text, count in facts.too_late.items()),
                f"{_span(max(0.0, time.time() - facts.committed))} ago",
            )
            for facts in found
        ]
        columns = ("table", "health", *numbers, "too late", "committed")
        spare = ("files", "versions", "kept", "too late")
        print_table(columns, rows, right=(*numbers, "committed"), spare=spare)
        for facts in found:
            for remark in facts.remarks:
                err.print(f"{facts.name}: {escape(remark)}", highlight=False)
    raise typer.Exit(1 if check and any(facts.health == ALARM for facts in found) else 0)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def _span(seconds: float) -> str:
    """A length of time, short."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def state(
    table: Annotated[
        str, typer.Argument(help="A stateful product, or a table with sketches; default: all stateful products.")
    ] = "",
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="Only this COLUMN=VALUE of the key or the sketches' group; may be repeated."),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            help="Sketches: start of one window, or FROM..TO to merge several (either may be empty); "
            "default: the newest."
        ),
    ] = "",
    item: Annotated[str | None, typer.Option(help="Sketches: how often this item occurs, or whether it does.")] = None,
    quantile: Annotated[
        list[float] | None, typer.Option(help="Sketches: the value at this rank, 0 to 1; may be repeated.")
    ] = None,
    rank: Annotated[float | None, typer.Option(help="Sketches: the share of values up to this one.")] = None,
    range: Annotated[str | None, typer.Option(help="Sketches: how many integers lie in LOW:HIGH, with both.")] = None,
    n: Annotated[int, typer.Option("-n", help="Sketches: number of most frequent items to print.", min=1)] = 10,
    inner: Annotated[
        str | None, typer.Option(help="Sketches: the inner product with the window that starts here.")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help='Sketches: look a "maybe" of membership up in a table.')
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the merged sketch to this file, in DataSketches' binary form.", dir_okay=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what tables remember: sessions, windows by count, drift detectors, joins, or the estimates of sketches.

    The driver may run or not. Windows and groups of sketches are merged; each estimate has its bounds.
    """
    from lakehouse.sketches.kinds import inner_product

    lake, keys = Lake.of(chosen_settings()), _pairs(key or ())
    question = _question(item, quantile, rank, range, n)
    is_asked = question != _question(None, None, None, None, n) or any((window, inner, confirm, output))
    found = _sketches_of(lake, table, is_asked)
    if found is None:
        _show_state(lake, table, keys, as_json)
        return
    span = _merged(found, window or found.newest().isoformat(), "--window", keys)
    if inner:
        answers = [inner_product(span.sketch, _merged(found, inner, "--inner", keys).sketch)]
    else:
        answers = span.sketch.answers(question)
    if confirm:
        answers = _confirmed(answers, found, span)
    if output is not None:
        output.write_bytes(span.sketch.serialize()["sketch"])
    _say(table, found.operator, span, answers, as_json)


def _show_state(lake: Lake, name: str, key: Mapping[str, str], as_json: bool) -> None:
    from lakehouse.stateful.report import remembered, report, stateful_products

    _, pipeline = chosen_pipeline()
    known = {found.name: found for found in stateful_products(pipeline)}
    if name and name not in known:
        remedy = f"Products that do: {', '.join(known) or 'none'}"
        raise ConfigError(f"{name!r} remembers nothing, and holds no sketches", key="state", remedy=remedy)
    if key:
        if not name:
            remedy = "millrace state PRODUCT --key COLUMN=VALUE"
            raise ConfigError("a key is one of a product", key="state", remedy=remedy)
        rows = remembered(lake, known[name], key)
    else:
        facts = [report(lake, pipeline, item) for item in known.values() if name in ("", item.name)]
        rows = [dataclasses.asdict(item) for item in facts if item is not None]
    plain = [{name: _text(value) for name, value in row.items()} for row in rows]
    if as_json:
        print_json(plain)
    elif not plain:
        err.print("nothing is remembered")
    else:
        print_rows(plain, list(plain[0]))


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _pairs(given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text:
            raise ConfigError(f"{text!r} is not COLUMN=VALUE", key="--key", remedy="Write e.g. --key city=Ulm")
    return dict(text.split("=", 1) for text in given)


def _sketches_of(lake: Lake, name: str, is_asked: bool) -> SketchTable | None:
    """The sketches of a table; None if it has none, or if no table is named.

    Raises:
        UnknownTable, BadSketch: it has none, and a sketch was asked.
    """
    from lakehouse.errors import BadSketch
    from lakehouse.sketches.tables import SketchTable

    try:
        return SketchTable(lake.find(name))
    except (UnknownTable, BadSketch):
        if is_asked:
            raise
        return None


def _merged(table: SketchTable, text: str, option: str, groups: Mapping[str, str]) -> Span:
    """The merged windows that ``START`` or ``FROM..TO`` names."""
    first, several, last = text.partition("..")
    if several:
        return table.span(_time(first, option) if first else None, _time(last, option) if last else None, groups)
    start = _time(text, option)
    return table.span(start, start + timedelta(microseconds=1), groups)


def _question(
    item: str | None, quantiles: list[float] | None, rank: float | None, between: str | None, n: int
) -> Question:
    from lakehouse.sketches.kinds import Question

    low = high = None
    if between is not None:
        first, _, last = between.partition(":")
        try:
            low, high = int(first), int(last)
        except ValueError:
            raise ConfigError(f"{between!r} is no range", key="--range", remedy="Write LOW:HIGH, e.g. 10:19") from None
    if not all(0 <= found <= 1 for found in quantiles or ()):
        raise ConfigError("a rank lies from 0 to 1", key="--quantile", remedy="The median is 0.5")
    return Question(item, low, high, tuple(quantiles or ()), rank, n)


def _time(text: str, option: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no time",
            key=option,
            remedy="Write e.g. 2026-01-01T12:00:00Z; UTC where no zone is said",
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _confirmed(answers: list[Answer], table: SketchTable, span: Span) -> list[Answer]:
    """The answers, a "maybe" among them looked up: in the table that the product names, else in bronze."""
    from lakehouse.sketches.kinds import MAYBE, NO, YES, Answer
    from lakehouse.sketches.tables import is_held

    if table.operator != "membership":
        raise ConfigError("only membership answers maybe", key="--confirm", remedy="Leave it out")
    settings = chosen_settings()
    found = []
    for answer in answers:
        if answer.estimate == MAYBE:
            place = table.parameters.get("confirm", "")
            if place:
                held = is_held(Lake.of(settings), place, answer.what, span)
            else:
                held = _in_bronze(settings, table.ref.name, answer.what, span)
            answer = Answer(answer.what, YES if held else NO)
        found.append(answer)
    return found


def _in_bronze(settings: Settings, table: str, item: str, span: Span) -> bool:
    from lakehouse.sketches.tables import is_in_bronze

    pipeline = declared_pipeline(settings)
    if table not in pipeline.products:
        raise ConfigError(f"the pipeline has no product {table!r}", key="--pipeline", remedy="Name the one that has it")
    product = pipeline.products[table]
    with spark_session(settings, "millrace-confirm") as (spark, status):
        status.update("looking it up in bronze …")
        return is_in_bronze(spark, Lake.of(settings), pipeline.sources[product.source], product, item, span)


def _say(table: str, operator: str, span: Span, answers: list[Answer], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "table": table,
                "operator": operator,
                "from": span.start.isoformat(),
                "to": span.end.isoformat(),
                "windows": span.windows,
                "sketches": span.rows,
                "answers": [{key: _plain(value) for key, value in dataclasses.asdict(a).items()} for a in answers],
            }
        )
        return
    numbers = ("estimate", "lower", "upper", "confidence")
    rows = [(a.what, _shown(a.estimate), _shown(a.lower), _shown(a.upper), f"{a.confidence:.1%}") for a in answers]
    print_table(("", *numbers), rows, right=numbers)
    err.print(f"{span.windows} windows, {span.start.isoformat()} to {span.end.isoformat()}", style="dim")


def _plain(value: object) -> object:
    """JSON has no infinity, which a full filter estimates."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.6g}" if value % 1 else f"{value:,.0f}"
