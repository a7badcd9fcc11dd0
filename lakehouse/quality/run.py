"""``millrace quality``: expectations of tables and batches, looked at, reported and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.quality.engine import Engine, Finding
from lakehouse.quality.frame import Asked, asked_of
from lakehouse.quality.history import record
from lakehouse.quality.subject import Subject, bronze_subject, product_subject
from lakehouse.quality.unknown import sample, unknown_fields

Verdicts = Callable[[Source, Subject, Sequence[Asked]], Any]  # a frame of them: lakehouse.quality.onspark.OnSpark


@dataclass(frozen=True)
class Looked:
    """One table or batch and what was found.

    Attributes:
        subject: what was looked at.
        findings: one for each expectation.
        unknown: fields of its payloads that the source's schema does not have, and in how many of a sample.
    """

    subject: Subject
    findings: tuple[Finding, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything that must be met is."""
        return all(finding.success or not finding.blocking for finding in self.findings)


def look(
    lake: Lake,
    pipeline: Pipeline,
    names: Sequence[str] = (),
    *,
    batch: str = "",
    report: Path | None = None,
    keep: bool = True,
    verdicts: Verdicts | None = None,
    step: Callable[[str], None] = lambda _: None,
    now: datetime | None = None,
) -> list[Looked]:
    """Look at tables.

    Args:
        names: sources and products; none: all that expect anything and exist.
        batch: of sources: ``latest``, a version or ``FROM..TO`` instead of the whole table.
        report: folder for the HTML report.
        keep: whether findings go to table ``quality``.
        verdicts: evaluates predicates on sources in place of DuckDB.
        step: told what is being done.

    Raises:
        UnknownTable: neither a source nor a product.
        QualityProblem: a table cannot be looked at.
    """
    at = now or datetime.now(UTC)
    chosen = list(_chosen(lake, pipeline, names, whole=not batch))
    step("starting great-expectations")
    engine = Engine(report, at)
    found: list[Looked] = []
    for name in chosen:
        step(f"looking at {name}")
        found.append(_look_at(lake, pipeline, name, batch, engine, verdicts))
    if report is not None:
        step("writing the report")
        engine.write_report()
    if keep:
        record(lake, at, [(looked.subject, looked.findings) for looked in found])
    return found


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


def _look_at(
    lake: Lake, pipeline: Pipeline, name: str, batch: str, engine: Engine, verdicts: Verdicts | None
) -> Looked:
    if name not in pipeline.sources:
        product = pipeline.products[name]
        subject = product_subject(lake, product)
        asked = asked_of(product.checks)
        return Looked(subject, tuple(engine.look(name, subject, asked)))
    source = pipeline.sources[name]
    subject = bronze_subject(lake, source, batch)
    asked = asked_of(source.checks, source)
    title = name if not subject.batch else f"{name} {subject.batch}"
    there = [item for item in asked if verdicts and item.check.sql]
    here = [item for item in asked if item not in there]
    findings = engine.look(title, subject, here)
    if verdicts and there:
        findings += engine.check(f"{title} by Spark", name, verdicts(source, subject, there), there)
    return Looked(subject, tuple(findings), unknown_fields(sample(lake.bronze(name)), source))
