"""Publish/subscribe collection: one WebSocket, ``/v1/stream``, publishes events and subscribes to products by key.

Messages are JSON objects in text frames:

=============================================================  =====================================================
client → node                                                  node → client
=============================================================  =====================================================
``{"publish": SOURCE, "event": {…}, "id": ID}``                ``{"ack": ID, "token": …}`` once the event is safe, or
                                                               ``{"refused": ID, "status": …, "detail": …}``
``{"subscribe": PRODUCT, "keys": [[…], …], "id": ID}``         ``{"subscribed": PRODUCT, "keys": N, "id": ID}``, then
                                                               ``{"product", "key", "version", "rows"}`` per key, now
                                                               and whenever its rows change
``{"subscribe": PRODUCT, "keys": []}``                         interest ends
``{"demand": SOURCE, "about": {COLUMN: VALUE, …}, "id": ID}``  ``{"demand": SOURCE, "wanted": true}`` or ``false``, now
                                                               and whenever that changes
=============================================================  =====================================================

``subscribe`` replaces the keys of that product: a car on another road sends its new list. ``publish`` without ``id`` is
not acknowledged; an ``ID`` is a string or a number. While the log is full, or the client does not read, nothing is read
from it. A client that resumes reading is told the newest state of each key that changed.
``demand`` replaces what was asked of that source (:mod:`ingest.answers.interests`).
"""

from __future__ import annotations

import asyncio
import http
import logging
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from ingest.answers.interests import Asked, Demand, Interests, Key, ProductFollower
from ingest.answers.tables import ProductTables, TenantRows
from ingest.border.access import ApiKey
from ingest.border.admission import Admitted
from ingest.errors import LogFull, LogUnavailable, NotReady, RequestRefused, refusal_code
from ingest.intake import RequestIntake, first_key, published_event
from ingest.log.segments import CommitGroup
from lakehouse.contract.listen import is_utf8
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.demand import Want, sources_of

if TYPE_CHECKING:
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

PATH = "/v1/stream"
MAX_MESSAGE_BYTES = 1_100_000
MAX_KEYS = 1_000  # of one connection
_BUFFER_BYTES = 262_144  # unsent bytes of a connection above which updates are postponed
_PING_S = 20.0
_KEYS_S = 1.0  # between two looks whether keys still stand
_UNAUTHORIZED = 4401  # close code, as the server's
_CLOSE_S = 2.0


class _LenientServerProtocol(ServerProtocol):
    """Accepts a close between the frames of a message, as any control frame (RFC 6455, 5.4); that message is lost."""

    def recv_frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self.current_size = None
        super().recv_frame(frame)


class StreamProtocol(asyncio.Protocol):
    """One connection, beneath uvicorn and without a task of its own.

    ``websockets``' sans-I/O protocol does the handshake and the control frames.

    Args:
        server: uvicorn's set of connections.
    """

    def __init__(self, streams: Streams, server: set[Any]) -> None:
        self._streams = streams
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._wire = _LenientServerProtocol(max_size=MAX_MESSAGE_BYTES, logger=logger)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._open = False
        self._closing: asyncio.TimerHandle | None = None
        self._paused = False  # the peer does not read
        self._holding = False  # earlier messages wait
        self._silent = 0
        self._parts: list[bytes] = []  # of a message in several frames
        self._opcode = Opcode.TEXT  # of that message
        self._stale: dict[tuple[TenantRows, Key], None] = {}  # sent when the socket drains
        self._follows: set[tuple[str, str]] = set()  # tenant and product of its subscriptions
        self._asked: dict[str, Asked] = {}  # by source
        self._held: deque[bytes] = deque()  # messages that came while the log was full
        self._unacked: deque[tuple[Any, CommitGroup | None, Admitted]] = deque()
        self._waiting: asyncio.Task[None] | None = None
        self._key: str | None = None
        self._admitted: ApiKey | None = None
        self._limited: frozenset[tuple[str, str]] = frozenset()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_NOTSENT_LOWAT") and raw.family != socket.AF_UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _BUFFER_BYTES)
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; published events stay in the log."""
        self._open = False
        self._server.discard(self)
        if self._closing is not None:
            self._closing.cancel()
        self._streams.connections.discard(self)
        self._streams.interests.gone(self)
        self._streams.followed.subtract(self._follows)
        for asked in self._asked.values():
            self._streams.demand.forget(asked)
        self._streams.requests.gate.release(self._limited)
        self._limited = frozenset()
        self._unacked.clear()
        if self._waiting is not None:
            self._waiting.cancel()

    def data_received(self, data: bytes) -> None:
        self._wire.receive_data(data)
        self._react()

    def eof_received(self) -> None:
        self._wire.receive_eof()
        self._react()

    def pause_writing(self) -> None:
        """Read nothing while the peer does not read, so that answers stay bounded."""
        self._paused = True
        self._balance()

    def resume_writing(self) -> None:
        """Send the newest state of each key that changed meanwhile."""
        self._paused = False
        self._balance()
        stale, self._stale = self._stale, {}
        for part, key in stale:
            self.tell(part, (key,))
        for asked in self._asked.values():
            self._tell_demand(asked)

    def ping(self) -> None:
        """Send a ping; cut the connection if the two before it were not answered."""
        if not self._holding:  # while holding, the pong would not be read
            self._silent += 1
        if self._silent > 2:
            self._transport.abort()
        elif self._wire.state is State.OPEN:
            self._wire.send_ping(b"")
            self._flush()

    def check_key(self) -> None:
        """Close the connection if its key was revoked or changed, or has expired."""
        if self._open and not self._streams.requests.gate.stands(self._admitted):
            self._close(_UNAUTHORIZED, "the key was revoked, has expired, or may do something else now")

    def shutdown(self) -> None:
        self._close(CloseCode.GOING_AWAY, "the node stops; connect again")

    def _send(self, body: bytes) -> None:
        if self._open and self._wire.state is State.OPEN:
            self._transport.write(Frame(Opcode.TEXT, body).serialize(mask=False))

    def _hold(self, holding: bool) -> None:
        """Stop or resume reading while earlier messages wait."""
        self._holding = holding
        self._balance()

    def _balance(self) -> None:
        if self._transport.is_closing():
            return
        if self._paused or self._holding:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _close(self, code: int, reason: str) -> None:
        self._open = False
        if self._closing is not None or self._transport.is_closing():
            return
        try:
            self._wire.send_close(code, reason)
        except InvalidState:
            self._transport.close()
        self._flush()
        self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _react(self) -> None:
        for event in self._wire.events_received():
            self._silent = 0
            if isinstance(event, Request):
                self._accept(event)
            elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._frame_received(event)
        self._flush()
        over = self._wire.close_expected() or self._wire.state is State.CLOSED  # CLOSED: without a close frame
        if over and self._closing is None:
            self._open = False
            self._closing = self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _accept(self, request: Request) -> None:
        response = self._wire.accept(request)
        if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
            refusal = self._refusal(request)
            if refusal is not None:
                response = self._wire.reject(*refusal)
        self._wire.send_response(response)
        self._flush()
        if self._wire.state is State.OPEN:
            self._open = True
            self._streams.connections.add(self)

    def _frame_received(self, frame: Frame) -> None:
        if frame.opcode is not Opcode.CONT:
            self._opcode = frame.opcode
        self._parts.append(bytes(frame.data))
        if not frame.fin:
            return
        message, self._parts = b"".join(self._parts), []
        if self._opcode is Opcode.TEXT and not is_utf8(message):
            self._open = False
            self._wire.fail(CloseCode.INVALID_DATA, "text that is not UTF-8")
        elif self._open:  # data after a close is ignored
            self._flush()  # pongs of earlier pings
            self._take(message)

    def _flush(self) -> None:
        for data in self._wire.data_to_send():
            if data:
                self._transport.write(data)
            else:
                self._transport.close()

    # --- messages

    def tell(self, part: TenantRows, keys: Sequence[Key]) -> None:
        """Send the states of keys, or mark them stale if the socket is full."""
        if not self._open:
            return
        for key in keys:
            state = self._streams.interests.state(part, key)
            if self._paused:
                self._stale[part, key] = None
            elif state is not None:
                head = orjson.dumps({"product": part.product, "key": key, "version": state.version})
                self._send(head[:-1] + b',"rows":' + state.rows + b"}")

    def _refusal(self, request: Request) -> tuple[http.HTTPStatus, str] | None:
        origin = request.headers.get("Origin")
        if urlsplit(request.path).path != PATH:
            return http.HTTPStatus.NOT_FOUND, f"WebSockets are taken at {PATH}\n"
        if origin is not None and urlsplit(origin).netloc != request.headers.get("Host"):
            return http.HTTPStatus.FORBIDDEN, "another site's page may not connect\n"
        if not self._known(request):
            return http.HTTPStatus.UNAUTHORIZED, "show a key: Authorization: Bearer KEY\n"
        if len(self._streams.connections) >= self._streams.most:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, "too many connections\n"
        return None

    def _known(self, request: Request) -> bool:
        """Whether the shown key is known, if keys are required. Each source checks it again."""
        self._key = first_key((name.encode(), value.encode()) for name, value in request.headers.raw_items())
        gate = self._streams.requests.gate
        try:
            self._admitted = gate.key(self._key) if gate.keys_required else None
        except RequestRefused:
            return False
        return True

    def _take(self, message: bytes) -> None:
        if self._held:
            self._held.append(message)
            return
        try:
            self._handle(message)
        except (LogFull, LogUnavailable) as error:
            logger.info("a publisher waits: %s", error)
            self._held.append(message)
            self._hold(True)
            self._waiting = self._loop.create_task(self._take_held())

    async def _take_held(self) -> None:
        """Handle held messages in order once the node or its log takes events, then read on."""
        while self._held:
            try:
                self._handle(self._held[0])
                self._held.popleft()
            except NotReady as error:
                await (error.until_ready() if error.until_ready is not None else self._streams.until_ready(0))
            except LogFull as error:
                await self._streams.until_ready(error.size)
            except LogUnavailable:
                await self._streams.until_ready(0)
        self._hold(False)

    def _handle(self, message: bytes) -> None:
        try:
            content = orjson.loads(message)
        except orjson.JSONDecodeError as error:
            content = None
            detail = f"not JSON: {error}"
        else:
            detail = "a message is an object with publish, subscribe or demand"
        fields = content if isinstance(content, dict) else {}
        number = fields.get("id")
        if not isinstance(number, str | int | float | None):  # it is sent back, so its type is restricted
            self._refuse(None, RequestRefused("an id is a text or a number", 400))
        elif isinstance(fields.get("publish"), str):
            self._publish(fields, message)
        elif isinstance(fields.get("subscribe"), str):
            self._subscribe(fields)
        elif isinstance(fields.get("demand"), str):
            self._ask(fields)
        else:
            self._refuse(number, RequestRefused(detail, 400))

    def _publish(self, content: dict[str, Any], message: bytes) -> None:
        name, number = content["publish"], content.get("id")
        requests = self._streams.requests
        intake = requests.intakes.get(name)
        try:
            if intake is None:
                raise RequestRefused(f"there is no source {name!r} that takes events here", 404, code="unknown-source")
            sender = requests.gate.admit(intake.border.source, self._key)
            self._limited = requests.gate.hold(intake.border.source, sender, self._limited)
            requests.check_ready(intake)
            requests.gate.spend(intake.border.source, sender, 1)
        except RequestRefused as refused:
            requests.count(name if intake is not None else "", refused)
            self._refuse(number, refused)
            return
        event = published_event(message)
        admitted = intake.border.admit(event, tenant=sender.tenant, max_bytes=sender.max_event_bytes)
        group = None
        if admitted.refusal is None or requests.gate.keep_reject(name):
            group = intake.take(admitted).group
        if number is None or intake.one_way:
            return
        self._unacked.append((number, group, admitted))
        if len(self._unacked) == 1:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Answer publications in order, as far as they are safe; the next group calls back."""
        while self._unacked:
            number, group, admitted = self._unacked[0]
            if group is not None and not group.acknowledgeable:
                group.then(self._acknowledge)
                return
            self._unacked.popleft()
            if admitted.shed:
                self._send(orjson.dumps({"ack": number, "shed": True}))
                continue
            token = self._streams.requests.signer.sign(admitted.envelope).decode()
            if admitted.refusal is None:
                self._send(orjson.dumps({"ack": number, "token": token}))
            else:
                refusal = admitted.refusal
                self._refuse(number, RequestRefused(refusal.reason, refusal.status, code=refusal.code, token=token))

    def _subscribe(self, content: dict[str, Any]) -> None:
        product, number = content["subscribe"], content.get("id")
        try:
            tenant, part, keys = self._keys(product, content.get("keys"))
        except RequestRefused as error:
            self._refuse(number, error)
            return
        interests = self._streams.interests
        new = interests.want(self, part, keys)
        self._streams.followed.subtract(self._follows)
        others = {whose for whose in self._follows if whose[1] != product}
        self._follows = others | {(tenant, product)} if keys else others
        self._streams.followed.update(self._follows)
        self._send(orjson.dumps({"subscribed": product, "keys": len(keys), "id": number}))
        self.tell(part, [key for key in new if interests.state(part, key) is not None])
        if any(interests.state(part, key) is None for key in new):
            self._streams.follower.follow(part)

    def _ask(self, content: dict[str, Any]) -> None:
        name, demand = content["demand"], self._streams.demand
        try:
            asked = demand.ask(name, self._key, content.get("about", {}), self._tell_demand)
        except RequestRefused as error:
            self._refuse(content.get("id"), error)
            return
        if (before := self._asked.get(name)) is not None:
            demand.forget(before)
        self._asked[name] = asked

    def _tell_demand(self, asked: Asked) -> None:
        """Say whether somebody is interested; if the socket is full, it is said when it drains."""
        if asked.wanted is not None and not self._paused:
            self._send(orjson.dumps({"demand": asked.source, "wanted": asked.wanted}))

    def _keys(self, product: str, given: Any) -> tuple[str, TenantRows, list[Key]]:
        """Whose subscription it is, and to what."""
        declared = self._streams.pipeline.products.get(product)
        if declared is None or not declared.channel:
            raise RequestRefused(f"there is no product {product!r} to subscribe to", 404)
        sender = self._streams.requests.gate.show(declared, self._streams.pipeline, self._key)
        part = self._streams.tables.rows.seen_by(sender.tenant, product)
        if not isinstance(given, list):
            raise RequestRefused("keys is a list of keys, each a list of values", 400)
        parts = [key if isinstance(key, list) else [key] for key in given]
        if not all(parts) or not all(isinstance(value, str | int) for key in parts for value in key):
            raise RequestRefused("a key is a list of texts or whole numbers", 400)
        if len({len(key) for key in parts}) > 1:
            raise RequestRefused("the keys of a subscription name equally many columns", 400)
        width = self._streams.follower.width(part)
        if width is not None and any(len(key) > width for key in parts):
            raise RequestRefused(f"a key of {product!r} has {width} values at most", 400)
        others = self._streams.interests.count(self)
        if len(parts) > MAX_KEYS or others > 4 * MAX_KEYS:
            raise RequestRefused(f"a connection may want {MAX_KEYS} keys of a product at most", 413)
        keys = list({tuple(str(value) for value in key): None for key in parts})
        return sender.tenant or self._streams.home, part, keys

    def _refuse(self, number: Any, error: RequestRefused) -> None:
        body = {
            "refused": number,
            "status": error.status,
            "code": refusal_code(error),
            "detail": error.reason,
            **error.members,
        }
        self._send(orjson.dumps(body))


class Streams:
    """All publish/subscribe connections of a node, and what they share.

    Args:
        requests: keys, limits, tokens, and the sources that take publications: those that take events by HTTP.
        pipeline: its products with a channel can be subscribed to; another one may be set at any time.
        until_ready: waits until the node takes this many bytes of events.

    Attributes:
        followed: number of connections that subscribe, by tenant and product.
    """

    def __init__(
        self,
        requests: RequestIntake,
        pipeline: Pipeline,
        tables: ProductTables,
        most: int,
        until_ready: Callable[[int], Awaitable[None]],
    ) -> None:
        self.requests = requests
        self.pipeline = pipeline
        self.tables = tables
        self.most = most
        self.until_ready = until_ready
        self.home = tables.rows.home
        self.followed: Counter[tuple[str, str]] = Counter()
        self.demand = Demand(tables.lake, requests, self.home, self._wants)
        self.interests: Interests[StreamProtocol] = Interests()
        self.follower = ProductFollower(self.interests, tables, StreamProtocol.tell)
        self.connections: set[StreamProtocol] = set()

    def protocol(
        self, config: object, server_state: ServerState, app_state: dict[str, Any], _loop: object = None
    ) -> StreamProtocol:
        """The protocol of an upgrade request, as uvicorn calls it."""
        return StreamProtocol(self, server_state.connections)

    def _wants(self) -> frozenset[Want]:
        followed = [whose for whose, connections in self.followed.items() if connections]
        return frozenset(Want(tenant, name) for tenant, table in followed for name in sources_of(table, self.pipeline))

    async def watch_keys(self) -> None:
        """Close every connection whose key has ended, within a second or two."""
        await self._regularly(_KEYS_S, StreamProtocol.check_key, "the key of a connection cannot be checked")

    async def keep_alive(self) -> None:
        """Ping every connection regularly, and cut those that leave two pings unanswered."""
        await self._regularly(_PING_S, StreamProtocol.ping, "a connection cannot be pinged")

    async def _regularly(self, pause_s: float, act: Callable[[StreamProtocol], None], problem: str) -> None:
        while True:
            await asyncio.sleep(pause_s)
            for connection in list(self.connections):
                try:
                    act(connection)
                except Exception:  # the other connections still get theirs
                    logger.exception(problem)
