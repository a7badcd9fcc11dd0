"""Metrics of a collecting node: ``/v1/stats`` as JSON and ``/metrics`` for Prometheus.

They are read from the log's lanes on request. The hot path only observes one histogram value a commit group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector

from ingest.border.shed import Shedder
from ingest.collectors import UpstreamStatus
from ingest.delivery import KafkaDelivery
from ingest.intake import RequestIntake
from ingest.log.message_log import MessageLog
from ingest.log.segments import SourceLane

_Value = tuple[tuple[str, ...], float]

_COUNTERS: tuple[tuple[str, str, Callable[[SourceLane], int]], ...] = (
    ("received", "Events taken from upstreams and senders", lambda lane: lane.received),
    ("acknowledged", "Events that are durable in the message log", lambda lane: lane.durable),
    ("rejected", "Events refused at the border and kept for quarantine", lambda lane: lane.rejected),
    ("published", "Events that Kafka has acknowledged", lambda lane: lane.published),
    ("shed", "Events dropped by load shedding", lambda lane: lane.shed),
    ("failed", "Events that Kafka will never take", lambda lane: lane.failed),
    ("gaps", "Reconnects to an upstream that cannot resume", lambda lane: lane.gaps),
)


class CollectedSources(Protocol):
    """What a node collects; it may change at any time. ``shedders``: by source, of sources that may shed events."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shedders(self) -> Mapping[str, Shedder]: ...

    def statuses(self) -> Iterable[UpstreamStatus]: ...


class NodeStats(MetricCollector):
    """Counts of one node, cumulative over restarts.

    Args:
        requests: its gate, and whether it is ready.
    """

    def __init__(
        self, node: str, log: MessageLog, delivery: KafkaDelivery, sources: CollectedSources, requests: RequestIntake
    ) -> None:
        self._node = node
        self._log = log
        self._delivery = delivery
        self._sources = sources
        self._requests = requests
        self._gate = requests.gate
        self.registry = CollectorRegistry()
        self.registry.register(self)
        commits = Histogram(
            "millrace_collector_commit_seconds",
            "Time from a group's first event until the group is durable",
            registry=self.registry,
            buckets=(0.002, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
        )
        log.notify(observe=commits.observe)

    @property
    def replay(self) -> tuple[int, int]:
        """Events of an earlier run that are still to be sent to Kafka, and their initial number."""
        return self._delivery.to_replay, self._log.recovery.to_replay

    def stats(self) -> dict[str, Any]:
        """The document of ``/v1/stats``."""
        upstreams = list(self._sources.statuses())
        recovery = self._log.recovery
        return {
            "node": self._node,
            "ready": not self._requests.not_ready(),
            "sources": {name: self._source(name, upstreams) for name in self._sources.names},
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
            "not_kept": self._gate.not_kept[name],
            "refused_requests": {code: n for (source, code), n in self._gate.refused.items() if source == name},
            "shed_share": self._sources.shedders[name].share if name in self._sources.shedders else 0.0,
            "upstreams": [_upstream(status) for status in upstreams if status.lane in of_lane],
        }

    def collect(self) -> Iterator[Metric]:
        lanes, upstreams, gate = self._log.lanes(), list(self._sources.statuses()), self._gate
        by_lane = ("source", "lane")
        for name, text, value in _COUNTERS:
            yield _counter(name, text, by_lane, [((lane.source, lane.name), value(lane)) for lane in lanes])
        in_log = [((lane.source, lane.name), lane.in_log) for lane in lanes]
        yield _gauge("in_log", "Events that Kafka has not acknowledged", by_lane, in_log)
        connected = [((status.lane,), status.connected) for status in upstreams]
        yield _gauge("upstream_connected", "Whether the upstream is connected", ("lane",), connected)
        counts = [((status.lane, what), n) for status in upstreams for what, n in status.counts.items()]
        yield _gauge("upstream_count", "Further counts of this kind of collector", ("lane", "what"), counts)
        shares = [((name,), shedder.share) for name, shedder in self._sources.shedders.items()]
        yield _gauge("shed_share", "Share of events shed now", ("source",), shares)
        refused = list(gate.refused.items())
        yield _counter("refused_requests", "Requests refused as a whole, not kept", ("source", "code"), refused)
        not_kept = [((source,), n) for source, n in gate.not_kept.items()]
        yield _counter("not_kept", "Refused events that were only counted", ("source",), not_kept)
        yield _gauge("connections", "Open HTTP connections", (), [((), gate.connections)])
        yield _gauge("log_bytes", "Bytes of the message log", (), [((), self._log.used)])
        yield _gauge("log_limit_bytes", "Limit of the message log", (), [((), self._log.limit)])
        yield _gauge("ready", "Whether the node is ready", (), [((), not self._requests.not_ready())])

    def describe(self) -> Iterable[Metric]:
        """Nothing: names must be known without collecting, which needs a running node."""
        return ()


def _counter(name: str, text: str, labels: Sequence[str], values: Sequence[_Value]) -> Metric:
    return _filled(CounterMetricFamily(f"millrace_collector_{name}", text, labels=labels), values)


def _gauge(name: str, text: str, labels: Sequence[str], values: Sequence[_Value]) -> Metric:
    return _filled(GaugeMetricFamily(f"millrace_collector_{name}", text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Sequence[_Value]) -> Metric:
    for labels, value in values:
        family.add_metric(labels, float(value))
    return family


def _upstream(status: UpstreamStatus) -> dict[str, Any]:
    found = asdict(status)
    return found if found["counts"] else {name: value for name, value in found.items() if name != "counts"}
