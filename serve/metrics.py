"""Prometheus metrics of the serving tier. Read from the hub when scraped: the hot path counts in plain integers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.channel import Channel
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
            ("conflated", "Changes merged for subscribers that lagged and asked for it.", counters.conflated),
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
        filters = GaugeMetricFamily("millrace_serve_filters", "Distinct filters and aggregates.", labels=["table"])
        now = time.time()
        for name, channel in self._hub.channels.items():
            version.add_metric([name], channel.state.version)
            rows.add_metric([name], len(channel.state.rows))
            age.add_metric([name], max(0.0, now - channel.state.facts.committed_at / 1000))
            filters.add_metric([name], len(channel.feeds) - 1)
            for codec, (size, lag) in _by_codec(channel).items():
                ring.add_metric([name, codec], size)
                trailing.add_metric([name, codec], lag)
        yield from (version, rows, age, filters, ring, trailing)


def _by_codec(channel: Channel) -> dict[str, tuple[int, int]]:
    """Bytes in rings and subscribers that trail, by wire form, whatever they filter by."""
    found: dict[str, tuple[int, int]] = {}
    for feed in channel.feeds.values():
        for codec, lane in feed.lanes.items():
            size, lag = found.get(codec, (0, 0))
            found[codec] = size + lane.ring.bytes, lag + len(lane.trailing)
    return found
