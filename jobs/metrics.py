"""``/metrics`` of processes that have no HTTP of their own, on the loopback address.

A Spark driver measures nothing on the way of an event but the plain counts of :mod:`lakehouse.counts`. Each scrape asks
for the rest: Spark's report of each query's last batch, and the newest entry of each table's log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import port_taken
from lakehouse.contract.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
_PATIENCE_S = 5.0  # a JVM that answers later is told of as one that does not
_AHEAD = ("maxOffsetsBehindLatest", "numBytesOutstanding")


class Counts(Collector):
    """A counter by source, read from a mapping when somebody scrapes.

    Args:
        name: of the metric, without ``_total``.
        counts: by source.
    """

    def __init__(self, name: str, text: str, counts: Callable[[], Mapping[str, int]]) -> None:
        self._name = name
        self._text = text
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=["source"])
        for source, count in dict(self._counts()).items():
            family.add_metric([source], count)
        yield family


def relay_counts(prefix: str, counts: Mapping[str, Counter[str]], *names: str) -> list[Counts]:
    """Metrics ``PREFIX_NAME`` of a :class:`ingest.relay.TopicRelay`."""

    def values(name: str) -> dict[str, int]:
        return {source: found[name] for source, found in counts.items()}

    return [Counts(f"{prefix}_{name}", f"Records {name.replace('_', ' ')}", partial(values, name)) for name in names]


@contextmanager
def metrics_server(port: int, *collectors: Collector) -> Iterator[str]:
    """Serve the metrics of the collectors and of the process meanwhile; gives the URL.

    Args:
        port: 0: any free one.

    Raises:
        EnvironmentProblem: the port is taken.
    """
    registry = CollectorRegistry()
    for own in (ProcessCollector, PlatformCollector, GCCollector):
        own(registry=registry)
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, HOST, registry)
    except OSError as error:
        raise port_taken(HOST, port, "metrics_port", error) from None
    try:
        yield f"http://{HOST}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class DriverCollector(Collector):
    """Metrics of the queries and the tables, made when somebody asks.

    Args:
        progress: Spark's reports of the last batch of each query that runs (``StreamingQueryProgress`` as JSON).
        now: seconds since the epoch.
    """

    def __init__(
        self, progress: Callable[[], Sequence[Mapping[str, Any]]], lake: Lake, now: Callable[[], float] = time.time
    ) -> None:
        self._progress = progress
        self._lake = lake
        self._now = now
        # One thread for good: Spark keeps a connection, and a thread of the JVM, for each Python thread that asks.
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    def collect(self) -> Iterator[Metric]:
        up = 1
        try:
            reports = self._asker.submit(self._progress).result(_PATIENCE_S)
        except Exception:  # whatever it is, the metric says that Spark does not answer
            log.warning("Spark does not say how its queries are", exc_info=True)
            up, reports = 0, ()
        yield GaugeMetricFamily("millrace_lakehouse_spark_up", "Whether Spark answers.", value=up)
        yield from self._of_queries(reports)
        yield from self._of_tables()

    def describe(self) -> Iterator[Metric]:
        """Names are known without collecting."""
        return iter(())

    def close(self) -> None:
        self._asker.shutdown(cancel_futures=True)

    def _of_queries(self, reports: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"millrace_lakehouse_{name}", text, labels=["query", *labels])

        batch = gauge("batch", "Number of the query's last batch.")
        rows = gauge("batch_rows", "Rows of its last batch.")
        seconds = gauge("batch_seconds", "What its last batch took, by step as Spark names it.", "step")
        age = gauge("batch_age_seconds", "Time since its last batch began.")
        ahead = gauge("ahead", "What its source still holds for it, by the source's own measure.", "source", "measure")
        state = gauge("state_rows", "Rows of state that it keeps.", "operator")
        for report in reports:
            name = str(report.get("name") or report.get("id"))
            batch.add_metric([name], report["batchId"])
            rows.add_metric([name], report["numInputRows"])
            age.add_metric([name], max(0.0, self._now() - datetime.fromisoformat(report["timestamp"]).timestamp()))
            for step, ms in report.get("durationMs", {}).items():
                seconds.add_metric([name, step], ms / 1000)
            for number, source in enumerate(report.get("sources", ())):
                found = source.get("metrics") or {}
                for measure in _AHEAD:
                    if measure in found:
                        ahead.add_metric([name, str(number), measure], float(found[measure]))
            for number, operator in enumerate(report.get("stateOperators", ())):
                state.add_metric([name, f"{number}-{operator['operatorName']}"], operator["numRowsTotal"])
        yield from (batch, rows, seconds, age, ahead, state)

    def _of_tables(self) -> Iterator[Metric]:
        version = GaugeMetricFamily("millrace_lakehouse_table_version", "Newest version.", labels=["layer", "table"])
        age = GaugeMetricFamily(
            "millrace_lakehouse_table_age_seconds", "Time since its last commit.", labels=["layer", "table"]
        )
        for table in self._lake.tables():
            found = DeltaLog(table.path)
            number = found.newest()
            written = found.written_at(number)
            if written is None:  # removed since, or being made
                continue
            version.add_metric([table.layer, table.name], number)
            age.add_metric([table.layer, table.name], max(0.0, self._now() - written))
        yield from (version, age)


@contextmanager
def serve_metrics(spark: SparkSession, lake: Lake, port: int) -> Iterator[str]:
    """Serve ``/metrics`` on the loopback address meanwhile; gives its URL.

    Args:
        spark: the session; its JVM is measured too.
        port: 0: any free one.

    Raises:
        EnvironmentProblem: the port is taken.
    """
    from jobs.lineage import DROPPED
    from lakehouse.counts import EVENTS, RUNNING, TOO_LATE
    from lakehouse.maintain.report import RETENTION_SHARE

    def progress() -> list[Mapping[str, Any]]:
        found = (query.lastProgress for query in list(RUNNING.values()))
        return [report for report in found if report is not None]

    assert spark._jvm is not None
    pid = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    jvm = ProcessCollector(namespace="jvm", pid=lambda: pid, registry=None)
    queries = DriverCollector(progress, lake)
    counted = (DROPPED, EVENTS, RETENTION_SHARE, TOO_LATE)
    with closing(queries), metrics_server(port, jvm, queries, *counted) as url:
        yield url
