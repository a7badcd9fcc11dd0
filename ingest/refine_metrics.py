"""What a refiner counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector

from ingest.refine import RefineNode


class RefineMetrics(MetricCollector):
    """Counts of a refiner for Prometheus.

    Args:
        node: whose.
    """

    def __init__(self, node: RefineNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Events by source and what became of them."""
        counter = CounterMetricFamily("millrace_refine_events", "Events refined", labels=("source", "what"))
        for source, counts in self._node.counts.items():
            for what, count in counts.items():
                counter.add_metric((source, what), count)
        yield counter

    def describe(self) -> Iterable[Metric]:
        """Names are known without collecting."""
        return ()


@contextmanager
def serve_metrics(node: RefineNode, port: int) -> Iterator[None]:
    """Serve ``/metrics`` on the loopback address meanwhile; port 0: do not."""
    if not port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(RefineMetrics(node))
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
