"""The WebSocket of publish/subscribe collection, ``/v1/stream``: JSON objects in text frames, both ways.

=============================================================  =====================================================
client → node                                                  node → client
=============================================================  =====================================================
``{"publish": SOURCE, "event": {…}, "id": ID}``                ``{"ack": ID, "token": …}`` once the event is safe, or
                                                               ``{"refused": ID, "status": …, "detail": …}``
``{"subscribe": PRODUCT, "keys": [[…], …], "id": ID}``         ``{"subscribed": PRODUCT, "keys": N, "id": ID}``, then
                                                               ``{"product", "key", "version", "rows"}`` a key, now
                                                               and whenever its rows change
``{"subscribe": PRODUCT, "keys": []}``                         interest ends
=============================================================  =====================================================

``subscribe`` replaces the keys of that product: a car on another road sends its new list. ``publish`` without ``id`` is
not acknowledged; an ``ID`` is a text or a number. While the log is full nothing is read, nor of one that does not read
itself; that one is told the newest of each key when it does. The connection itself is :mod:`ingest.pubsub.connection`.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from websockets.http11 import Request

from ingest.border import Admitted
from ingest.collectors.door import CODES, NotReady, presented_key
from ingest.cut import member
from ingest.errors import EventRefused, LogFull, LogUnavailable
from ingest.events import Group
from ingest.pubsub.connection import Connection
from ingest.pubsub.interests import Key

if TYPE_CHECKING:
    from ingest.pubsub.streams import Streams

logger = logging.getLogger(__name__)

PATH = "/v1/stream"
MAX_MESSAGE_BYTES = 1_100_000
MAX_KEYS = 1_000  # of one connection
_BUFFER_BYTES = 262_144  # unsent bytes of a connection from which on it is told only the newest, later


class StreamProtocol(Connection):
    """One connection.

    Args:
        streams: what it shares with the others.
        server: uvicorn's set of connections, which it stops.
    """

    def __init__(self, streams: Streams, server: set[Any]) -> None:
        super().__init__(server, MAX_MESSAGE_BYTES, _BUFFER_BYTES)
        self._streams = streams
        self._stale: dict[tuple[str, Key], None] = {}  # to be told when the socket drains
        self._held: deque[bytes] = deque()  # messages that came while the log was full
        self._unacked: deque[tuple[Any, Group | None, Admitted]] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._key: str | None = None
        self._limited: frozenset[tuple[str, str]] = frozenset()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it; what was taken stays taken."""
        super().connection_lost(exc)
        self._streams.connections.discard(self)
        self._streams.interests.gone(self)
        self._streams.door.gate.release(self._limited)
        self._limited = frozenset()
        self._unacked.clear()
        for task in self._tasks.values():
            task.cancel()

    def resume_writing(self) -> None:
        """It reads again: the newest of each key is told."""
        super().resume_writing()
        stale, self._stale = self._stale, {}
        for product, key in stale:
            self.tell(product, (key,))

    # what the node says

    def tell(self, product: str, keys: Sequence[Key]) -> None:
        """Send the states of keys, or note them where the socket takes no more."""
        if not self._open:
            return
        for key in keys:
            state = self._streams.interests.state(product, key)
            if self._paused:
                self._stale[product, key] = None
            elif state is not None:
                head = orjson.dumps({"product": product, "key": key, "version": state.version})
                self._send(head[:-1] + b',"rows":' + state.rows + b"}")

    # the connection

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

    def _opened(self) -> None:
        self._streams.connections.add(self)

    def _known(self, request: Request) -> bool:
        """Whether the key is one, where keys are asked for; each source then has its say."""
        shown = (presented_key(name.lower().encode(), value.encode()) for name, value in request.headers.raw_items())
        self._key = next((key for key in shown if key), None)
        gate = self._streams.door.gate
        try:
            return not gate.keys_required or gate.key(self._key) is not None
        except EventRefused:
            return False

    # messages

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
            self._tasks["held"] = self._loop.create_task(self._take_held())

    async def _take_held(self) -> None:
        """Take what waits for the node, or for its log, in order; then read on."""
        while self._held:
            try:
                self._handle(self._held[0])
                self._held.popleft()
            except NotReady as error:
                await (error.intake.until_ready() if error.intake is not None else self._streams.until_ready(0))
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
            detail = "a message is an object with publish or subscribe"
        fields = content if isinstance(content, dict) else {}
        number = fields.get("id")
        if not isinstance(number, str | int | float | None):  # it is sent back: what it may be is bounded
            self._refuse(None, EventRefused("an id is a text or a number", 400))
        elif isinstance(fields.get("publish"), str):
            self._publish(fields, message)
        elif isinstance(fields.get("subscribe"), str):
            self._subscribe(fields)
        else:
            self._refuse(number, EventRefused(detail, 400))

    def _publish(self, content: dict[str, Any], message: bytes) -> None:
        name, number = content["publish"], content.get("id")
        door = self._streams.door
        intake = door.intakes.get(name)
        try:
            if intake is None:
                raise EventRefused(f"there is no source {name!r} that takes events here", 404, code="unknown-source")
            caller = door.gate.admit(intake.border.source, self._key)
            self._limited = door.gate.hold(intake.border.source, caller, self._limited)
            door.check_ready(intake)
            door.gate.spend(intake.border.source, caller, 1)
        except EventRefused as refused:
            door.count(name if intake is not None else "", refused)
            self._refuse(number, refused)
            return
        event = member(message, "event")
        admitted = intake.border.admit(event, tenant=caller.tenant, max_bytes=caller.max_event_bytes)
        group = None
        if admitted.refusal is None or door.gate.keep_reject(name):
            group = intake.take(admitted).group
        if number is None or name in door.one_way:
            return
        self._unacked.append((number, group, admitted))
        if len(self._unacked) == 1:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Answer each publication that is safe, in order; the first that is not comes back here when it is."""
        while self._unacked:
            number, group, admitted = self._unacked[0]
            if group is not None and not group.acknowledgeable:
                group.then(self._acknowledge)
                return
            self._unacked.popleft()
            if admitted.shed:
                self._send(orjson.dumps({"ack": number, "shed": True}))
                continue
            token = self._streams.door.signer.sign(admitted.envelope).decode()
            if admitted.refusal is None:
                self._send(orjson.dumps({"ack": number, "token": token}))
            else:
                refusal = admitted.refusal
                self._refuse(number, EventRefused(refusal.reason, refusal.status, code=refusal.code, token=token))

    def _subscribe(self, content: dict[str, Any]) -> None:
        product, number = content["subscribe"], content.get("id")
        try:
            keys = self._keys(product, content.get("keys"))
        except EventRefused as error:
            self._refuse(number, error)
            return
        interests = self._streams.interests
        new = interests.want(self, product, keys)
        self._send(orjson.dumps({"subscribed": product, "keys": len(keys), "id": number}))
        self.tell(product, [key for key in new if interests.state(product, key) is not None])
        if any(interests.state(product, key) is None for key in new):
            self._streams.feed.look(product)

    def _keys(self, product: str, given: Any) -> list[Key]:
        declared = self._streams.pipeline.products.get(product)
        if declared is None or not declared.channel:
            raise EventRefused(f"there is no product {product!r} to subscribe to", 404)
        self._streams.door.gate.show(declared, self._streams.pipeline, self._key)
        if not isinstance(given, list):
            raise EventRefused("keys is a list of keys, each a list of values", 400)
        parts = [key if isinstance(key, list) else [key] for key in given]
        if not all(parts) or not all(isinstance(value, str | int) for key in parts for value in key):
            raise EventRefused("a key is a list of texts or whole numbers", 400)
        if len({len(key) for key in parts}) > 1:
            raise EventRefused("the keys of a subscription name equally many columns", 400)
        width = self._streams.feed.width(product)
        if width is not None and any(len(key) > width for key in parts):
            raise EventRefused(f"a key of {product!r} has {width} values at most", 400)
        others = self._streams.interests.count(self)
        if len(parts) > MAX_KEYS or others > 4 * MAX_KEYS:
            raise EventRefused(f"a connection may want {MAX_KEYS} keys of a product at most", 413)
        return list({tuple(str(value) for value in key): None for key in parts})

    def _refuse(self, number: Any, error: EventRefused) -> None:
        code = error.code or CODES.get(error.status, "error")
        body = {"refused": number, "status": error.status, "code": code, "detail": error.reason, **error.members}
        self._send(orjson.dumps(body))
