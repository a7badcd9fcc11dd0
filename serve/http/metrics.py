"""Prometheus metrics of the serving tier, read when scraped: the hot path counts in plain integers.

Several processes may share a port, and a scrape reaches any of them. So each writes its metrics into a file of its own
every second, and the one that is asked adds those of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serve.access import ReaderGate
from serve.core.channel import Channel
from serve.core.hub import Hub
from serve.http.rows import RowSource
from serve.sql.pool import Workers
from serve.webhooks.runner import WebhookFleet

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_FRESH_S = 10.0  # an older file is of a process that has ended


class ServerMetrics:
    """The metrics of a server.

    Args:
        folder: of the processes' files.
        name: of this process, e.g. ``serve-1``; empty: it has the port to itself.
        own: collectors of this process.
    """

    def __init__(self, folder: Path, name: str, own: Iterable[Collector]) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        for each in own:
            self.registry.register(each)
        self._folder = folder
        self._name = name

    async def run(self) -> None:
        """Write the file every second until cancelled; at the end remove it."""
        file = self._folder / f"{self._name}.prom"
        draft = file.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                try:
                    draft.write_bytes(generate_latest(self.registry))
                    draft.replace(file)
                except OSError as error:
                    log.warning("metrics cannot be written to %s: %s", file, error)
                await asyncio.sleep(_PAUSE_S)
        finally:
            file.unlink(missing_ok=True)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format; if processes share the port, with the label ``process``."""
        own = generate_latest(self.registry)
        if not self._name:
            return own
        texts = {self._name: own.decode()}
        for file in sorted(self._folder.glob("*.prom")):
            with contextlib.suppress(OSError):  # its process has just ended
                if file.stem != self._name and time.time() - file.stat().st_mtime < _FRESH_S:
                    texts[file.stem] = file.read_text(encoding="utf-8")
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Merged(texts))
        return generate_latest(registry)


class _Merged(Collector):
    """Metrics of several processes: each sample gets the label ``process``, the key in ``texts``."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.samples.append(sample._replace(labels={**sample.labels, "process": process}))
        yield from families.values()


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

    def __init__(self, gate: ReaderGate, workers: Workers, rows: RowSource, fleet: WebhookFleet) -> None:
        self._gate = gate
        self._workers = workers
        self._rows = rows
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
                {"hit": self._rows.hits, "miss": self._rows.misses},
            ),
        ):
            family = CounterMetricFamily(name, text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        for name, text, running in (
            ("millrace_serve_sql_running", "SQL statements that run or wait.", self._workers.running),
            ("millrace_serve_webhooks", "Webhooks that this process runs.", self._fleet.running),
        ):
            yield GaugeMetricFamily(name, text, value=running)
