"""Loads from end to end: files on request, files that arrive in a watched folder, and feeds fetched on a schedule."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lakehouse.contract.lake import LOADS, PROPERTY_KEY, Lake
from lakehouse.contract.pipeline.source import FeedSpec, metrics_file
from lakehouse.errors import CommitFailed, FetchFailed
from lakehouse.load.commit import at_table
from lakehouse.load.fetch import FeedFetcher
from lakehouse.load.files import FeedFile, FileMark, format_of_suffix, is_finished, mark_of
from lakehouse.load.worker import FileReport, LoadJob, LoadListener, LoadProgress, load_files

log = logging.getLogger(__name__)

DONE, FAILED = "done", "failed"
_POLL_S = 0.5
_FILES_AT_ONCE = 5_000
_REPORTS = pa.schema(
    [
        ("load", pa.string()),
        ("source", pa.string()),
        ("name", pa.string()),
        ("file", pa.string()),
        ("format", pa.string()),
        ("bytes", pa.int64()),
        ("rows", pa.int64()),
        ("rejects", pa.int64()),
        ("from_row", pa.int64()),
        ("seconds", pa.float64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("bronze_version", pa.int64()),
        ("started_at", pa.timestamp("us", "UTC")),
        ("finished_at", pa.timestamp("us", "UTC")),
        ("deadline", pa.timestamp("us", "UTC")),
        ("late", pa.bool_()),
    ]
)


@dataclass
class Deadline:
    """The SLA of a load.

    Attributes:
        began: seconds since the epoch.
        allowed_s: the longest it may take; None: no SLA.
        total, read: bytes to read, and read by file.
    """

    began: float
    allowed_s: float | None
    total: int
    read: dict[str, int] = field(default_factory=dict)
    now: Callable[[], float] = time.time

    @property
    def at(self) -> float:
        """The deadline, seconds since the epoch; infinite without an SLA."""
        return math.inf if self.allowed_s is None else self.began + self.allowed_s

    def expected(self) -> float | None:
        """The expected end at the pace up to now, seconds since the epoch; None before the first byte."""
        read = sum(self.read.values())
        if not read:
            return None
        return self.began + (self.now() - self.began) * max(1.0, self.total / read)

    @property
    def in_danger(self) -> bool:
        """Whether it is late, or will be at this pace."""
        return max(self.now(), self.expected() or 0.0) > self.at

    def is_late(self, finished_at: int) -> bool:
        """Whether this end of a file (microseconds since the epoch) is after the deadline."""
        return finished_at > self.at * 1e6


def append_reports(lake: Lake, load: str, source: str, reports: Sequence[FileReport], deadline: Deadline) -> None:
    """Append the reports of the load with this id to the table ``loads``, which is created if absent."""
    if not reports:
        return
    table = lake.table("silver", LOADS)
    table.create(_REPORTS, {PROPERTY_KEY: "load,name,file"}, "Files given to the batch loader, and the result of each")
    at = None if deadline.allowed_s is None else int(deadline.at * 1e6)
    rows = [
        asdict(report) | {"load": load, "source": source, "deadline": at, "late": deadline.is_late(report.finished_at)}
        for report in reports
    ]
    write_deltalake(str(table.path), pa.Table.from_pylist(rows, schema=_REPORTS), mode="append")


class LoaderMetrics(Collector):
    """Metrics of one loader process, in a registry of their own; also a file for node_exporter's textfile collector."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"millrace_loader_{name}", text, ["source", *labels], registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"millrace_loader_{name}", text, ["source"], registry=self.registry)

        self._files = counter("files", "Files by state of their report", "state")
        self._rows = counter("rows", "Rows brought into bronze")
        self._rejects = counter("rejects", "Refused rows among them")
        self._late = counter("late", "Loads that ended after their deadline")
        self._left = gauge("seconds_left", "Time from the expected end of the current load to its deadline")
        self._last = gauge("last_load_seconds", "Duration of the last load")

    def file(self, source: str, report: FileReport) -> None:
        self._files.labels(source, report.state).inc()
        self._rows.labels(source).inc(report.new_rows)
        if report.state != "already":
            self._rejects.labels(source).inc(report.rejects)

    def deadline(self, source: str, deadline: Deadline) -> None:
        """Set the time that the current load has left."""
        expected = deadline.expected()
        if deadline.allowed_s is not None and expected is not None:
            self._left.labels(source).set(deadline.at - expected)

    def ended(self, source: str, seconds: float, late: bool) -> None:
        self._last.labels(source).set(seconds)
        if late:
            self._late.labels(source).inc()

    def collect(self) -> Iterable[Metric]:
        """All metric families, for a served registry."""
        return self.registry.collect()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), self.registry)


@dataclass(frozen=True, slots=True)
class Load:
    """The result of a load.

    Attributes:
        id: in table ``loads``.
        seconds: from the opening of the first file to the last commit.
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
        """Rows that this load brought into bronze."""
        return sum(report.new_rows for report in self.reports)


def load(
    job: LoadJob,
    files: Sequence[FeedFile],
    *,
    workers: int = 1,
    allowed_s: float | None = None,
    notify: LoadListener = lambda _: None,
    metrics: LoaderMetrics | None = None,
) -> Load:
    """Load the files, watch the deadline, and append the reports to table ``loads``.

    Args:
        workers: processes.
        allowed_s: SLA in seconds from now. The loader warns once of a load that will miss it.
        notify: receives progress and each finished file.

    Raises:
        LoaderDied, CommitFailed: see :func:`load_files`. The table gets the reports of the finished files.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    metrics = metrics or LoaderMetrics()
    deadline = Deadline(time.time(), allowed_s, sum(file.size for file in files))
    finished: list[FileReport] = []
    warned = False

    def received(message: LoadProgress | FileReport) -> None:
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
        notify(message)

    def ended(reports: Sequence[FileReport]) -> Load:
        seconds = time.time() - deadline.began
        late = deadline.is_late(int(time.time() * 1e6))
        metrics.ended(job.source.name, seconds, late)
        if not job.trial:
            with at_table(LOADS):
                append_reports(job.lake, name, job.source.name, reports, deadline)
        return Load(name, job.source.name, reports, seconds, late)

    try:
        reports = load_files(job, files, workers=workers, notify=received)
    except BaseException:
        with suppress(CommitFailed):  # if bronze takes no rows, this table may not either
            ended(finished)
        raise
    return ended(reports)


class Inbox:
    """A watched folder: finished files are loaded, then moved to ``done`` or ``failed`` below it.

    A file is finished if its name does not say otherwise (``.part``, ``.tmp``, a leading dot) and neither its size nor
    its time of change differs between two polls that are ``settle_s`` apart. So a sender may write under another name
    and rename, or just write. A crash between a load and the move repeats nothing: the next load finds the file in
    bronze, and moves it. A file that took the name of another during its load stays.

    Files arrive in the folder or in folders below it. ``now`` gives monotonic seconds.
    """

    def __init__(self, folder: Path, settle_s: float = 2.0, now: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._settle_s = settle_s
        self._now = now
        self._seen: dict[Path, tuple[FileMark, float]] = {}

    def finished(self) -> list[FeedFile]:
        """Files that are finished now, oldest first."""
        ready: list[tuple[int, FeedFile]] = []
        seen: dict[Path, tuple[FileMark, float]] = {}
        now = self._now()
        for path in self.paths():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            mark = mark_of(found)
            before, since = self._seen.get(path, (None, now))
            since = since if before == mark else now
            seen[path] = (mark, since)
            if before == mark and now - since >= self._settle_s:
                ready.append((found.st_mtime_ns, FeedFile(path, found.st_size)))
        self._seen = seen
        return [file for _, file in sorted(ready, key=lambda item: (item[0], item[1].path))]

    def put_away(self, reports: Sequence[FileReport]) -> set[Path]:
        """Move the reported files; a failed one gets a ``NAME.reason.txt`` next to it.

        Returns those that stay, because another file took their name during the load; they are loaded next.
        """
        unread = set()
        for report in reports:
            path = Path(report.name)
            target = self._place_for(report)
            self._seen.pop(path, None)
            try:
                path.rename(target)
                mark = mark_of(target.lstat())
            except FileNotFoundError:
                log.warning("%s was removed while it was loaded", path)
                continue
            if report.mark is not None and mark != report.mark and not target.is_symlink():
                unread.add(_given_back(target, path))
            elif not report.ok:
                target.with_name(f"{target.name}.reason.txt").write_text(f"{report.reason}\n", encoding="utf-8")
        return unread

    def paths(self) -> set[Path]:
        """All files that are not put away, whether they have settled or not."""
        away = {self.folder / DONE, self.folder / FAILED}
        return {
            path
            for path in self.folder.rglob("*")
            if path.is_file() and is_finished(path) and not away.intersection(path.parents)
        }

    def _place_for(self, report: FileReport) -> Path:
        folder = self.folder / (DONE if report.ok else FAILED)
        folder.mkdir(exist_ok=True)
        path = Path(report.name)
        target = folder / path.name
        return folder / f"{path.stem}-{report.file[:12]}-{time.time_ns()}{path.suffix}" if target.exists() else target


def _given_back(file: Path, path: Path) -> Path:
    """Move a file back to its name, or to a numbered one if a third file has it by now; returns the new path."""
    try:
        path.hardlink_to(file)  # unlike a rename it replaces nothing
        file.unlink()
    except OSError:  # the name is taken, or the file system has no links
        path = file.rename(path.with_name(f"{path.stem}-{time.time_ns()}{path.suffix}"))
    log.info("%s has replaced a file during its load; it is loaded next", path)
    return path


@dataclass(frozen=True, slots=True)
class FeedResult:
    """The result of checking a feed; ``problem`` says why there is no complete load, and is empty if nothing is new."""

    feed: str
    load: Load | None = None
    problem: str = ""


class LoaderService:
    """Loads until it is stopped. Its metrics are also a file in the lake.

    Args:
        allowed_s: SLA of an inbox's load, from the time that its files are finished; feeds declare their own.
        once: end when all present files are loaded, or all feeds checked whether they are due or not.
    """

    def __init__(
        self, stop: threading.Event, *, workers: int = 1, allowed_s: float | None = None, once: bool = False
    ) -> None:
        self._stop = stop
        self._workers = workers
        self._allowed_s = allowed_s
        self._once = once
        self.metrics = LoaderMetrics()

    def watch(self, job: LoadJob, inbox: Inbox) -> Iterator[Load]:
        """Load what arrives in a folder."""
        left = inbox.paths()
        while not self._stop.is_set():
            if ready := inbox.finished()[:_FILES_AT_ONCE]:
                done = self._load(job, ready, self._allowed_s)
                self._write_metrics(job)
                left -= {file.path for file in ready}
                left |= inbox.put_away(done.reports)
                yield done
            if self._once:
                left &= inbox.paths()  # others may remove files
                if not left:
                    return
            self._stop.wait(_POLL_S)

    def fetch(self, jobs: Sequence[LoadJob]) -> Iterator[FeedResult]:
        """Check every feed of the jobs' sources when it is due, and load what is new."""
        fetchers = {job.source.name: FeedFetcher(job.lake, job.source.name, stop=self._stop) for job in jobs}
        while not self._stop.is_set():
            for job in jobs:
                fetcher = fetchers[job.source.name]
                for feed in job.source.feeds:
                    if not self._stop.is_set() and (self._once or fetcher.due(feed) <= 0):
                        found = self._check(job, fetcher, feed)
                        self._write_metrics(job)
                        yield found
            if self._once:
                return
            self._stop.wait(_POLL_S)

    def _check(self, job: LoadJob, fetcher: FeedFetcher, feed: FeedSpec) -> FeedResult:
        try:
            download = fetcher.fetch(feed)
        except FetchFailed as error:
            log.warning("%s", error)
            return FeedResult(feed.name, problem=error.problem)
        if download is None:
            return FeedResult(feed.name)
        file = FeedFile(download.path, download.path.stat().st_size)
        allowed_s = feed.sla_ms / 1000 - (time.time() - download.met_at) if feed.sla else None
        done = self._load(replace(job, kind=_format_of(feed, job)), [file], allowed_s)
        if done.ok or all(report.state in ("failed", "refused") for report in done.reports):
            # A file that cannot be read is not fetched again until it changes.
            fetcher.loaded(feed, download)
        return FeedResult(feed.name, done, "" if done.ok else done.reports[0].reason)

    def _load(self, job: LoadJob, files: Sequence[FeedFile], allowed_s: float | None) -> Load:
        return load(job, files, workers=self._workers, allowed_s=allowed_s, metrics=self.metrics)

    def _write_metrics(self, job: LoadJob) -> None:
        self.metrics.write(job.lake.state / "run" / metrics_file(job.node))


def _format_of(feed: FeedSpec, job: LoadJob) -> str:
    """The declared format, else by the address: the fetched file has another name."""
    path = Path(feed.url.partition("?")[0].lower().removesuffix(".gz"))
    return feed.format if feed.format != "auto" else format_of_suffix(path.suffix) or job.kind
