"""Prometheus metrics of the serving tier. Read from the hub when scraped: the hot path counts in plain integers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.hub import Hub


class HubCollector(Collector):
    """Makes metrics of a hub's counters.

    Args:
        hub: where to read.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """All families."""
        counters = self._hub.counters
        yield GaugeMetricFamily("millrace_serve_subscribers", "Subscribers connected.", value=self._hub.size)
        for name, text, value in (
            ("subscriptions", "Subscriptions accepted.", counters.subscribed),
            ("messages", "Messages handed to sockets.", counters.messages),
            ("sent_bytes", "Bytes handed to sockets.", counters.bytes),
            ("snapshots", "Snapshots sent.", counters.snapshots),
            ("resumed", "Subscriptions that went on from a position.", counters.resumed),
            ("slow", "Slow notices sent.", counters.slow),
            ("cut", "Subscribers cut because they read nothing.", counters.cut),
            ("refused", "Subscribers refused because the server was full.", counters.refused),
        ):
            yield CounterMetricFamily(f"millrace_serve_{name}", text, value=value)
        expired = CounterMetricFamily("millrace_serve_expired", "Positions that were void.", labels=["reason"])
        for reason, count in counters.expired.items():
            expired.add_metric([reason], count)
        yield expired
        yield from self._of_tables()

    def _of_tables(self) -> Iterator[Metric]:
        version = GaugeMetricFamily("millrace_serve_table_version", "Delta version in memory.", labels=["table"])
        rows = GaugeMetricFamily("millrace_serve_table_rows", "Rows in memory.", labels=["table"])
        age = GaugeMetricFamily("millrace_serve_table_age_seconds", "Age of the last commit.", labels=["table"])
        ring = GaugeMetricFamily("millrace_serve_ring_bytes", "Bytes in the ring.", labels=["table", "codec"])
        trailing = GaugeMetricFamily("millrace_serve_trailing", "Subscribers that trail.", labels=["table", "codec"])
        now = time.time()
        for name, channel in self._hub.channels.items():
            version.add_metric([name], channel.state.version)
            rows.add_metric([name], len(channel.state.rows))
            age.add_metric([name], max(0.0, now - channel.state.facts.committed_at / 1000))
            for codec, lane in channel.lanes.items():
                ring.add_metric([name, codec], lane.ring.bytes)
                trailing.add_metric([name, codec], len(lane.trailing))
        yield from (version, rows, age, ring, trailing)
