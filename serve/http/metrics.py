"""Prometheus metrics of the serving tier, read when scraped: the hot path counts in plain integers.

Several processes may share a port, and a scrape reaches any of them. So each writes its metrics into a file of its own
every second, and the one that is asked adds those of the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lakehouse.contract.storage import write_whole
from serve.access import ReaderGate
from serve.core.hub import Hub
from serve.http.rows import RowSource
from serve.sql.routes import Workers
from serve.webhooks.runner import WebhookFleet

log = logging.getLogger(__name__)

_PAUSE_S = 1.0
_FRESH_S = 10.0  # an older file is of a process that has ended


class ServerMetrics:
    """The metrics of all processes of a port.

    Args:
        folder: of the processes' files.
        name: of this process, e.g. ``serve-1``; empty: it has the port to itself.
    """

    def __init__(self, folder: Path, name: str, own: Collector) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.registry.register(own)
        self._folder = folder
        self._name = name

    async def run(self) -> None:
        """Write the file every second until cancelled; at the end remove it."""
        file = self._folder / f"{self._name}.prom"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            while True:
                try:
                    write_whole(file, generate_latest(self.registry))
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


class ServerCollector(Collector):
    """Metrics of this process."""

    def __init__(self, hub: Hub, gate: ReaderGate, workers: Workers, rows: RowSource, fleet: WebhookFleet) -> None:
        self._hub = hub
        self._gate = gate
        self._workers = workers
        self._rows = rows
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        counters = self._hub.counters
        for name, text, now in (
            ("subscribers", "Subscribers connected.", self._hub.size),
            ("sql_running", "SQL statements that run or wait.", self._workers.running),
            ("webhooks", "Webhooks that this process runs.", self._fleet.running),
        ):
            yield GaugeMetricFamily(f"millrace_serve_{name}", text, value=now)
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
        read = {"hit": self._rows.hits, "miss": self._rows.misses}
        for name, text, label, counts in (
            ("expired", "Positions that were void.", "reason", counters.expired),
            ("denied", "Requests and connections that were not let in.", "code", self._gate.refused),
            ("sql", "SQL statements by how they ended.", "outcome", self._workers.counts),
            ("webhook_deliveries", "Webhook attempts and letters.", "outcome", self._fleet.counts),
            ("read_through", "Look-ups in tables that are not in memory.", "cache", read),
        ):
            family = CounterMetricFamily(f"millrace_serve_{name}", text, labels=[label])
            for each, count in counts.items():
                family.add_metric([each], count)
            yield family
        yield from self._of_tables()

    def _of_tables(self) -> Iterator[Metric]:
        of_table = {
            name: GaugeMetricFamily(f"millrace_serve_{name}", text, labels=["table"])
            for name, text in (
                ("table_version", "Delta version in memory."),
                ("table_rows", "Rows in memory."),
                ("table_age_seconds", "Age of the last commit."),
                ("filters", "Distinct filters and aggregates."),
            )
        }
        ring = GaugeMetricFamily("millrace_serve_ring_bytes", "Bytes in the ring.", labels=["table", "codec"])
        trailing = GaugeMetricFamily("millrace_serve_trailing", "Subscribers that trail.", labels=["table", "codec"])
        now = time.time()
        for name, channel in self._hub.channels.items():
            state = channel.state
            age = max(0.0, now - state.facts.committed_at / 1000)
            values = (state.version, len(state.rows), age, len(channel.streams) - 1)
            for family, value in zip(of_table.values(), values, strict=True):
                family.add_metric([name], value)
            sizes, lags = Counter[str](), Counter[str]()
            for stream in channel.streams.values():
                for codec, wire_channel in stream.wire_channels.items():
                    sizes[codec] += wire_channel.ring.bytes
                    lags[codec] += len(wire_channel.trailing)
            for codec in sizes:
                ring.add_metric([name, codec], sizes[codec])
                trailing.add_metric([name, codec], lags[codec])
        yield from (*of_table.values(), ring, trailing)
