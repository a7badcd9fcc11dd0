"""Checks of tables and batches for ``millrace quality``, the gate before a commit, and table ``quality``.

Table ``quality`` keeps the findings of every run; it is served like any other table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract.lake import PROPERTY_KEY, QUALITY, Lake, UnknownTable
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.storage import spark_uri
from lakehouse.quality.engine import EVENT, BoundCheck, ExpectationEngine, Finding, bound_checks
from lakehouse.quality.notes import sample, unknown_fields
from lakehouse.quality.subject import Subject, bronze_subject, events_subject, product_subject

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]
    from pyspark.sql import SparkSession

KEEP = timedelta(days=90)
COLUMNS = pa.schema(
    [
        ("at", pa.timestamp("us", "UTC")),
        ("table", pa.string()),
        ("layer", pa.string()),
        ("version", pa.int64()),
        ("batch", pa.string()),
        ("expectation", pa.string()),
        ("kind", pa.string()),
        ("expected", pa.string()),
        ("action", pa.string()),
        ("success", pa.bool_()),
        ("blocking", pa.bool_()),
        ("total", pa.int64()),
        ("unexpected", pa.int64()),
        ("observed", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class QualityRun:
    """What a run checks and where its findings go.

    Attributes:
        names: sources and products; none: all that have expectations and exist.
        batch: of sources: ``latest``, a version or ``FROM..TO`` instead of the whole table.
        report: folder for the HTML report.
        keep: whether findings go to table ``quality``.
        spark: evaluates predicates on sources in place of DuckDB.
        now: time of the run; None: the present.
    """

    names: Sequence[str] = ()
    batch: str = ""
    report: Path | None = None
    keep: bool = True
    spark: SparkSession | None = None
    now: datetime | None = None


@dataclass(frozen=True)
class TableCheck:
    """One table or batch and its findings.

    Attributes:
        unknown: fields of payloads that the source's schema lacks, and their number in a sample.
    """

    subject: Subject
    findings: tuple[Finding, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Blocking expectations that are not met."""
        return tuple(finding for finding in self.findings if finding.blocking and not finding.success)

    @property
    def passed(self) -> bool:
        """Whether every blocking expectation is met."""
        return not self.failed

    def __str__(self) -> str:
        said = "; ".join(f"{f.expectation}: {f.observed or f'{f.unexpected} of {f.total} rows'}" for f in self.failed)
        return f"{self.subject.table} does not pass: {said}" if said else f"{self.subject.table} passes"


def check_tables(lake: Lake, pipeline: Pipeline, run: QualityRun | None = None) -> list[TableCheck]:
    """Check tables.

    Raises:
        UnknownTable: neither a source nor a product.
        QualityProblem: a table cannot be checked.
    """
    run = run or QualityRun()
    at = run.now or datetime.now(UTC)
    chosen = list(_chosen(lake, pipeline, run.names, whole=not run.batch))
    engine = ExpectationEngine(run.report, at)
    found = [
        _check_source(lake, pipeline.sources[name], run, engine)
        if name in pipeline.sources
        else _check_product(lake, pipeline, name, engine)
        for name in chosen
    ]
    engine.write_report()
    if run.keep:
        _append(lake, at, found)
    return found


def gate(table: pa.Table, source: Source) -> TableCheck:
    """Check bronze rows before they are committed. Starts no JVM; the first call imports the library (some 3 s).

    Blocking are the source's ``table_expectations``, and ``expectations`` that would halt the stream; the findings of
    the others tell how many rows the stream will quarantine or note.

    Args:
        table: rows of bronze's columns.

    Raises:
        QualityProblem: an expectation cannot be evaluated.
    """
    subject = events_subject(source, table, -1, "before it is committed")
    asked = bound_checks(source.checks, source, gate=True)
    return TableCheck(subject, tuple(ExpectationEngine().check_subject(source.name, subject, asked)) if asked else ())


def _chosen(lake: Lake, pipeline: Pipeline, names: Sequence[str], *, whole: bool) -> Iterable[str]:
    known = [*pipeline.sources, *pipeline.products]
    for name in names:
        if name not in known:
            raise UnknownTable(name, known)
    if names:
        return names
    sources = [n for n, s in pipeline.sources.items() if (s.checks or s.expectations) and lake.bronze(n).exists()]
    products = [n for n, p in pipeline.products.items() if p.checks and lake.table(p.layer, n).exists()]
    return [*sources, *(products if whole else ())]


def _check_product(lake: Lake, pipeline: Pipeline, name: str, engine: ExpectationEngine) -> TableCheck:
    product = pipeline.products[name]
    subject = product_subject(lake, product)
    return TableCheck(subject, tuple(engine.check_subject(name, subject, bound_checks(product.checks))))


def _check_source(lake: Lake, source: Source, run: QualityRun, engine: ExpectationEngine) -> TableCheck:
    subject = bronze_subject(lake, source, run.batch)
    asked = bound_checks(source.checks, source)
    title = source.name if not subject.batch else f"{source.name} {subject.batch}"
    by_spark = [item for item in asked if run.spark and item.check.sql]
    findings = engine.check_subject(title, subject, [item for item in asked if item not in by_spark])
    if run.spark and by_spark:
        verdicts = spark_verdicts(run.spark, source, subject, by_spark)
        findings += engine.check(f"{title} by Spark", source.name, verdicts, by_spark)
    return TableCheck(subject, tuple(findings), unknown_fields(sample(lake.bronze(source.name)), source))


def spark_verdicts(spark: SparkSession, source: Source, subject: Subject, asked: Sequence[BoundCheck]) -> pd.DataFrame:
    """A column of verdicts for each predicate, as the stream evaluates it; null if it does not apply to the row."""
    from pyspark.sql import functions as F

    from lakehouse.silver.conform import conform, met

    rows = conform(spark.read.parquet(*map(spark_uri, subject.files)), replace(source, expectations={}))
    fits = F.col("reason").isNull()
    columns = [
        (F.when(fits, met(item.check.sql)) if item.kind == EVENT else met(item.check.sql)).alias(item.computed)
        for item in asked
    ]
    return rows.select(*columns).toArrow().to_pandas()


def _append(lake: Lake, at: datetime, found: Sequence[TableCheck]) -> None:
    """Append a run's findings; remove those older than :data:`KEEP`."""
    rows = [
        {"at": at}
        | {name: getattr(check.subject, name) for name in COLUMNS.names[1:5]}
        | {name: getattr(finding, name) for name in COLUMNS.names[5:]}
        for check in found
        for finding in check.findings
    ]
    if not rows:
        return
    table = lake.table("gold", QUALITY)
    table.create(
        COLUMNS, {PROPERTY_KEY: "at,table,batch,expectation"}, "Findings of the expectations of tables and batches"
    )
    delta = DeltaTable(str(table.path))
    write_deltalake(delta, pa.Table.from_pylist(rows, schema=COLUMNS), mode="append")
    oldest = (at - KEEP).isoformat()
    old = delta.to_pyarrow_dataset().count_rows(filter=pa.compute.field("at") < pa.scalar(at - KEEP, COLUMNS[0].type))
    if old:
        delta.delete(f"at < arrow_cast('{oldest}', 'Timestamp(Microsecond, Some(\"UTC\"))')")
