"""Prometheus metrics of the serving tier, read when scraped: the hot path counts in plain integers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.core.channel import Channel
from serve.core.hub import Hub
from serve.http.lookup import Lookups
from serve.security.gate import ReaderGate
from serve.sql.pool import Workers
from serve.webhooks.runner import WebhookFleet


class HubCollector(Collector):
    """Metrics of a hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
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
            filters.add_metric([name], len(channel.streams) - 1)
            for codec, (size, lag) in _by_codec(channel).items():
                ring.add_metric([name, codec], size)
                trailing.add_metric([name, codec], lag)
        yield from (version, rows, age, filters, ring, trailing)


def _by_codec(channel: Channel) -> dict[str, tuple[int, int]]:
    """Bytes in rings, and trailing subscribers, by wire form."""
    found: dict[str, tuple[int, int]] = {}
    for stream in channel.streams.values():
        for codec, wire_channel in stream.wire_channels.items():
            size, lag = found.get(codec, (0, 0))
            found[codec] = size + wire_channel.ring.bytes, lag + len(wire_channel.trailing)
    return found


class AccessCollector(Collector):
    """Metrics of refusals, statements, look-ups that were read through, and webhooks."""

    def __init__(self, gate: ReaderGate, workers: Workers, lookups: Lookups, fleet: WebhookFleet) -> None:
        self._gate = gate
        self._workers = workers
        self._lookups = lookups
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
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
