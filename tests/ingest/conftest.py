"""Helpers of the collector's tests: real logs, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.fetcher import ConsumerRecord
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

import ingest.kafka
from ingest.errors import BrokerUnavailable
from ingest.log.message_log import MessageLog
from ingest.log.segments import LoggedEvent, SourceLane
from ingest.node import CollectorNode, NodeOptions
from jobs.local.stack import free_port
from lakehouse.contract.envelope import Envelope, fingerprint
from lakehouse.contract.pipeline import CollectorSpec, Pipeline, Source
from lakehouse.contract.settings import CollectSettings, KafkaSettings, Settings

LIMIT = 64 * 1024 * 1024


def envelope(number: int, payload: bytes, source: str = "rsvps", reject: str | None = None) -> Envelope:
    """The envelope of the event with this number."""
    return Envelope(f"e{number}", source, "default", 1_000_000 + number, "n1", fingerprint(payload), reject=reject)


def append(log: MessageLog, lane: SourceLane, number: int, size: int = 100, position: int | None = None) -> LoggedEvent:
    """Append an event whose payload starts with its number."""
    payload = f"{number}:".encode().ljust(size, b"x")
    return log.append(lane, envelope(number, payload), f"k{number % 7}".encode(), payload, position)


@pytest.fixture
def open_log(tmp_path: Path) -> Callable[..., MessageLog]:
    """Opens the message log of this test's folder."""

    def open_it(**options: int) -> MessageLog:
        return MessageLog(tmp_path / "log", "n1", **{"limit": LIMIT, **options})

    return open_it


def everything(log: MessageLog) -> list[LoggedEvent]:
    """All durable events that Kafka has not acknowledged."""
    found: list[LoggedEvent] = []
    cursor = log.cursor()
    while True:
        events, cursor = log.read(cursor, from_seq=log.recovery.acked, until_seq=1 << 62, max_bytes=4096)
        if not events:
            return found
        found += events


def event(number: int) -> bytes:
    """A payload of the test pipeline, about 300 bytes."""
    return b'{"id":%d,"who":"k%d","pad":"%s"}' % (number, number % 7, b"x" * 250)


def pipeline_of(topic: str, kind: str = "websocket", url: str = "", **source: object) -> Pipeline:
    """A pipeline of one source ``clicks`` with one collector."""
    collector = CollectorSpec(kind, url, "from" if kind == "websocket" else "")
    options: dict[str, Any] = {"event_id": "{id}", "key": "{who}", "collectors": (collector,), **source}
    clicks = Source(topic=topic, schema="id BIGINT", event_time="received_at", name="clicks", **options)
    return Pipeline({"clicks": clicks})


def settings_of(folder: Path, bootstrap: str = "", **collect: Any) -> Settings:
    """Settings for a node in this folder, on any free port."""
    kafka = KafkaSettings(bootstrap=bootstrap)
    return Settings(lake=folder, kafka=kafka, collect=CollectSettings(port=0, backoff_max_s=0.2, **collect))


def at_broker(settings: Settings, bootstrap: str) -> Settings:
    return replace(settings, kafka=replace(settings.kafka, bootstrap=bootstrap))


class Upstream:
    """A WebSocket server that plays messages from ``?from=N`` on, at most ``rate`` a second, all up to ``limit``."""

    def __init__(self, messages: Callable[[int], bytes | str] = event, rate: float = 1e9) -> None:
        self.limit = 0
        self.rate = rate
        self.requests: list[str] = []
        self.connections: list[ServerConnection] = []
        self.max_unread = 0
        self._messages = messages
        self._server: Server | None = None

    async def __aenter__(self) -> Upstream:
        self._server = await serve(self._play, "127.0.0.1", 0, compression=None)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/stream"

    async def _play(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.requests.append(connection.request.path)
        self.connections.append(connection)
        index = int(connection.request.path.partition("from=")[2] or 0)
        sent = 0
        started = time.perf_counter()
        with contextlib.suppress(ConnectionClosed):
            while connection.close_code is None:
                while index < self.limit and sent <= (time.perf_counter() - started) * self.rate:
                    await connection.send(self._messages(index), text=True)
                    index += 1
                    sent += 1
                await asyncio.sleep(0.002)


def consume(bootstrap: str, topic: str, at_least: int, timeout_s: float = 60) -> list[ConsumerRecord]:
    """All records of the topic, in order within each partition, once ``at_least`` different ids are there."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", metrics_enabled=False)
    try:
        partitions = [TopicPartition(topic, n) for n in sorted(consumer.partitions_for_topic(topic) or ())]
        consumer.assign(partitions)
        found: list[ConsumerRecord] = []
        ids: set[str] = set()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ends = consumer.end_offsets(partitions)
            for records in consumer.poll(timeout_ms=200).values():
                found += records
                ids.update(Envelope.from_headers(record.headers).event_id for record in records)
            if len(ids) >= at_least and all(consumer.position(p) >= end for p, end in ends.items()):
                return found
        raise AssertionError(f"{len(ids)} of {at_least} events after {timeout_s} s")
    finally:
        consumer.close()


async def eventually(check: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until the check holds."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_node(
    settings: Settings,
    pipeline: Pipeline,
    bootstrap: str,
    made: Callable[[CollectorNode], None] = lambda node: None,
    **options: Any,
) -> AsyncIterator[str]:
    """A collector node in this process; yields its base URL when it is ready."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    collector = CollectorNode(at_broker(settings, bootstrap), pipeline, NodeOptions(**options))
    made(collector)
    node = asyncio.create_task(collector.run(stop, url.set_result))
    try:
        await asyncio.wait((node, url), return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if node.done():
            node.result()
        yield await url
    finally:
        stop.set()
        await node


@contextlib.asynccontextmanager
async def unready_node(settings: Settings, pipeline: Pipeline) -> AsyncIterator[str]:
    """A collector node whose broker is away: it listens, and takes no events. Yields its base URL."""

    def away(*_: object) -> None:
        raise BrokerUnavailable("nobody", "it is away")

    port, stop = free_port(), asyncio.Event()
    settings = replace(settings, collect=replace(settings.collect, port=port))
    patch = pytest.MonkeyPatch()
    patch.setattr(ingest.kafka, "ensure_topics", away)  # a client that tries to connect would be noisy
    node = asyncio.create_task(CollectorNode(at_broker(settings, "127.0.0.1:1"), pipeline).run(stop))
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    await get(f"http://127.0.0.1:{port}", "/healthz")
                    break
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await node
        patch.undo()


async def get(url: str, path: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers and parsed body of a GET."""
    return await request(url, "GET", path)


async def request(
    url: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body (parsed where it is JSON) of one HTTP request."""

    def ask() -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, orjson.loads(data) if "json" in kind else data.decode()
        finally:
            connection.close()

    return await asyncio.to_thread(ask)
