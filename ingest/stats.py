"""What a node counts: ``/v1/stats`` as JSON and ``/metrics`` for Prometheus, read from the log's lanes when asked.

Nothing here is touched by the hot path but one histogram observation a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector

from ingest.delivery import Delivery
from ingest.events import Lane
from ingest.limits import Gate
from ingest.log import MessageLog
from ingest.shed import Shedder
from ingest.source import UpstreamStatus

_COUNTERS: tuple[tuple[str, str, Callable[[Lane], int]], ...] = (
    ("received", "Events taken from upstreams and senders", lambda lane: lane.received),
    ("acknowledged", "Events that are durable in the message log", lambda lane: lane.durable),
    ("rejected", "Events refused at the border and kept for quarantine", lambda lane: lane.rejected),
    ("published", "Events that Kafka has acknowledged", lambda lane: lane.published),
    ("shed", "Events left out because there were too many", lambda lane: lane.shed),
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
        gate: of its HTTP.

    Attributes:
        shedders: by source, of those that may leave events out.
        gate: of its HTTP.
    """

    def __init__(
        self,
        node: str,
        log: MessageLog,
        delivery: Delivery,
        sources: Sequence[str],
        upstreams: Callable[[], Iterable[UpstreamStatus]],
        ready: Callable[[], bool],
        gate: Gate | None = None,
    ) -> None:
        self._node = node
        self._log = log
        self._delivery = delivery
        self._sources = sources
        self._upstreams = upstreams
        self._ready = ready
        self.gate = gate or Gate()
        self.shedders: Mapping[str, Shedder] = {}
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
                "corrupt": [str(item) for item in recovery.corrupt],
                "torn": str(recovery.torn or ""),
            },
        }

    def _source(self, name: str, upstreams: Sequence[UpstreamStatus]) -> dict[str, Any]:
        lanes = [lane for lane in self._log.lanes() if lane.source == name]
        of_lane = {lane.name for lane in lanes}
        return {
            **{counter: sum(value(lane) for lane in lanes) for counter, _, value in _COUNTERS},
            "in_log": sum(lane.in_log for lane in lanes),
            "not_kept": self.gate.not_kept[name],
            "refused_requests": {code: n for (source, code), n in self.gate.refused.items() if source == name},
            "shed_share": self.shedders[name].share if name in self.shedders else 0.0,
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
        counts = GaugeMetricFamily(
            "millrace_collector_upstream_count", "What this kind of collector counts", labels=("lane", "what")
        )
        for status in self._upstreams():
            for what, count in status.counts.items():
                counts.add_metric((status.lane, what), float(count))
        yield counts
        share = GaugeMetricFamily("millrace_collector_shed_share", "Share of events left out now", labels=("source",))
        for name, shedder in self.shedders.items():
            share.add_metric((name,), shedder.share)
        yield share
        yield from self._of_gate()
        yield GaugeMetricFamily("millrace_collector_log_bytes", "Bytes of the message log", float(self._log.used))
        yield GaugeMetricFamily("millrace_collector_log_limit_bytes", "Bound of the log", float(self._log.limit))
        yield GaugeMetricFamily("millrace_collector_ready", "Whether the node is ready", float(self._ready()))

    def _of_gate(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "millrace_collector_refused_requests", "Requests refused whole, of which nothing is kept",
            labels=("source", "code"),
        )  # fmt: skip
        for labels, count in self.gate.refused.items():
            refused.add_metric(labels, count)
        yield refused
        not_kept = CounterMetricFamily(
            "millrace_collector_not_kept", "Refused events beyond what is kept of them", labels=("source",)
        )
        for source, count in self.gate.not_kept.items():
            not_kept.add_metric((source,), count)
        yield not_kept
        yield GaugeMetricFamily("millrace_collector_connections", "Open connections by HTTP", self.gate.connections)

    def describe(self) -> Iterable[Metric]:
        """Names are known without collecting, which needs a running node."""
        return ()


def _upstream(status: UpstreamStatus) -> dict[str, Any]:
    return {
        "lane": status.lane,
        "url": status.url,
        "connected": status.connected,
        "position": status.position,
        "cursor": status.cursor,
        "ended": status.ended,
        "gap_count": status.gap_count,
        "gaps": [{"since": gap.since, "until": gap.until, "reason": gap.reason} for gap in status.gaps],
        **({"counts": dict(status.counts)} if status.counts else {}),
    }
