"""One load from end to end: files, workers, deadline, report."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from lakehouse.contract.lake import LOADS
from lakehouse.feeds.commit import at_table
from lakehouse.feeds.errors import CommitFailed
from lakehouse.feeds.files import FeedFile
from lakehouse.feeds.metrics import LoaderMetrics
from lakehouse.feeds.model import FileReport, Job, Step, Tell
from lakehouse.feeds.report import Deadline, keep
from lakehouse.feeds.run import load_files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What became of a load.

    Attributes:
        id: of the load, in table ``loads``.
        source: whose rows they are.
        reports: a report a file.
        seconds: from the first file's opening to the last commit.
        late: whether it ended after its deadline.
    """

    id: str
    source: str
    reports: Sequence[FileReport]
    seconds: float
    late: bool

    @property
    def ok(self) -> bool:
        """Whether every file is in."""
        return all(report.ok for report in self.reports)

    @property
    def new_rows(self) -> int:
        """Rows that this load has brought into bronze."""
        return sum(report.rows - report.from_row for report in self.reports if report.state != "already")


def load(
    job: Job,
    files: Sequence[FeedFile],
    *,
    workers: int = 1,
    allowed_s: float | None = None,
    tell: Tell = lambda _: None,
    metrics: LoaderMetrics | None = None,
) -> Load:
    """Load the files, watch the deadline, keep the report.

    Args:
        workers: processes.
        allowed_s: SLA in seconds from now; a load that will not make it is warned of once, and named late.
        metrics: counted into; written by who made them.

    Raises:
        LoaderDied: a worker process was killed.
        CommitFailed: bronze does not take rows.
            With either, the files that were finished are reported in the table all the same.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    metrics = metrics or LoaderMetrics()
    deadline = Deadline(time.time(), allowed_s, sum(file.size for file in files))
    finished: list[FileReport] = []
    warned = False

    def heard(message: Step | FileReport) -> None:
        nonlocal warned
        if isinstance(message, FileReport):
            finished.append(message)
            deadline.read[message.name] = message.bytes
            metrics.file(job.source.name, message)
        else:
            deadline.read[message.name] = message.read
        metrics.deadline(job.source.name, deadline)
        if deadline.in_danger and not warned:
            warned = True
            log.warning(
                "load %s of %s will miss its deadline (%s allowed)", name, job.source.name, f"{allowed_s:.0f} s"
            )
        tell(message)

    def ended(reports: Sequence[FileReport]) -> Load:
        seconds = time.time() - deadline.began
        late = deadline.is_late(int(time.time() * 1e6))
        metrics.ended(job.source.name, seconds, late)
        if not job.trial:
            with at_table(LOADS):
                keep(job.lake, name, job.source.name, reports, deadline)
        return Load(name, job.source.name, reports, seconds, late)

    try:
        reports = load_files(job, files, workers=workers, tell=heard)
    except BaseException:
        with suppress(CommitFailed):  # where bronze takes nothing, this table may not either
            ended(finished)
        raise
    return ended(reports)
