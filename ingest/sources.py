"""The sources that a node collects, which may start, stop and change while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ingest.acks import RecentEvents
from ingest.border import KEPT_BYTES, Border
from ingest.collectors import Place, make_collector
from ingest.collectors.upstream import shown_url
from ingest.delivery import Delivery
from ingest.enrich import Enricher
from ingest.front import FrontBorder
from ingest.log import MessageLog, least_limit
from ingest.shed import Shedder, Waiting
from ingest.source import Collector, Intake, UpstreamStatus
from lakehouse.contract.collector import STREAM_KINDS, CollectorSpec
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """One source's collectors."""

    source: Source
    collectors: list[Collector] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    enricher: Enricher | None = None


class SourceSet:
    """Collectors by source. Adding one makes its lanes; its collectors run once the set does.

    Args:
        settings: of the process.
        node: id of the collecting node.
        log: where events become durable.
        delivery: how they reach Kafka.
        recent: remembers events whose senders may ask for them.
        bootstrap: ``host:port`` of the broker, for references that are topics.
        folder: of the pipeline, for references that are files.

    Attributes:
        topics: topic by source, also of those that were removed (their events may still be in the log).
        intakes: by source, of those that take events by HTTP.
        one_way: sources of these that acknowledge nothing; the set itself stays the same.
        names: of the sources there are; the list itself stays the same.
        shedders: by source, of those that may leave events out.
    """

    def __init__(
        self,
        settings: Settings,
        node: str,
        log: MessageLog,
        delivery: Delivery,
        recent: RecentEvents,
        topics: dict[str, str],
        *,
        bootstrap: str,
        folder: Path,
        front: bool = False,
    ) -> None:
        self._settings = settings
        self._node = node
        self._log = log
        self._delivery = delivery
        self._recent = recent
        self._bootstrap = bootstrap
        self._folder = folder
        self._front = front
        self._set: dict[str, _Running] = {}
        self._running = False
        self.topics = topics
        self.intakes: dict[str, Intake] = {}
        self.one_way: set[str] = set()
        self.names: list[str] = []
        self.shedders: dict[str, Shedder] = {}

    def statuses(self) -> Iterable[UpstreamStatus]:
        """What the collectors say of their upstreams."""
        return [collector.status() for running in self._set.values() for collector in running.collectors]

    def get(self, name: str) -> Source | None:
        """The source of this name, if it is collected."""
        running = self._set.get(name)
        return running.source if running is not None else None

    def add(self, source: Source, url: str = "") -> None:
        """Take a source in; its topic exists.

        Args:
            source: its collectors are made, and run if the set does.
            url: upstream to read instead of what the source says.

        Raises:
            ConfigError: a collector or a reference cannot be made, or the log is too small for an event.
            EnvironmentProblem: an address cannot be bound.
        """
        self._check_size(source)
        running = _Running(source)
        try:
            self._make(running, url)
        except BaseException:
            self._discard(running)
            raise
        self.topics[source.name] = source.topic
        self._set[source.name] = running
        self.names.append(source.name)
        if self._running:
            self._start(running)

    async def remove(self, name: str) -> None:
        """Stop a source's collectors and take no more by HTTP; what is in the log still goes to Kafka."""
        running = self._set.pop(name, None)
        if running is None:
            return
        self.names.remove(name)
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        self._discard(running)

    def run(self) -> None:
        """Start every collector; those of sources added later start at once."""
        self._running = True
        for running in self._set.values():
            self._start(running)

    async def stop(self) -> None:
        """Stop reading; HTTP is the server's to stop."""
        self._running = False
        tasks = [task for running in self._set.values() for task in running.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Let go of what collectors hold."""
        for running in self._set.values():
            for collector in running.collectors:
                collector.close()

    def _check_size(self, source: Source) -> None:
        """The log has to be able to take the source's largest event, or what is kept of one that is larger."""
        least = least_limit(max(source.max_event_bytes, KEPT_BYTES))
        if self._settings.collect.log_bytes < least:
            raise ConfigError(
                f"an event of {source.max_event_bytes} bytes would never fit into a log of "
                f"{self._settings.collect.log_bytes} (collect.log_bytes)",
                file=self._folder / "pipeline.toml",
                key=f"sources.{source.name}.max_event_bytes",
                remedy=f"Set collect.log_bytes to {least} or more, or allow smaller events only",
            )

    def _make(self, running: _Running, url: str) -> None:
        source = running.source
        made = FrontBorder if self._front else Border
        file = self._folder / "pipeline.toml"
        border = made(source, tenant=self._settings.tenant, collector=self._node, file=file)
        if source.shed is not None and not self._front:
            border.shedder = self.shedders[source.name] = Shedder(
                source.name, source.shed, lambda: self._waiting(source.name)
            )
        if any(spec.at == "border" for spec in source.enrich.values()) and not self._front:
            running.enricher = Enricher(
                source, self._folder, self._bootstrap, at="border", security=self._settings.kafka.security
            )
        for ordinal, spec in enumerate(with_upstream(source.collectors, url)):
            upstream = (url or spec.url) if spec.kind in STREAM_KINDS else ""
            # Another address is another stream: a position in one says nothing of the other.
            name = f"{source.name}/{spec.kind}/{ordinal}"
            lane = self._log.lane(f"{name} {shown_url(upstream)}" if upstream else name, source.name)
            asked = spec.kind == "http" and spec.ack != "none"
            recent = self._recent if asked else None
            intake = Intake(border, lane, self._log, self._delivery, recent, running.enricher)
            if spec.kind == "http":
                self.intakes[source.name] = intake
                if not asked:
                    self.one_way.add(source.name)
            else:
                place = Place(intake, upstream, self._settings.collect.backoff_max_s)
                running.collectors.append(make_collector(spec, place))

    def _start(self, running: _Running) -> None:
        parts = [_run_when_complete(collector, running.enricher) for collector in running.collectors]
        if running.enricher is not None:
            parts.append(running.enricher.run())
        running.tasks = [asyncio.create_task(part, name=f"collect {running.source.name}") for part in parts]
        for task in running.tasks:
            task.add_done_callback(_tell_of_end)

    def _waiting(self, name: str) -> Waiting:
        """What waits for Kafka, of a source."""
        events = sum(lane.in_log for lane in self._log.lanes() if lane.source == name)
        return Waiting(events, self._log.used, self._delivery.oldest_at)

    def _discard(self, running: _Running) -> None:
        self.intakes.pop(running.source.name, None)
        self.shedders.pop(running.source.name, None)
        self.one_way.discard(running.source.name)
        for collector in running.collectors:
            collector.close()
        if running.enricher is not None:
            running.enricher.close()


def with_upstream(specs: Iterable[CollectorSpec], url: str) -> list[CollectorSpec]:
    """The collectors, with one for ``url`` where none of them is the client of an upstream."""
    found = list(specs)
    if url and not any(spec.kind in STREAM_KINDS for spec in found):
        scheme = urlsplit(url).scheme
        kind = "websocket" if scheme in STREAM_KINDS["websocket"] else "sse"
        found.append(CollectorSpec(kind, url, "from" if kind == "websocket" else ""))
    return found


def changed(old: Mapping[str, Source], new: Mapping[str, Source]) -> tuple[list[str], list[str]]:
    """Names of sources to stop (gone or changed) and to start (new or changed), to come from ``old`` to ``new``."""
    stop = [name for name, source in old.items() if new.get(name) != source]
    return stop, [name for name, source in new.items() if old.get(name) != source]


async def _run_when_complete(collector: Collector, enricher: Enricher | None) -> None:
    if enricher is not None:
        await enricher.complete()
    await collector.run()


def _tell_of_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s ended: it is not collected any more", task.get_name(), exc_info=task.exception())
