"""A gate for rows that are about to be committed: what a batch loader asks before it writes to bronze."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from lakehouse.contract.pipeline import Source
from lakehouse.quality.engine import Engine, Finding
from lakehouse.quality.frame import asked_of
from lakehouse.quality.subject import events_subject


@dataclass(frozen=True, slots=True)
class GateResult:
    """Whether a batch may be committed.

    Attributes:
        source: whose rows they are.
        rows: how many were looked at.
        findings: one for each expectation: those on events tell how many rows the stream will quarantine or note.
    """

    source: str
    rows: int
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether everything that must be met is."""
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        """What must be met and is not: expectations of the table, and events that would halt the stream."""
        return tuple(finding for finding in self.findings if finding.blocking and not finding.success)

    def __str__(self) -> str:
        said = "; ".join(f"{f.expectation}: {f.observed or f'{f.unexpected} of {f.total} rows'}" for f in self.failed)
        return f"{self.source}: {self.rows} rows " + (f"do not pass: {said}" if said else "pass")


def gate(table: pa.Table, source: Source, *, now: datetime | None = None) -> GateResult:
    """Look at bronze rows before they are committed. Starts no JVM; the first call imports the library (some 3 s).

    Args:
        table: rows of bronze's columns.
        source: whose ``table_expectations`` and ``expectations`` they are to meet.

    Raises:
        QualityProblem: an expectation cannot be evaluated.
    """
    asked = asked_of(source.checks, source, gate=True)
    if not asked:
        return GateResult(source.name, table.num_rows)
    subject = events_subject(source, table, -1, "before it is committed")
    findings = Engine(now=now or datetime.now(UTC)).look(source.name, subject, asked)
    return GateResult(source.name, table.num_rows, tuple(findings))
