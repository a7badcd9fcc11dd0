"""A collecting node: every collector of a pipeline, one message log, one way to Kafka, one HTTP port (composition)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ingest.acks import RecentEvents
from ingest.answers import Answers
from ingest.app import HttpServer, check_exposure, make_app
from ingest.collectors.door import Door
from ingest.delivery import HAND_OVER_S, Delivery
from ingest.errors import BrokerUnavailable
from ingest.front import front_pipeline
from ingest.keys import KeyRing, keys_path
from ingest.lakestate import LakeState
from ingest.limits import Gate
from ingest.log import MessageLog
from ingest.productrows import ProductRows
from ingest.publish import ensure_topics, make_publisher
from ingest.pubsub import Feed, Interests, StreamProtocol, Streams
from ingest.respond import Responder
from ingest.sources import SourceSet, changed
from ingest.stats import NodeStats
from ingest.tokens import Signer
from ingest.watch import Watch
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source, load_pipeline
from lakehouse.contract.settings import Settings

logger = logging.getLogger(__name__)

KafkaClient = Literal["kafka-python", "confluent-kafka"]
_CLOSE_S = 10.0
_BROKER_BACKOFF_MAX_S = 5.0
_WATCH_S = 1.0


async def run_collector(
    settings: Settings,
    pipeline: Pipeline,
    *,
    node: str = "collector-1",
    bootstrap: str,
    urls: Mapping[str, str] | None = None,
    http: bool = True,
    ready: Callable[[str], None] | None = None,
    client: KafkaClient | None = None,
    front: bool = False,
    watch: bool = False,
    made: Callable[[CollectorNode], None] | None = None,
    stop: asyncio.Event,
) -> None:
    """Collect until ``stop`` is set, then end cleanly.

    1. Open the log; say "not ready" by HTTP.
    2. Wait for Kafka and the topics; send again what an earlier run left in the log.
    3. Say "ready", start reading the upstreams.
    4. On ``stop``: stop reading, let Kafka take what is in flight, close the log.

    Args:
        settings: of the process.
        pipeline: whose sources are collected.
        node: id of this node; names its log's folder.
        bootstrap: ``host:port`` of a broker.
        urls: upstream by source, instead of what the pipeline says.
        http: whether to serve HTTP.
        ready: called once, with the base URL of the HTTP server (empty without one), when the node is ready.
        client: the Kafka client, instead of what the settings say.
        front: only take payloads in, unread, into ``TOPIC.raw``: :mod:`ingest.refine` does the rest.
        watch: start, stop and change sources when the pipeline's file changes.
        made: called with the node before it runs, for whoever changes its sources while it runs.
        stop: ends the node.

    Raises:
        EnvironmentProblem: the log is in use by another process, or a port is taken.
        ConfigError: the node would listen to everybody without keys.
    """
    made_node = CollectorNode(settings, pipeline, node, bootstrap, dict(urls or {}), client, front=front)
    try:
        if made is not None:
            made(made_node)
        await made_node.run(http, ready, stop, watch=watch)
    finally:
        await made_node.close()


class CollectorNode:
    """The parts of a node. Sources may be added, removed and changed while it runs."""

    def __init__(
        self,
        settings: Settings,
        pipeline: Pipeline,
        node: str,
        bootstrap: str,
        urls: dict[str, str],
        client: KafkaClient | None,
        *,
        front: bool = False,
    ) -> None:
        collect, lake = settings.collect, Lake(settings.lake)
        keys = KeyRing(keys_path(settings))
        check_exposure(collect, keys)
        self._settings = settings
        self._front = front
        self._pipeline = front_pipeline(pipeline) if front else pipeline
        self._folder = pipeline.path.parent
        self._urls = urls
        self._bootstrap = bootstrap
        self._security = settings.kafka.security
        self._ready = False
        self._taking = asyncio.Event()  # ready, and not stopping
        self._connected = asyncio.Event()
        self._stopping = False
        topics = {name: source.topic for name, source in self._pipeline.sources.items()}
        hand_over_s = min(HAND_OVER_S, settings.kafka.linger_ms / 1000)
        gathered_ms = round(1000 * hand_over_s)  # by the delivery; the client gathers for what is left of the linger
        kafka = dataclasses.replace(
            settings.kafka, linger_ms=settings.kafka.linger_ms - gathered_ms, client=client or settings.kafka.client
        )
        self._publisher = make_publisher(bootstrap, kafka, topics)
        self._log = MessageLog.open(
            lake.collector_log(node),
            node,
            limit=collect.log_bytes,
            group_commit_ms=collect.group_commit_ms,
            protocol=collect.protocol,
        )
        self._recent = RecentEvents(topics)
        self._delivery = Delivery(
            self._log, self._publisher, self._recent.known, hand_over_s=hand_over_s, guarantee=self._guarantee
        )
        self._sources = SourceSet(
            settings, node, self._log, self._delivery, self._recent, topics,
            bootstrap=bootstrap, folder=self._folder, front=front,
        )  # fmt: skip
        for source in self._pipeline.sources.values():
            self._sources.add(source, urls.get(source.name, ""))
        self._stats = NodeStats(
            node, self._log, self._delivery, self._sources.names, self._sources.statuses, lambda: not self._not_ready()
        )
        self._stats.shedders = self._sources.shedders
        gate = Gate(keys, max_connections=collect.max_connections, rejects_per_s=collect.rejects_per_s)
        self._stats.gate = gate
        signer = Signer.of_lake(lake.state)
        self._door = Door(self._sources.intakes, self._not_ready, gate, signer, self._sources.one_way)
        self._lake_state = LakeState(lake)
        self._watch = Watch(self._lake_state, collect.watch_ms / 1000)
        rows = ProductRows(lake)
        answers = Answers(
            self._sources.get, self._recent, self._lake_state, rows, self._watch, max_waiters=collect.max_waiters
        )
        self._responder = Responder(answers, rows, self._pipeline, self._door)
        interests: Interests[StreamProtocol] = Interests()
        self._streams = Streams(self._door, interests, self._pipeline, collect.max_streams, self._until_ready)
        self._feed = self._streams.feed = Feed(interests, rows, self._watch, self._streams.tell)

    # --- sources at run time

    @property
    def sources(self) -> dict[str, Source]:
        """The sources that are collected now."""
        return {name: found for name in self._sources.names if (found := self._sources.get(name)) is not None}

    @property
    def replay(self) -> tuple[int, int]:
        """Events of an earlier run that are still to be sent to Kafka, and all that there were."""
        return self._delivery.to_replay, self._log.recovery.to_replay

    async def add_source(self, source: Source, url: str = "") -> None:
        """Collect a further source; its topic is made where it is absent.

        Args:
            source: with a name that is not collected yet.
            url: upstream to read instead of what the source says.

        Raises:
            ConfigError: a collector cannot be made.
            EnvironmentProblem: an address cannot be bound.
            BrokerUnavailable: its topic cannot be made now.
        """
        await asyncio.to_thread(ensure_topics, self._bootstrap, [source], self._security)
        self._sources.add(source, url or self._urls.get(source.name, ""))
        logger.info("source %s is collected now", source.name)

    async def remove_source(self, name: str) -> None:
        """Collect a source no more; what was taken still goes to Kafka."""
        await self._sources.remove(name)
        logger.info("source %s is not collected any more", name)

    async def apply(self, pipeline: Pipeline) -> None:
        """Start, stop and change sources so that they are those of ``pipeline``; the others go on undisturbed.

        Raises:
            MillraceError: a source could not be started; the others are as they should be.
        """
        wanted = front_pipeline(pipeline) if self._front else pipeline
        stop, start = changed(self.sources, wanted.sources)
        for name in stop:
            await self.remove_source(name)
        problem: MillraceError | None = None
        for name in start:
            try:
                await self.add_source(wanted.sources[name])
            except MillraceError as error:
                problem = error
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
        """Return when the node takes so many bytes of events; not any more once it stops."""
        await self._taking.wait()
        await self._log.room(size)

    def _progress(self) -> dict[str, dict[str, int]]:
        """For ``/readyz``: how much of what an earlier run left is still to be sent."""
        left, of = self.replay
        return {"replay": {"left": left, "of": of}} if left else {}

    async def run(
        self, http: bool, ready: Callable[[str], None] | None, stop: asyncio.Event, *, watch: bool = False
    ) -> None:
        """Run until ``stop`` is set; see :func:`run_collector`."""
        server = self._server() if http else None
        async with asyncio.TaskGroup() as tasks:
            delivery = tasks.create_task(self._deliver())
            others = [tasks.create_task(self._start(server.url if server else "", ready))]
            if server is not None:
                tasks.create_task(server.serve())
                others.append(tasks.create_task(self._streams.keep_alive()))
            if watch:
                others.append(tasks.create_task(self._follow_file(self._folder / "pipeline.toml")))
            await stop.wait()
            self._stopping = True
            self._taking.clear()
            for task in others:
                task.cancel()
            await self._sources.stop()
            if server is not None:
                server.stop()
            self._watch.close()
            await self._feed.close()
            await self._responder.close()
            await self._drain()
            delivery.cancel()

    def _server(self) -> HttpServer:
        app = make_app(
            door=self._door,
            stats=self._stats,
            recent=self._recent,
            pipeline=self._pipeline,
            lake_root=self._settings.lake,
            progress=self._progress,
            routes=self._responder.routes,
            responder=self._responder,
        )
        return HttpServer(app, self._door, self._settings.collect, ws=self._streams.protocol)

    async def _start(self, url: str, ready: Callable[[str], None] | None) -> None:
        await self._connect()
        await self._delivery.recovered()
        if self._log.recovery.to_replay:
            logger.info("sent again %d events of an earlier run", self._log.recovery.to_replay)
        self._ready = True
        self._taking.set()
        self._sources.run()
        if ready is not None:
            ready(url)

    async def _connect(self) -> None:
        pause = 0.2
        while True:
            try:
                sources = list(self._pipeline.sources.values())
                await asyncio.to_thread(ensure_topics, self._bootstrap, sources, self._security)
                await asyncio.to_thread(self._publisher.start, self._delivery.deliver)
            except BrokerUnavailable as error:
                logger.warning("%s; next attempt in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(_BROKER_BACKOFF_MAX_S, pause * 2)
            else:
                self._connected.set()
                return

    async def _deliver(self) -> None:
        await self._connected.wait()  # what an earlier run left would be sent before there is a client
        await self._delivery.run()

    async def _follow_file(self, path: Path) -> None:
        """Apply the pipeline's file whenever it has changed; one that cannot be used changes nothing."""
        seen = _stamp(path)
        while True:
            await asyncio.sleep(_WATCH_S)
            stamp = _stamp(path)
            if stamp is None or stamp == seen or not self._ready:
                continue
            try:
                await self.apply(await asyncio.to_thread(load_pipeline, path.parent))
                seen = stamp
            except BrokerUnavailable as error:
                logger.warning("%s is applied later: %s", path, error)
            except MillraceError as error:
                logger.error("the sources stay as they were, or nearly: %s", error)
                seen = stamp

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S if self._ready else 0):
                await self._delivery.drained()

    async def close(self) -> None:
        """Let go of Kafka and of the log; what Kafka has not acknowledged stays in the log."""
        self._sources.close()
        await asyncio.to_thread(self._publisher.close, 1.0)
        await self._log.close()


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
