"""How played events leave: a server that clients read, or devices that publish to a collector.

The server has WebSocket, SSE, chunked JSON lines and its own state, on one port of the loopback address::

    ws://127.0.0.1:PORT/stream[?from=N] a text frame an event; a binary one if it is not UTF-8
    GET /sse[?from=N]                   id is the event's index; Last-Event-ID resumes after it
    GET /lines[?from=N]                 chunked JSON lines
    GET /status                         {"sent", "live", "total", "done", "rate"}
    GET /times?from=N[&limit=M]         {"from", "at_ms": when each event was first sent, ms since the epoch, or null}
    GET /ids?from=N[&limit=M]           {"from", "ids": id of each event by the pipeline's template, or null}

``source=NAME`` selects one of several players (the sources of a scene); the default is the first. Without ``from`` a
client starts at the live point; with it, it gets missed events at once and then live ones. Streams stay open at the
end, like those of a live upstream.

``websockets``' sans-I/O protocol does the handshake and control frames; events due in one tick go out in one write. A
task and a queue per client, or an ASGI message per event, cost four times as much.

A device publishes only while somebody is interested (:mod:`ingest.answers.interests`). There is one for each source
that is played. What is due while nobody is interested is never sent, as by a sensor that rests; publishing goes on at
the live point.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from ingest.simulate.player import Play, Player, players_of
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.listen import is_utf8
from lakehouse.contract.pipeline import Pipeline

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_TICK_S = 0.005
_BATCH = 256  # most events in a write
_BUFFER_BYTES = 262_144  # unsent bytes above which the player waits for a client
_REQUEST_TIMEOUT_S = 10.0
_LIMIT = 10_000
_IDS_AT_ONCE = 200  # parsing them takes 2 ms

Encode = Callable[[int, list[bytes]], bytes]


class BadRequest(ValueError):
    pass


async def play_pipeline(
    pipeline: Pipeline,
    play: Play,
    *,
    ready: Callable[[str], None] = lambda _: None,
    stop: asyncio.Event,
) -> None:
    """Play a recording for the first source, or invented events for all sources, until ``stop`` is set.

    SIGUSR1 makes the events due by then the last.

    Args:
        pipeline: ``/ids`` uses the ``event_id`` of its sources.
        ready: called with the base URL once clients can connect.

    Raises:
        ConfigError: there is neither a recording nor a scene for this pipeline.
        EnvironmentProblem: the file cannot be read or the port is taken.
    """
    with ExitStack() as held:
        players = players_of(pipeline, play, held)

        def halt() -> None:
            for player in players.values():
                player.halt()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, halt)
        held.callback(loop.remove_signal_handler, signal.SIGUSR1)
        try:
            await run_player(players, play.port, lambda bound: ready(f"http://{_HOST}:{bound}"), stop)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            problem = f"port {play.port} is taken"
            raise EnvironmentProblem(problem, "Stop what listens there, or choose another port") from None


async def run_player(
    players: Mapping[str, Player], port: int, ready: Callable[[int], None], stop: asyncio.Event
) -> None:
    """Serve players by source until ``stop`` is set; clients are told the end (WebSocket close code 1001).

    Args:
        port: port to bind; 0: any free one.
        ready: called with the bound port once clients can connect.

    Raises:
        OSError: the port cannot be bound.
    """
    clients: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        clients.add(task)
        try:
            await _Client(players, reader, writer).run()
        except ConnectionError as error:
            logger.info("a client went away: %s", error)
        finally:
            clients.discard(task)
            writer.close()

    listener = await asyncio.start_server(serve, _HOST, port)
    try:
        ready(listener.sockets[0].getsockname()[1])
        await stop.wait()
    finally:
        listener.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


class _Client:
    """One connection: a request that is answered or streamed."""

    def __init__(
        self, players: Mapping[str, Player], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._players = players
        self._player = next(iter(players.values()))
        self._reader = reader
        self._writer = writer
        self._protocol = ServerProtocol(max_size=65_536)
        writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def run(self) -> None:
        request = await self._request()
        if request is None:
            return
        url = urlsplit(request.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        try:
            source = query.get("source")
            if source is not None and len(self._players) > 1:
                if source not in self._players:
                    raise BadRequest(f"source={source!r} is not played; there are: {', '.join(self._players)}")
                self._player = self._players[source]
            first = _whole_number("from", query.get("from"))
            limit = _whole_number("limit", query.get("limit"))
            limit = _LIMIT if limit is None else min(limit, _LIMIT)
            match url.path:
                case "/stream":
                    await self._websocket(request, self._start(first))
                case "/sse":
                    last = _whole_number("Last-Event-ID", request.headers.get("Last-Event-ID"))
                    await self._http(self._start(first if last is None else last + 1), "text/event-stream", _sse)
                case "/lines":
                    await self._http(self._start(first), "application/x-ndjson", _ndjson)
                case "/status":
                    await self._answer(self._player.status())
                case "/times":
                    await self._answer({"from": first or 0, "at_ms": self._player.times(first or 0, limit)})
                case "/ids":
                    await self._answer({"from": first or 0, "ids": await self._ids(first or 0, limit)})
                case _:
                    await self._answer({"title": "Not Found", "status": 404}, "404 Not Found")
        except BadRequest as error:
            await self._answer({"title": "Bad Request", "status": 400, "detail": str(error)}, "400 Bad Request")

    async def _request(self) -> Request | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                while data := await self._reader.read(65_536):
                    self._protocol.receive_data(data)
                    for event in self._protocol.events_received():
                        if isinstance(event, Request):
                            return event
                    if self._protocol.handshake_exc is not None:
                        await self._answer({"title": "Bad Request", "status": 400}, "400 Bad Request")
                        return None
        return None

    def _start(self, first: int | None) -> int:
        live = self._player.join()
        return live if first is None else first

    async def _ids(self, first: int, limit: int) -> list[str | None]:
        found: list[str | None] = []
        while len(found) < limit:
            some = self._player.ids(first + len(found), min(_IDS_AT_ONCE, limit - len(found)))
            if not some:
                break
            found += some
            await asyncio.sleep(0)
        return found

    async def _answer(self, value: Any, status: str = "200 OK") -> None:
        body = orjson.dumps(value)
        kind = "application/json" if status.startswith("200") else "application/problem+json"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._writer.write(head.encode() + body)
        await self._writer.drain()

    async def _websocket(self, request: Request, start: int) -> None:
        self._protocol.send_response(self._protocol.accept(request))
        self._flush()
        if self._protocol.state is not State.OPEN:
            return
        try:
            await self._until_closed(start, self._frames)
        finally:
            if self._protocol.state is State.OPEN:
                self._protocol.send_close(1001, "the player stops")
            self._flush()

    def _frames(self, index: int, events: list[bytes]) -> bytes:
        for event in events:
            if event.isascii() or is_utf8(event):
                self._protocol.send_text(event)
            else:
                self._protocol.send_binary(event)
        return b"".join(self._protocol.data_to_send())

    async def _http(self, start: int, kind: str, encode: Encode) -> None:
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nCache-Control: no-store\r\n"
            "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        self._writer.write(head.encode())
        try:
            await self._until_closed(start, lambda index, events: _chunk(encode(index, events)))
        finally:
            if not self._writer.is_closing():
                self._writer.write(_chunk(b""))

    async def _until_closed(self, start: int, encode: Encode) -> None:
        """Play until the client disconnects or this task is cancelled."""
        tasks = {asyncio.create_task(self._play(start, encode)), asyncio.create_task(self._listen())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _play(self, index: int, encode: Encode) -> None:
        while True:
            due_in = self._player.due_in(index)
            if due_in is None:
                await asyncio.Event().wait()  # the end: nothing more comes
            elif due_in > 0:
                await asyncio.sleep(max(due_in, _TICK_S))
            events = self._player.take(index, _BATCH)
            if events:
                self._player.sent(index, len(events))
                self._writer.write(encode(index, events))
                index += len(events)
                await self._writer.drain()
                if len(events) == _BATCH:
                    await asyncio.sleep(0)  # let other clients run while this one catches up

    async def _listen(self) -> None:
        """Answer pings and the close; ignore everything else."""
        upgraded = self._protocol.state is State.OPEN
        while data := await self._reader.read(65_536):
            if upgraded:
                self._protocol.receive_data(data)
                self._protocol.events_received()
                self._flush()
                if self._protocol.state is not State.OPEN:
                    return

    def _flush(self) -> None:
        data = b"".join(self._protocol.data_to_send())
        if data and not self._writer.is_closing():
            self._writer.write(data)


def _whole_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise BadRequest(f"{name}={text!r} is not a whole number from 0 on")
    return int(text)


def _sse(index: int, events: list[bytes]) -> bytes:
    # A carriage return ends a line in SSE. In JSON it is white space, like the line feed that replaces it.
    texts = (event.replace(b"\r", b"\ndata: ") for event in events)
    return b"".join(b"id: %d\ndata: %b\n\n" % (number, text) for number, text in enumerate(texts, index))


def _ndjson(index: int, events: list[bytes]) -> bytes:
    return b"\n".join(events) + b"\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class SimulatedDevice:
    """A device of one source.

    Args:
        url: of the collector.
        key: that the collector asks for; empty: none.
        told: called when the device is told whether somebody is interested.

    Attributes:
        sent: events.
        acknowledged: of those.
        refused: of those.
    """

    def __init__(
        self, source: str, player: Player, url: str, key: str, told: Callable[[SimulatedDevice, bool], None]
    ) -> None:
        self.source = source
        self.sent = self.acknowledged = self.refused = 0
        self._player = player
        self._url = url.rstrip("/").replace("http", "ws", 1) + "/v1/stream"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._told = told
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Publish when asked to, until cancelled. It connects again by itself.

        Raises:
            EnvironmentProblem: the collector refuses the device.
        """
        try:
            async for connection in connect(self._url, additional_headers=self._headers):
                try:
                    await self._talk(connection)
                except ConnectionClosed as closed:
                    logger.info("%s: the connection ended, the device connects again: %s", self.source, closed)
                finally:
                    self._wanted.clear()
        except (InvalidHandshake, InvalidURI) as error:
            raise EnvironmentProblem(f"{self._url} refuses devices: {error}", "Check --to and --key") from None

    async def _talk(self, connection: ClientConnection) -> None:
        await connection.send(orjson.dumps({"demand": self.source}), text=True)
        publishing = asyncio.create_task(self._publish(connection))
        try:
            async for message in connection:
                self._hear(orjson.loads(message))
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    def _hear(self, said: dict[str, object]) -> None:
        if "ack" in said:
            self.acknowledged += 1
        elif said.get("refused") is not None:
            self.refused += 1
        elif "refused" in said:
            raise EnvironmentProblem(f"{self.source}: {said['detail']}", "Check --to, --key and the pipeline")
        elif said.get("wanted") is True:
            self._wanted.set()
            self._told(self, True)
        elif said.get("wanted") is False:
            self._wanted.clear()
            self._told(self, False)

    async def _publish(self, connection: ClientConnection) -> None:
        while True:
            await self._wanted.wait()
            index = self._player.join()
            while self._wanted.is_set():
                due_in = self._player.due_in(index)
                if due_in is None:
                    return
                if due_in > 0:
                    await asyncio.sleep(max(due_in, _TICK_S))
                for event in self._player.take(index, _BATCH):
                    if not self._wanted.is_set():
                        break
                    head = orjson.dumps({"publish": self.source, "id": self.sent})
                    await connection.send(b'%b,"event":%b}' % (head[:-1], event), text=True)
                    self._player.sent(index, 1)
                    self.sent += 1
                    index += 1


async def run_devices(
    pipeline: Pipeline,
    play: Play,
    url: str,
    key: str,
    told: Callable[[SimulatedDevice, bool], None],
    stop: asyncio.Event,
) -> None:
    """Run a device for each source that is played, until ``stop`` is set.

    Args:
        play: what is played; where does not matter.

    Raises:
        ConfigError: there is neither a recording nor a scene for this pipeline.
        EnvironmentProblem: the file cannot be read, or the collector refuses a device.
    """
    with ExitStack() as held:
        devices = [
            SimulatedDevice(name, player, url, key, told) for name, player in players_of(pipeline, play, held).items()
        ]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [stopped, *tasks]:
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)
