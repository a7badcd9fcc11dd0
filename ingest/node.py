"""A collecting node: every collector of a pipeline, one message log, one way to Kafka, one HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal

from ingest.acks import RecentEvents
from ingest.app import HttpServer, make_app
from ingest.border import Border
from ingest.collectors.websocket import WebSocketCollector, shown_url
from ingest.delivery import HAND_OVER_S, Delivery
from ingest.errors import BrokerUnavailable
from ingest.log import MessageLog
from ingest.publish import ConfluentPublisher, KafkaPythonPublisher, ensure_topics
from ingest.source import Collector, Intake, UpstreamStatus
from ingest.stats import NodeStats
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import Settings

logger = logging.getLogger(__name__)

KafkaClient = Literal["kafka-python", "confluent-kafka"]
_CLOSE_S = 10.0
_BROKER_BACKOFF_MAX_S = 5.0


async def run_collector(
    settings: Settings,
    pipeline: Pipeline,
    *,
    node: str = "collector-1",
    bootstrap: str,
    urls: dict[str, str] | None = None,
    http: bool = True,
    ready: Callable[[str], None] | None = None,
    client: KafkaClient = "kafka-python",
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
        urls: WebSocket upstream by source, instead of what the pipeline says.
        http: whether to serve HTTP.
        ready: called once, with the base URL of the HTTP server (empty without one), when the node is ready.
        client: the Kafka client; ``confluent-kafka`` needs the ``fast`` extra.
        stop: ends the node.

    Raises:
        EnvironmentProblem: the log is in use by another process, or the port is taken.
    """
    node_parts = _Node(settings, pipeline, node, bootstrap, urls or {}, client)
    try:
        await node_parts.run(http, ready, stop)
    finally:
        await node_parts.close()


class _Node:
    def __init__(
        self,
        settings: Settings,
        pipeline: Pipeline,
        node: str,
        bootstrap: str,
        urls: dict[str, str],
        client: KafkaClient,
    ) -> None:
        collect = settings.collect
        self._settings = settings
        self._pipeline = pipeline
        self._bootstrap = bootstrap
        self._ready = False
        self._stopping = False
        topics = {name: source.topic for name, source in pipeline.sources.items()}
        hand_over_s = min(HAND_OVER_S, settings.kafka.linger_ms / 1000)
        publisher = ConfluentPublisher if client == "confluent-kafka" else KafkaPythonPublisher
        gathered_ms = round(1000 * hand_over_s)  # by the delivery; the client gathers for what is left of the linger
        kafka = dataclasses.replace(settings.kafka, linger_ms=settings.kafka.linger_ms - gathered_ms)
        self._publisher = publisher(bootstrap, kafka, topics)
        self._log = MessageLog.open(
            Lake(settings.lake).collector_log(node),
            node,
            limit=collect.log_bytes,
            group_commit_ms=collect.group_commit_ms,
        )
        self._recent = RecentEvents(topics)
        self._delivery = Delivery(self._log, self._publisher, self._recent.known, hand_over_s=hand_over_s)
        self._collectors: list[Collector] = []
        self._intakes: dict[str, Intake] = {}
        for source in pipeline.sources.values():
            border = Border(source, tenant=settings.tenant, collector=node)
            for ordinal, spec in enumerate(source.collectors):
                url = urls.get(source.name, spec.url) if spec.kind == "websocket" else ""
                # Another address is another stream: a position in one says nothing of the other.
                name = f"{source.name}/{spec.kind}/{ordinal}"
                lane = self._log.lane(f"{name} {shown_url(url)}" if url else name, source.name)
                if spec.kind == "http":
                    self._intakes[source.name] = Intake(border, lane, self._log, self._delivery, self._recent)
                    continue
                self._collectors.append(
                    WebSocketCollector(
                        url,
                        Intake(border, lane, self._log, self._delivery),
                        resume_param=spec.resume_param,
                        backoff_max_s=collect.backoff_max_s,
                    )
                )
        self._stats = NodeStats(
            node, self._log, self._delivery, list(pipeline.sources), self._statuses, lambda: not self._not_ready()
        )

    def _statuses(self) -> Iterable[UpstreamStatus]:
        return [collector.status() for collector in self._collectors]

    def _not_ready(self) -> str:
        if self._stopping:
            return "the node is stopping"
        if not self._ready:
            return "the node is starting: it waits for Kafka, or sends again what its log holds"
        if self._log.problem:
            return f"the message log cannot be written: {self._log.problem}"
        return "the message log is full" if self._log.full else ""

    async def run(self, http: bool, ready: Callable[[str], None] | None, stop: asyncio.Event) -> None:
        server = self._server() if http else None
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = [tasks.create_task(self._delivery.run())]
            if server is not None:
                tasks.create_task(server.serve())
            started = tasks.create_task(self._start(server.url if server else "", ready, running, tasks.create_task))
            await stop.wait()
            self._stopping = True
            started.cancel()
            for task in running[1:]:
                task.cancel()
            if server is not None:
                server.stop()
            await self._drain()
            running[0].cancel()

    def _server(self) -> HttpServer:
        app = make_app(
            intakes=self._intakes,
            stats=self._stats,
            recent=self._recent,
            pipeline=self._pipeline,
            lake_root=self._settings.lake,
            not_ready=self._not_ready,
        )
        return HttpServer(app, self._settings.collect.host, self._settings.collect.port)

    async def _start(
        self,
        url: str,
        ready: Callable[[str], None] | None,
        running: list[asyncio.Task[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        await self._connect()
        await self._delivery.recovered()
        if self._log.recovery.to_replay:
            logger.info("sent again %d events of an earlier run", self._log.recovery.to_replay)
        self._ready = True
        running.extend(spawn(collector.run()) for collector in self._collectors)
        if ready is not None:
            ready(url)

    async def _connect(self) -> None:
        pause = 0.2
        while True:
            try:
                await asyncio.to_thread(ensure_topics, self._bootstrap, list(self._pipeline.sources.values()))
                await asyncio.to_thread(self._publisher.start, self._delivery.deliver)
            except BrokerUnavailable as error:
                logger.warning("%s; next attempt in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(_BROKER_BACKOFF_MAX_S, pause * 2)
            else:
                return

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S if self._ready else 0):
                await self._delivery.drained()

    async def close(self) -> None:
        """Let go of Kafka and of the log; what Kafka has not acknowledged stays in the log."""
        await asyncio.to_thread(self._publisher.close, 1.0)
        await self._log.close()
