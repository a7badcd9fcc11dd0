"""A collecting node: all collectors of a pipeline, one message log, one way to Kafka, one HTTP port (composition)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ingest.answers.acks import RecentEvents, Signer
from ingest.answers.respond import Answers, Responder
from ingest.answers.stream import Streams
from ingest.answers.tables import ProductTables
from ingest.border.access import SenderGate, sender_keys
from ingest.border.admission import KEPT_BYTES, Border, FrontBorder, Shedder, Waiting, front_source
from ingest.collectors import Collector, CollectorContext, UpstreamStatus, make_collector
from ingest.collectors.http import HttpServer, NodeStats, check_exposure, make_app
from ingest.collectors.upstream import shown_url
from ingest.delivery import HAND_OVER_S, KafkaDelivery
from ingest.enrich import Enricher
from ingest.errors import BrokerUnavailable
from ingest.intake import Intake, RequestIntake
from ingest.kafka import KafkaPublisher, ensure_topics
from ingest.log.message_log import MessageLog, least_limit
from lakehouse.contract.access import state_manager
from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.pipeline.source import STREAM_KINDS, CollectorSpec
from lakehouse.contract.pipeline.tenants import border_of
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import write_whole

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_AWAY_S = 2.0  # a broker that lives answers sooner
_FILE_POLL_S = 1.0
_WATCH_S = 0.02  # between looks at a table that a sender waits for; a look reads one file name
_REMOTE_WATCH_S = 0.2  # … where it is two requests
MAX_WAITERS = 1_000  # senders that wait for an answer at a time; each costs a timer and a request
_GC_YOUNG = 50_000  # default 700: a batch has more events, and all of them live until Kafka has them
_GC_OLDER = 50


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a node is told on the command line.

    Attributes:
        node: id of the node, which names the folder of its log.
        urls: upstream by source, in place of the pipeline's.
        front: take payloads in unread and write them to ``TOPIC.raw``; :mod:`ingest.relay` does the rest.
        files: of the pipeline, whose changes are applied at run time; None: it stays as it is.
    """

    node: str = "collector-1"
    urls: Mapping[str, str] = field(default_factory=dict)
    front: bool = False
    files: PipelineFiles | None = None

    def sources_of(self, pipeline: Pipeline) -> dict[str, Source]:
        """The pipeline's sources as this node sees them."""
        see = front_source if self.front else lambda source: source
        return {name: see(source) for name, source in pipeline.sources.items()}


class CollectorNode:
    """The parts of a node. Sources can be added, removed and changed while it runs.

    Args:
        settings: of the process, with the address of a broker.

    Raises:
        EnvironmentProblem: another process uses the log.
        ConfigError: the node would listen on a public address without keys, or a collector cannot be made.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, options: NodeOptions = NodeOptions()) -> None:
        collect, lake = settings.collect, Lake.of(settings)
        self._manager = state_manager(settings)
        keys = sender_keys(settings, self._manager)
        check_exposure(collect, keys)
        self._settings = settings
        self._options = options
        self._file = pipeline.path
        notes = lake.state / "collect" / options.node
        self._met = notes / "topics.json"
        self._ready = False
        self._taking = asyncio.Event()  # ready, and not stopping
        self._connected = asyncio.Event()
        self._stopping = False
        declared = options.sources_of(pipeline)
        self._topics = {name: source.topic for name, source in declared.items()}
        hand_over_s = min(HAND_OVER_S, settings.kafka.linger_ms / 1000)
        linger_ms = settings.kafka.linger_ms - round(1000 * hand_over_s)  # the client lingers for the rest
        self._publisher = KafkaPublisher(dataclasses.replace(settings.kafka, linger_ms=linger_ms), self._topics)
        self._log = MessageLog(
            lake.collector_log(options.node),
            options.node,
            limit=collect.log_bytes,
            group_commit_ms=collect.group_commit_ms,
            protocol=collect.protocol,
        )
        recent = RecentEvents(self._topics)
        self._delivery = KafkaDelivery(self._log, self._publisher, recent.known, hand_over_s, self._guarantee)
        self._sources = SourceSet(settings, options, self._file, self._log, self._delivery, recent)
        for source in declared.values():
            self._sources.add(source)
        gate = SenderGate(keys, max_connections=collect.max_connections)
        signer = Signer.of_lake(lake.shared, lake.state if lake.remote else None)
        self._requests = RequestIntake(self._sources.intakes, self._not_ready, gate, signer)
        self._tables = ProductTables(
            lake, _REMOTE_WATCH_S if lake.remote else _WATCH_S, border_of(pipeline, settings.tenant)
        )
        answers = Answers(self._sources.get, recent, self._tables, MAX_WAITERS)
        self._responder = Responder(answers, pipeline, self._requests, notes / "callbacks")
        self._streams = Streams(self._requests, pipeline, self._tables, collect.max_connections, self._until_ready)
        self._stats = NodeStats(options.node, self._log, self._delivery, self._sources, self._requests)

    # --- sources at run time

    @property
    def sources(self) -> dict[str, Source]:
        """The sources that are collected now."""
        return self._sources.sources

    @property
    def replay(self) -> tuple[int, int]:
        """Events of an earlier run that are still to be sent to Kafka, and their initial number."""
        return self._stats.replay

    async def add_source(self, source: Source) -> None:
        """Collect a further source, with a new name; creates its topic if absent.

        Raises:
            ConfigError: a collector cannot be made.
            EnvironmentProblem: an address cannot be bound.
            BrokerUnavailable: its topic cannot be created now.
        """
        kafka = self._settings.kafka
        await asyncio.to_thread(ensure_topics, kafka.bootstrap, [source], kafka.security)
        self._sources.add(source)
        self._topics[source.name] = source.topic  # stays when the source goes, because its events may be in the log
        self._note_topics()
        logger.info("collecting source %s", source.name)

    async def remove_source(self, name: str) -> None:
        """Stop collecting a source; its logged events still go to Kafka."""
        await self._sources.remove(name)
        logger.info("stopped collecting source %s", name)

    async def apply(self, pipeline: Pipeline) -> None:
        """Start, stop and restart sources to match ``pipeline``; unchanged sources are not interrupted.

        Raises:
            MillraceError: a source could not be started, and goes on as it was before; the others match.
        """
        wanted, before = self._options.sources_of(pipeline), self.sources
        stop, start = changed(before, wanted)
        self._responder.pipeline = self._streams.pipeline = pipeline
        for name in stop:
            await self.remove_source(name)
        problem: MillraceError | None = None
        for name in start:
            try:
                await self.add_source(wanted[name])
            except MillraceError as error:
                problem = error
                if name in before:
                    self._sources.add(before[name])
        if problem is not None:
            raise problem

    def _guarantee(self, name: str) -> str:
        source = self._sources.get(name)
        return source.guarantee if source is not None else "exactly_once"

    # --- running

    def _not_ready(self) -> str:
        if self._stopping:
            return "the node is stopping"
        if not self._ready:
            return "the node is starting: it waits for Kafka, or sends again what its log holds"
        if self._log.problem:
            return f"the message log cannot be written: {self._log.problem}"
        return "the message log is full" if self._log.full else ""

    async def _until_ready(self, size: int) -> None:
        """Return when the node takes this many bytes of events; never, once it stops."""
        await self._taking.wait()
        await self._log.room(size)

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None] = lambda url: None) -> None:
        """Collect until ``stop`` is set; runs once.

        1. Report "not ready" by HTTP.
        2. Wait for Kafka and the topics; send again what an earlier run left in the log. If an earlier run has met the
           topics and Kafka does not answer within two seconds, go on: the log takes events meanwhile.
        3. Report "ready" and start the collectors.
        4. On ``stop``: stop the collectors, wait for Kafka to take events in flight, close the log.

        ``ready`` is called once when the node is ready, with the base URL of its HTTP server.

        Raises:
            EnvironmentProblem: the port is taken.
        """
        if self._manager is not None:
            await asyncio.to_thread(self._manager.start)
        try:
            app = make_app(self._requests, self._stats, self._responder, self._streams.demand)
            server = HttpServer(app, self._requests, self._settings.collect, ws=self._streams.protocol)
            async with asyncio.TaskGroup() as tasks:
                delivery = tasks.create_task(self._deliver())
                tasks.create_task(server.serve())
                others = [
                    tasks.create_task(self._start(server.url, ready)),
                    tasks.create_task(self._streams.keep_alive()),
                    tasks.create_task(self._streams.watch_keys()),
                    tasks.create_task(self._streams.demand.run()),
                ]
                if self._options.files is not None:
                    others.append(tasks.create_task(self._follow_files(self._options.files)))
                await stop.wait()
                self._stopping = True
                self._taking.clear()
                for task in others:
                    task.cancel()
                await self._sources.stop()
                server.stop()
                self._tables.watch.close()
                await self._streams.follower.close()
                await self._responder.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S if self._ready else 0):
                        await self._delivery.drained()
                delivery.cancel()
        finally:  # unacknowledged events stay in the log
            if self._manager is not None:
                await asyncio.to_thread(self._manager.stop)
            self._sources.close()
            await asyncio.to_thread(self._publisher.close, 1.0)
            await self._log.close()

    async def _start(self, url: str, ready: Callable[[str], None]) -> None:
        sources = list(self.sources.values())
        connecting = asyncio.create_task(self._publisher.start_when_available(self._delivery.deliver, sources))
        try:
            if self._has_met_topics():
                await asyncio.wait([connecting], timeout=_AWAY_S)
                if not connecting.done():
                    logger.warning("Kafka does not answer: the message log takes events until it does")
                    self._delivery.hold()
                    self._take(url, ready)
            await connecting
        finally:
            connecting.cancel()
        self._note_topics()
        self._connected.set()
        await self._delivery.recovered()
        if self._log.recovery.to_replay:
            logger.info("sent again %d events of an earlier run", self._log.recovery.to_replay)
        if not self._ready:
            self._take(url, ready)

    def _has_met_topics(self) -> bool:
        """Whether Kafka had these topics in an earlier run; else their names or the broker's address may be wrong."""
        try:
            met = json.loads(self._met.read_bytes())
        except (OSError, ValueError):
            return False
        return isinstance(met, dict) and self._topics.items() <= met.items()

    def _note_topics(self) -> None:
        write_whole(self._met, json.dumps(self._topics).encode())

    def _take(self, url: str, ready: Callable[[str], None]) -> None:
        self._ready = True
        self._taking.set()
        self._sources.run()
        self._responder.resume()
        ready(url)

    async def _deliver(self) -> None:
        await self._connected.wait()  # events of an earlier run must not be sent before there is a client
        await self._delivery.run()

    async def _follow_files(self, files: PipelineFiles) -> None:
        """Apply what the pipeline's files say whenever they change."""
        wanted: Pipeline | None = None
        while True:
            await asyncio.sleep(_FILE_POLL_S)
            if not self._ready:
                continue
            wanted = await asyncio.to_thread(files.changed) or wanted
            if wanted is None:
                continue
            try:
                await self.apply(wanted)
                wanted = None
            except BrokerUnavailable as error:
                logger.warning("the changed pipeline will be applied later: %s", error)
            except MillraceError as error:
                logger.error("the changed pipeline could not be applied completely: %s", error)
                wanted = None


@dataclass(slots=True)
class _RunningSource:
    source: Source
    collectors: list[Collector] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    enricher: Enricher | None = None


class SourceSet:
    """The sources that a node collects. Adding one makes its lanes; its collectors run once the set runs.

    Args:
        file: of the pipeline; references that are files are beside it.

    Attributes:
        intakes: by source, of sources that take events by HTTP. The set object stays the same.
        shedders: by source, of sources that may shed events.
    """

    def __init__(
        self,
        settings: Settings,
        options: NodeOptions,
        file: Path,
        log: MessageLog,
        delivery: KafkaDelivery,
        recent: RecentEvents,
    ) -> None:
        self._settings = settings
        self._options = options
        self._file = file
        self._log = log
        self._delivery = delivery
        self._recent = recent
        self._set: dict[str, _RunningSource] = {}
        self._running = False
        self.intakes: dict[str, Intake] = {}
        self.shedders: dict[str, Shedder] = {}

    @property
    def names(self) -> list[str]:
        return list(self._set)

    @property
    def sources(self) -> dict[str, Source]:
        return {name: running.source for name, running in self._set.items()}

    def statuses(self) -> Iterable[UpstreamStatus]:
        """The state of every upstream."""
        return [collector.status() for running in self._set.values() for collector in running.collectors]

    def get(self, name: str) -> Source | None:
        """The source with this name, if it is collected."""
        running = self._set.get(name)
        return running.source if running is not None else None

    def add(self, source: Source) -> None:
        """Add a source whose topic exists.

        Raises:
            ConfigError: a collector or a reference cannot be made, or the log is too small for an event.
            EnvironmentProblem: an address cannot be bound.
        """
        self._check_size(source)
        running = _RunningSource(source)
        try:
            self._make(running)
        except BaseException:
            self._discard(running)
            raise
        self._set[source.name] = running
        if self._running:
            self._start(running)

    async def remove(self, name: str) -> None:
        """Stop a source's collectors and its HTTP; its logged events still go to Kafka."""
        running = self._set.pop(name, None)
        if running is None:
            return
        await _end(running.tasks)
        self._discard(running)

    def run(self) -> None:
        """Start all collectors; those of sources added later start at once."""
        self._running = True
        for running in self._set.values():
            self._start(running)

    async def stop(self) -> None:
        """Stop all collectors; HTTP is stopped by its server."""
        self._running = False
        await _end([task for running in self._set.values() for task in running.tasks])

    def close(self) -> None:
        """Release what collectors hold."""
        for running in self._set.values():
            for collector in running.collectors:
                collector.close()

    def _check_size(self, source: Source) -> None:
        """The log must have room for the source's largest event, or for what is kept of a larger one."""
        least = least_limit(max(source.max_event_bytes, KEPT_BYTES))
        if self._settings.collect.log_bytes < least:
            raise ConfigError(
                f"an event of {source.max_event_bytes} bytes would never fit into a log of "
                f"{self._settings.collect.log_bytes} (collect.log_bytes)",
                file=self._file,
                key=f"sources.{source.name}.max_event_bytes",
                remedy=f"Set collect.log_bytes to {least} or more, or allow smaller events only",
            )

    def _make(self, running: _RunningSource) -> None:
        source, options = running.source, self._options
        if source.shed is not None:
            self.shedders[source.name] = Shedder(source.name, source.shed, lambda: self._waiting(source.name))
        border = (FrontBorder if options.front else Border)(
            source,
            tenant=self._settings.tenant,
            collector=options.node,
            file=self._file,
            shedder=self.shedders.get(source.name),
        )
        if source.enrich:
            running.enricher = Enricher(source, self._file.parent, self._settings.kafka)
        url = options.urls.get(source.name, "")
        for ordinal, spec in enumerate(with_upstream(source.collectors, url)):
            upstream = (url or spec.url) if spec.kind in STREAM_KINDS else ""
            # Another address is another stream: a position in one means nothing in the other.
            name = f"{source.name}/{spec.kind}/{ordinal}"
            lane = self._log.lane(f"{name} {shown_url(upstream)}" if upstream else name, source.name)
            recent = self._recent if spec.kind == "http" and spec.ack != "none" else None
            intake = Intake(border, lane, self._log, self._delivery, recent, running.enricher)
            if spec.kind == "http":
                self.intakes[source.name] = intake
            else:
                context = CollectorContext(intake, upstream, self._settings.collect.backoff_max_s)
                running.collectors.append(make_collector(spec, context))

    def _start(self, running: _RunningSource) -> None:
        parts = [_run_when_complete(collector, running.enricher) for collector in running.collectors]
        if running.enricher is not None:
            parts.append(running.enricher.run())
        running.tasks = [asyncio.create_task(part, name=f"collect {running.source.name}") for part in parts]
        for task in running.tasks:
            task.add_done_callback(_log_failure)

    def _waiting(self, name: str) -> Waiting:
        events = sum(lane.in_log for lane in self._log.lanes() if lane.source == name)
        return Waiting(events, self._log.used, self._delivery.oldest_at)

    def _discard(self, running: _RunningSource) -> None:
        self.intakes.pop(running.source.name, None)
        self.shedders.pop(running.source.name, None)
        for collector in running.collectors:
            collector.close()
        if running.enricher is not None:
            running.enricher.close()


def with_upstream(specs: Iterable[CollectorSpec], url: str) -> list[CollectorSpec]:
    """The collectors, with one for ``url`` added if none of them reads an upstream."""
    found = list(specs)
    if url and not any(spec.kind in STREAM_KINDS for spec in found):
        scheme = urlsplit(url).scheme
        kind = "websocket" if scheme in STREAM_KINDS["websocket"] else "sse"
        found.append(CollectorSpec(kind, url, "from" if kind == "websocket" else ""))
    return found


def changed(old: Mapping[str, Source], new: Mapping[str, Source]) -> tuple[list[str], list[str]]:
    """Names of sources to stop (gone or changed) and to start (new or changed) to get from ``old`` to ``new``."""
    stop = [name for name, source in old.items() if new.get(name) != source]
    return stop, [name for name, source in new.items() if old.get(name) != source]


def calm_garbage_collector() -> None:
    """Search for cycles less often, and never among objects of modules: it took a quarter of a core.

    Reference counting frees everything that a collector makes for an event; there are no cycles in it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_YOUNG, _GC_OLDER, _GC_OLDER)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run_when_complete(collector: Collector, enricher: Enricher | None) -> None:
    if enricher is not None:
        await enricher.complete()
    await collector.run()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s failed and is not running any more", task.get_name(), exc_info=task.exception())
