"""For tests of stream clients: a collector on a real log, a link that can be cut, an upstream that says anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from ingest.border.admission import Border
from ingest.collectors import Collector, CollectorContext
from ingest.collectors.upstream import LinesCollector, UpstreamClient, WebSocketCollector
from ingest.delivery import KafkaDelivery
from ingest.intake import Intake
from ingest.kafka import SendOutcome
from ingest.log.message_log import MessageLog
from ingest.log.segments import LoggedEvent
from ingest.simulate.player import FileLines, Player
from ingest.simulate.server import run_player
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.source import CollectorSpec
from tests.ingest.conftest import pipeline_of

C = TypeVar("C", bound=UpstreamClient)
SOURCE = pipeline_of("t").sources["clicks"]


def client(
    kind: type[C], url: str, intake: Intake, resume_param: str = "", backoff_max_s: float = 0.1, **options: Any
) -> C:
    """A client of this upstream."""
    name = (
        "websocket" if issubclass(kind, WebSocketCollector) else "lines" if issubclass(kind, LinesCollector) else "sse"
    )
    return kind(CollectorSpec(name, url, resume_param), CollectorContext(intake, url, backoff_max_s), **options)


class Kafka:
    """Takes everything, and says so if it is told to."""

    def __init__(self) -> None:
        self.got: list[LoggedEvent] = []
        self.delivery: KafkaDelivery
        self.acks = True
        self.acked = 0

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None: ...

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        self.got += events
        if self.acks:
            self.ack()

    def ack(self) -> None:
        outcomes = [SendOutcome(event, 0, event.seq) for event in self.got[self.acked :]]
        self.acked = len(self.got)
        asyncio.get_running_loop().call_soon(self.delivery.deliver, outcomes)

    def close(self, timeout_s: float) -> None: ...

    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.got]


@asynccontextmanager
async def collecting(
    log: MessageLog, make: Callable[[Intake], Collector], source: Source = SOURCE
) -> AsyncIterator[tuple[Collector, Kafka]]:
    """A collector on a lane ``clicks/test/0`` of the log, running."""
    kafka = Kafka()
    kafka.delivery = KafkaDelivery(log, kafka, lambda _: None)
    border = Border(source, tenant="default", collector="n1")
    collector = make(Intake(border, log.lane("clicks/test/0", "clicks"), log, kafka.delivery))
    tasks = [asyncio.create_task(kafka.delivery.run()), asyncio.create_task(collector.run())]
    try:
        yield collector, kafka
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        collector.close()
        await log.close()


@asynccontextmanager
async def playing(folder: Path, events: list[bytes], rate: float) -> AsyncIterator[int]:
    """Our own player of these events; its port."""
    path = folder / "events.jsonl"
    path.write_bytes(b"\n".join(events))
    lines, stop = FileLines(path), asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_player({"": Player(lines, rate)}, 0, port.set_result, stop))
    try:
        yield await port
    finally:
        stop.set()
        await task
        lines.close()


class Link:
    """A TCP proxy that can be cut.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, there_writer]
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def saying(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives each connection the next answer (the last again and again) and ends it; with the requests."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answers[min(len(asked), len(answers)) - 1])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def answer(body: bytes, kind: str = "text/event-stream", status: str = "200 OK") -> bytes:
    """A response that ends with the connection."""
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode() + body
