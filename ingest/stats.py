"""What a node counts: ``/v1/stats`` as JSON and ``/metrics`` for Prometheus, read from the log's lanes when asked.

Nothing here is touched by the hot path but one histogram observation a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector

from ingest.delivery import Delivery
from ingest.events import Lane
from ingest.log import MessageLog
from ingest.source import UpstreamStatus

_COUNTERS: tuple[tuple[str, str, Callable[[Lane], int]], ...] = (
    ("received", "Events taken from upstreams and senders", lambda lane: lane.received),
    ("acknowledged", "Events that are durable in the message log", lambda lane: lane.durable),
    ("rejected", "Events refused at the border and kept for quarantine", lambda lane: lane.rejected),
    ("published", "Events that Kafka has acknowledged", lambda lane: lane.published),
    ("failed", "Events that Kafka will never take", lambda lane: lane.failed),
    ("gaps", "Reconnects to an upstream that cannot resume", lambda lane: lane.gaps),
)


class NodeStats(MetricCollector):
    """Counts of one node, cumulative over restarts.

    Args:
        node: its id.
        log: its message log.
        delivery: its way to Kafka.
        sources: names of the sources it collects.
        upstreams: their state.
        ready: whether the node is ready.
    """

    def __init__(
        self,
        node: str,
        log: MessageLog,
        delivery: Delivery,
        sources: Sequence[str],
        upstreams: Callable[[], Iterable[UpstreamStatus]],
        ready: Callable[[], bool],
    ) -> None:
        self._node = node
        self._log = log
        self._delivery = delivery
        self._sources = sources
        self._upstreams = upstreams
        self._ready = ready
        self.registry = CollectorRegistry()
        self.registry.register(self)
        commits = Histogram(
            "millrace_collector_commit_seconds",
            "Time from a group's first event until the group is durable",
            registry=self.registry,
            buckets=(0.002, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
        )
        log.notify(observe=commits.observe)

    def stats(self) -> dict[str, Any]:
        """The document of ``/v1/stats``."""
        upstreams = list(self._upstreams())
        recovery = self._log.recovery
        return {
            "node": self._node,
            "ready": self._ready(),
            "sources": {name: self._source(name, upstreams) for name in self._sources},
            "log": {
                "bytes": self._log.used,
                "limit": self._log.limit,
                "full": self._log.full,
                "segments": self._log.segment_count,
                "problem": self._log.problem,
                "in_flight": self._delivery.in_flight,
            },
            "recovery": {
                "clean": recovery.clean,
                "replayed": recovery.to_replay,
                "torn_bytes": recovery.torn_bytes,
                "corrupt": [f"{item.segment}@{item.offset}" for item in recovery.corrupt],
            },
        }

    def _source(self, name: str, upstreams: Sequence[UpstreamStatus]) -> dict[str, Any]:
        lanes = [lane for lane in self._log.lanes() if lane.source == name]
        of_lane = {lane.name for lane in lanes}
        return {
            **{counter: sum(value(lane) for lane in lanes) for counter, _, value in _COUNTERS},
            "in_log": sum(lane.in_log for lane in lanes),
            "upstreams": [_upstream(status) for status in upstreams if status.lane in of_lane],
        }

    def collect(self) -> Iterator[Metric]:
        """Prometheus asks: counters by source and lane, gauges of the log."""
        lanes = self._log.lanes()
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(f"millrace_collector_{name}", text, labels=("source", "lane"))
            for lane in lanes:
                counter.add_metric((lane.source, lane.name), value(lane))
            yield counter
        in_log = GaugeMetricFamily(
            "millrace_collector_in_log", "Events that Kafka has not acknowledged", labels=("source", "lane")
        )
        for lane in lanes:
            in_log.add_metric((lane.source, lane.name), lane.in_log)
        yield in_log
        connected = GaugeMetricFamily(
            "millrace_collector_upstream_connected", "Whether the upstream is connected", labels=("lane",)
        )
        for status in self._upstreams():
            connected.add_metric((status.lane,), float(status.connected))
        yield connected
        yield GaugeMetricFamily("millrace_collector_log_bytes", "Bytes of the message log", float(self._log.used))
        yield GaugeMetricFamily("millrace_collector_log_limit_bytes", "Bound of the log", float(self._log.limit))
        yield GaugeMetricFamily("millrace_collector_ready", "Whether the node is ready", float(self._ready()))

    def describe(self) -> Iterable[Metric]:
        """Names are known without collecting, which needs a running node."""
        return ()


def _upstream(status: UpstreamStatus) -> dict[str, Any]:
    return {
        "lane": status.lane,
        "url": status.url,
        "connected": status.connected,
        "position": status.position,
        "gap_count": status.gap_count,
        "gaps": [{"since": gap.since, "until": gap.until, "reason": gap.reason} for gap in status.gaps],
    }
