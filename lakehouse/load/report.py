"""What a load tells: progress, a report a file in the table ``loads``, the deadline, and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lakehouse.contract.lake import LOADS, PROPERTY_KEY, Lake
from lakehouse.load.files import FileMark

COLUMNS = pa.schema(
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


@dataclass(frozen=True, slots=True)
class FileReport:
    """The result of loading one file.

    Attributes:
        name: path, as found.
        file: fingerprint of its content; empty if it could not be read at all.
        format: ``csv``, ``tsv``, ``jsonl`` or ``parquet``; empty if unknown.
        rows: its rows in bronze, of this and earlier loads.
        rejects: refused rows among them.
        from_row: first row of this load; not 0 for a file that an earlier load had begun.
        seconds: from its opening to its last commit.
        state: ``loaded``; ``already`` (an earlier load or another file brought the rows); ``failed`` (it cannot be
            read to its end); ``refused`` (too many bad rows); ``would load`` (a dry run).
        reason: of a failure or refusal.
        bronze_version: bronze version with its last row of this load; -1 for none.
        started_at, finished_at: microseconds since the epoch.
        mark: of the file that was read, which another may have replaced since; None if it could not be opened.
    """

    name: str
    file: str
    format: str
    bytes: int
    rows: int
    rejects: int
    from_row: int
    seconds: float
    state: str
    reason: str = ""
    bronze_version: int = -1
    started_at: int = 0
    finished_at: int = 0
    mark: FileMark | None = None

    @property
    def ok(self) -> bool:
        """Whether the whole file is in."""
        return self.state in ("loaded", "already", "would load")

    @property
    def new_rows(self) -> int:
        """Rows that this load brought into bronze."""
        return 0 if self.state == "already" else max(0, self.rows - self.from_row)


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress in one file: its path, its size and the bytes read, and the rows read in this load."""

    name: str
    size: int
    read: int
    rows: int


LoadListener = Callable[[LoadProgress | FileReport], None]


@dataclass
class Deadline:
    """The SLA of a load.

    Attributes:
        began: start of the load, seconds since the epoch.
        allowed_s: the longest it may take; None: no SLA.
        total: bytes to read.
        read: bytes read, by file.
    """

    began: float
    allowed_s: float | None
    total: int
    read: dict[str, int] = field(default_factory=dict)
    now: Callable[[], float] = time.time

    @property
    def at(self) -> float | None:
        """The deadline, seconds since the epoch."""
        return None if self.allowed_s is None else self.began + self.allowed_s

    def expected(self) -> float | None:
        """The expected end at the pace up to now, seconds since the epoch; None before the first byte."""
        read = sum(self.read.values())
        if not read:
            return None
        return self.began + (self.now() - self.began) * max(1.0, self.total / read)

    @property
    def in_danger(self) -> bool:
        """Whether it is late, or will be at this pace."""
        if self.at is None:
            return False
        expected = self.expected()
        return self.now() > self.at or (expected is not None and expected > self.at)

    def is_late(self, finished_at: int) -> bool:
        """Whether this end of a file (microseconds since the epoch) is after the deadline."""
        return self.at is not None and finished_at > self.at * 1e6


def append_reports(lake: Lake, load: str, source: str, reports: Sequence[FileReport], deadline: Deadline) -> None:
    """Append the reports of the load with this id to the table ``loads``, which is created if absent."""
    if not reports:
        return
    table = lake.table("silver", LOADS)
    table.create(COLUMNS, {PROPERTY_KEY: "load,name,file"}, "Files given to the batch loader, and the result of each")
    at = None if deadline.at is None else int(deadline.at * 1e6)
    rows = [
        {name: getattr(report, name, None) for name in COLUMNS.names}
        | {"load": load, "source": source, "deadline": at, "late": deadline.is_late(report.finished_at)}
        for report in reports
    ]
    plain = pa.schema([f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in COLUMNS])
    write_deltalake(str(table.path), pa.Table.from_pylist(rows, schema=plain).cast(COLUMNS), mode="append")


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
        if deadline.at is not None and expected is not None:
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
