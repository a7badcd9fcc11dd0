"""A player on the network: WebSocket, SSE, chunked JSON lines and its own state, on one port.

::

    ws://HOST:PORT/stream[?from=N]      a text frame an event; a binary one if it is not UTF-8
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
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from ingest.simulate.generator import RsvpGenerator
from ingest.simulate.player import FileLines, Lines, Player, SceneLines
from ingest.simulate.scenes import SCENES, Scene
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.listen import is_utf8
from lakehouse.contract.pipeline import Pipeline

logger = logging.getLogger(__name__)

RSVPS = "rsvps"  # source of the RSVP generator
_SAMPLE = 2_000  # events of a scene from which the shares of its sources are estimated
_TICK_S = 0.005
_BATCH = 256  # most events in a write
_BUFFER_BYTES = 262_144  # unsent bytes above which the player waits for a client
_REQUEST_TIMEOUT_S = 10.0
_LIMIT = 10_000
_IDS_AT_ONCE = 200  # parsing them takes 2 ms

Encode = Callable[[int, list[bytes]], bytes]


class BadRequest(ValueError):
    pass


async def run_player(
    player: Player | Mapping[str, Player],
    *,
    host: str = "127.0.0.1",
    port: int = 8402,
    ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve the player until ``stop`` is set, or for ever.

    Args:
        player: what to play; several by source.
        port: port to bind; 0: any free one.
        ready: called with the bound port once clients can connect.
        stop: ends the server; clients are told (WebSocket close code 1001).

    Raises:
        OSError: the port cannot be bound.
    """
    players = {"": player} if isinstance(player, Player) else player
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

    listener = await asyncio.start_server(serve, host, port)
    try:
        if ready is not None:
            ready(listener.sockets[0].getsockname()[1])
        await (stop or asyncio.Event()).wait()
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
            self._player = self._chosen(query.get("source"))
            match url.path:
                case "/stream":
                    await self._websocket(request, self._start(query))
                case "/sse":
                    await self._http(self._sse_start(request, query), "text/event-stream", _sse)
                case "/lines":
                    await self._http(self._start(query), "application/x-ndjson", _ndjson)
                case "/status":
                    await self._answer(asdict(self._player.status()))
                case "/times":
                    first, limit = _slice(query)
                    await self._answer({"from": first, "at_ms": self._player.times(first, limit)})
                case "/ids":
                    first, limit = _slice(query)
                    await self._answer({"from": first, "ids": await self._ids(first, limit)})
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

    def _chosen(self, source: str | None) -> Player:
        if source is None or len(self._players) == 1:
            return self._player
        if source not in self._players:
            raise BadRequest(f"source={source!r} is not played; there are: {', '.join(self._players)}")
        return self._players[source]

    def _start(self, query: dict[str, str]) -> int:
        wanted = _number(query, "from", -1)
        live = self._player.join()
        return live if wanted < 0 else wanted

    def _sse_start(self, request: Request, query: dict[str, str]) -> int:
        last = request.headers.get("Last-Event-ID")
        if last is not None:
            query = {"from": str(_whole_number("Last-Event-ID", last) + 1)}
        return self._start(query)

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


def _number(query: dict[str, str], name: str, default: int) -> int:
    return _whole_number(name, query[name]) if name in query else default


def _slice(query: dict[str, str]) -> tuple[int, int]:
    return _number(query, "from", 0), min(_number(query, "limit", _LIMIT), _LIMIT)


def _whole_number(name: str, text: str) -> int:
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


@dataclass(frozen=True, slots=True)
class Play:
    """What is played, and where.

    Attributes:
        input: JSON-lines file, also gzipped; None: endless invented events.
        rate: events a second, of all sources together.
        seed: of invented events.
        port: port to bind; 0: any free one.
    """

    input: Path | None = None
    rate: float = 100.0
    seed: int = 1
    host: str = "127.0.0.1"
    port: int = 8402


async def play_pipeline(
    pipeline: Pipeline,
    play: Play,
    *,
    ready: Callable[[str], None] = lambda _: None,
    stop: asyncio.Event | None = None,
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
            await run_player(
                players,
                host=play.host,
                port=play.port,
                ready=lambda bound: ready(f"http://{play.host}:{bound}"),
                stop=stop,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            problem = f"port {play.port} is taken"
            raise EnvironmentProblem(problem, "Stop what listens there, or choose another port") from None


def players_of(pipeline: Pipeline, play: Play, held: ExitStack) -> dict[str, Player]:
    """Players by source: of a recording for the first source, or of invented events for all.

    Args:
        held: closes what they read.

    Raises:
        ConfigError: there is neither a recording nor a scene for this pipeline.
        EnvironmentProblem: the file cannot be read.
    """
    source = next(iter(pipeline.sources.values()))
    scene = SCENES.get(pipeline.name)
    lines: Lines
    if play.input is not None:
        try:
            lines = FileLines(play.input)
        except OSError as error:
            problem = f"{play.input} cannot be read: {error.strerror or error}"
            raise EnvironmentProblem(problem, "Check the path") from None
        held.callback(lines.close)
    elif scene is not None:
        return scene_players(scene, pipeline, rate=play.rate, seed=play.seed)
    elif source.name == RSVPS:
        lines = RsvpGenerator(play.seed, rate=play.rate)
    else:
        raise ConfigError(
            f"there is no scene for the pipeline {pipeline.name!r}",
            key="pipeline",
            remedy=f"Give a recording with --input; scenes: {', '.join(sorted([*SCENES, 'meetup']))}",
        )
    return {source.name: Player(lines, play.rate, event_id=source.event_id_template)}


def scene_players(
    scene: Scene, pipeline: Pipeline, *, rate: float, seed: int, start_ms: int | None = None
) -> dict[str, Player]:
    """A player for each source of the scene, with rates in the proportions of the scene.

    Raises:
        ConfigError: the scene has events of a source that the pipeline lacks.
    """
    start_ms = int(time.time() * 1000) if start_ms is None else start_ms
    mix = Counter(source for source, _ in islice(scene(seed, start_ms), _SAMPLE))
    unknown = mix.keys() - pipeline.sources.keys()
    if unknown:
        raise ConfigError(
            f"the scene has events of {min(unknown)!r}",
            key="sources",
            remedy=f"Sources of {pipeline.name}: {', '.join(pipeline.sources)}",
            file=pipeline.path,
        )
    players = {}
    for name in (name for name in pipeline.sources if name in mix):
        share = mix[name] / mix.total()
        lines = SceneLines(scene, name, seed, start_ms)
        players[name] = Player(lines, rate * share, event_id=pipeline.sources[name].event_id_template)
    return players
