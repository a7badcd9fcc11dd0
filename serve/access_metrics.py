"""Metrics of what is beside the hub: who was refused, SQL statements, look-ups that were read through, webhooks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.lookup import Lookups
from serve.security.gate import Gate
from serve.sql.pool import Workers
from serve.webhooks.fleet import Fleet


class AccessCollector(Collector):
    """Makes metrics of their counters.

    Args:
        gate, workers, lookups, fleet: where to read.
    """

    def __init__(self, gate: Gate, workers: Workers, lookups: Lookups, fleet: Fleet) -> None:
        self._gate = gate
        self._workers = workers
        self._lookups = lookups
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        """All families."""
        for name, text, label, counts in (
            ("millrace_serve_denied", "Requests and connections that were not let in.", "code", self._gate.refused),
            ("millrace_serve_sql", "SQL statements by how they ended.", "outcome", self._workers.counts),
            ("millrace_serve_webhook_deliveries", "Webhook attempts and letters.", "outcome", self._fleet.counts),
            (
                "millrace_serve_read_through",
                "Look-ups in tables that are not in memory.",
                "cache",
                {"hit": self._lookups.hits, "miss": self._lookups.misses},
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield GaugeMetricFamily(
            "millrace_serve_sql_running", "SQL statements that run or wait.", value=self._workers.running
        )
        yield GaugeMetricFamily(
            "millrace_serve_webhooks", "Webhooks that this process runs.", value=self._fleet.running
        )
