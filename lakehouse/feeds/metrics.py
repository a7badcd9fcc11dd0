"""What the loader counts, for Prometheus: as a text file that node_exporter's textfile collector reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lakehouse.feeds.model import FileReport
from lakehouse.feeds.report import Deadline


class LoaderMetrics(Collector):
    """Counters of one loader process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"millrace_loader_{name}", text, ["source", *labels], registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"millrace_loader_{name}", text, ["source"], registry=self.registry)

        self._files = counter("files", "Files by what became of them", "state")
        self._rows = counter("rows", "Rows brought into bronze")
        self._rejects = counter("rejects", "Of those, rows that were refused")
        self._late = counter("late", "Loads that ended after their deadline")
        self._left = gauge("seconds_left", "Time from the expected end of the load in hand to its deadline")
        self._last = gauge("last_load_seconds", "How long the last load took")

    def file(self, source: str, report: FileReport) -> None:
        """Count a finished file."""
        self._files.labels(source, report.state).inc()
        if report.state != "already":
            self._rows.labels(source).inc(max(0, report.rows - report.from_row))
            self._rejects.labels(source).inc(report.rejects)

    def deadline(self, source: str, deadline: Deadline) -> None:
        """Tell how the load in hand stands."""
        expected = deadline.expected()
        if deadline.at is not None and expected is not None:
            self._left.labels(source).set(deadline.at - expected)

    def ended(self, source: str, seconds: float, late: bool) -> None:
        """Count a load."""
        self._last.labels(source).set(seconds)
        if late:
            self._late.labels(source).inc()

    def collect(self) -> Iterable[Metric]:
        """All families, for a registry that is served."""
        return self.registry.collect()

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(path), self.registry)
