"""WebSocket subscribers: an asyncio protocol that uvicorn puts in place after the upgrade request.

Handshake and control frames are websockets' sans-I/O `ServerProtocol`; data frames were made once a channel and go
straight to the transport. No task and no queue per subscriber; a task only for as long as a subscriber waits for a
table or a replay.
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import orjson
from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from serve import messages
from serve.channel import Subscriber
from serve.errors import PositionError, RequestError
from serve.hub import Delivery, Hub
from serve.position import Position
from serve.push.codec import WEBSOCKET
from serve.tables import Tables, clock_ms

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

log = logging.getLogger(__name__)

PATH = "/v1/subscribe"
MAX_INCOMING_BYTES = 4_096
BAD_REQUEST, GOING_AWAY, INTERNAL_ERROR = 4400, 1001, 1011
_MAX_REASON = 120  # bytes; a control frame holds 125
_CLOSE_S = 2.0  # how long the other side has to answer a close
_UNSENT_BYTES = 131_072  # more than this the kernel does not hold back for a subscriber that does not read


def deliver(deliveries: Iterable[Delivery]) -> None:
    """Carry out what the hub says."""
    for delivery in deliveries:
        if delivery.data:
            for subscriber in delivery.to:
                subscriber.link.write(delivery.data)
        if delivery.wake:
            for subscriber in delivery.to:
                subscriber.link.pump()
        if delivery.close:
            for subscriber in delivery.to:
                subscriber.link.close(delivery.close, delivery.reason)


class SubscriberProtocol(asyncio.Protocol):
    """One WebSocket connection. Constructed by uvicorn; finds hub and tables in the lifespan's state.

    Args:
        config, server_state, app_state: as uvicorn gives them; ``app_state`` has ``hub`` and ``tables``.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._hub: Hub = app_state["hub"]
        self._tables: Tables = app_state["tables"]
        self._connections: set[Any] = server_state.connections
        self._loop = _loop or asyncio.get_running_loop()
        self._wire = ServerProtocol(max_size=MAX_INCOMING_BYTES, logger=log)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._subscriber = Subscriber(self, WEBSOCKET)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._drain: asyncio.Future[None] | None = None
        self._lost = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The upgrade request follows."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self._subscriber.label = f"{peer[0]}:{peer[1]}" if peer else "?"
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the subscriber."""
        self._lost = True
        self._connections.discard(self)
        self._hub.unsubscribed(self._subscriber)
        if self._task is not None:
            self._task.cancel()
        if self._closing is not None:
            self._closing.cancel()
        self._release()

    def data_received(self, data: bytes) -> None:
        """Handshake, control frames, acknowledgements."""
        self._wire.receive_data(data)
        self._react()

    def eof_received(self) -> None:
        """The other side sends no more; the transport closes."""
        self._wire.receive_eof()
        self._react()

    def pause_writing(self) -> None:
        """The transport's buffer is above its high-water mark."""
        self._hub.paused(self._subscriber, clock_ms())

    def resume_writing(self) -> None:
        """The transport's buffer has drained."""
        self._hub.drained(self._subscriber, clock_ms())
        self._release()
        if not self._subscriber.replaying:
            self.pump()

    # Link

    def write(self, data: bytes) -> None:
        """Data frames, as they are."""
        if not self._lost and self._wire.state is State.OPEN:
            self._transport.write(data)

    def pump(self) -> None:
        """Write what the hub has for this subscriber, until it is live or its socket takes no more."""
        while not self._lost and self._wire.state is State.OPEN and not self._subscriber.paused:
            data = self._hub.data_to_send(self._subscriber)
            if not data:
                return
            self._transport.write(data)

    def close(self, code: int, reason: str) -> None:
        """Start the close handshake; abort if it is not answered."""
        self._hub.unsubscribed(self._subscriber)
        if self._lost or self._closing is not None:
            return
        try:
            self._wire.send_close(code, reason.encode()[:_MAX_REASON].decode(errors="ignore"))
        except InvalidState:
            self._transport.close()
        self._flush()
        self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def buffered(self) -> int:
        """Bytes in the transport's buffer."""
        return 0 if self._lost else self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Returns when the socket takes more."""
        if self._subscriber.paused and not self._lost:
            self._drain = self._loop.create_future()
            await self._drain

    def shutdown(self) -> None:
        """Uvicorn stops."""
        self.close(GOING_AWAY, "the server stops; reconnect with your last position")

    # Protocol of the wire

    def _react(self) -> None:
        for event in self._wire.events_received():
            if isinstance(event, Request):
                self._accept(event)
            elif isinstance(event, Frame):
                self._frame_received(event)
        self._flush()
        if self._wire.close_expected() and self._closing is None:
            self._hub.unsubscribed(self._subscriber)
            self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _flush(self) -> None:
        """Send what the sans-I/O protocol wants sent; an empty part is its sign for the end."""
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    def _accept(self, request: Request) -> None:
        response = self._wire.accept(request)
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            if urlsplit(request.path).path != PATH:
                response = self._wire.reject(http.HTTPStatus.NOT_FOUND, f"WebSockets are served at {PATH}\n")
            elif not _same_origin(request):
                response = self._wire.reject(http.HTTPStatus.FORBIDDEN, "another site's page may not subscribe\n")
        self._wire.send_response(response)
        self._flush()
        if self._wire.state is State.OPEN:
            self._task = self._loop.create_task(self._subscribe(request.path))
            self._task.add_done_callback(self._subscribe_done)

    def _frame_received(self, frame: Frame) -> None:
        if frame.opcode is Opcode.PONG:
            self._hub.heard_from(self._subscriber, clock_ms())
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            try:
                self._acknowledged(bytes(frame.data) if frame.fin else b"")
            except RequestError as error:
                self._refuse(error)

    def _acknowledged(self, data: bytes) -> None:
        try:
            content = orjson.loads(data)
            kind, token = content["type"], content["position"]
            if kind != "ack" or not isinstance(token, str):
                raise RequestError(BAD_REQUEST, "bad_message", "a client sends acks of positions only")
            position = Position.parse(token)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise RequestError(BAD_REQUEST, "bad_message", "a message is an object with type and position") from None
        except PositionError as error:
            raise RequestError(BAD_REQUEST, "bad_position", str(error)) from None
        if self._subscriber.channel is not None:
            self._hub.acknowledged(self._subscriber, position)

    # Subscribing

    async def _subscribe(self, path: str) -> None:
        try:
            table, position = _parse(path)
            await self._tables.wait_for(table)
            if problem := self._tables.problems.get(table):
                raise RequestError(BAD_REQUEST, "not_served", problem)
            replay_from = self._hub.subscribed(self._subscriber, table, position)
        except RequestError as error:
            self._refuse(error)
            return
        self._subscriber.label += f" {table}"
        self.pump()
        if replay_from is not None:
            await self._tables.replay(self._subscriber, replay_from)

    def _subscribe_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: the subscription failed", self._subscriber.label, exc_info=error)
            self.close(INTERNAL_ERROR, "the server failed; its log says how")

    def _refuse(self, error: RequestError) -> None:
        self.write(WEBSOCKET.frame(messages.error(error.code, error.detail)))
        self.close(error.close, error.detail)

    def _release(self) -> None:
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)
        self._drain = None


def _parse(path: str) -> tuple[str, Position | None]:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if unknown := query.keys() - {"table", "from"}:
        raise RequestError(BAD_REQUEST, "bad_request", f"unknown parameters: {', '.join(sorted(unknown))}")
    if any(len(values) != 1 for values in query.values()) or not query.get("table", [""])[0]:
        raise RequestError(BAD_REQUEST, "bad_request", "give one table, and one from at most")
    token = query.get("from", [""])[0]
    if not token and "from" in query:
        raise RequestError(BAD_REQUEST, "bad_position", "from is empty")
    try:
        return query["table"][0], Position.parse(token) if token else None
    except PositionError as error:
        raise RequestError(BAD_REQUEST, "bad_position", str(error)) from None


def _same_origin(request: Request) -> bool:
    """Browsers let any page open a WebSocket to anywhere and say in Origin which page it is."""
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("Host")
