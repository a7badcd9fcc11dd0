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
=============================================================  =====================================================

``subscribe`` replaces the keys of that product: a car on another road sends its new list. ``publish`` without ``id`` is
not acknowledged; an ``ID`` is a string or a number. While the log is full, or the client does not read, nothing is read
from it. A client that resumes reading is told the newest state of each key that changed.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlsplit

import orjson
from websockets.http11 import Request

from ingest.answers.connection import WebSocketConnection
from ingest.answers.tables import ProductTables
from ingest.border.admission import Admitted
from ingest.errors import LogFull, LogUnavailable, NotReady, RequestRefused, refusal_code
from ingest.intake import RequestIntake, first_key, published_event
from ingest.log.segments import CommitGroup
from lakehouse.contract.pipeline import Pipeline

if TYPE_CHECKING:
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

PATH = "/v1/stream"
MAX_MESSAGE_BYTES = 1_100_000
MAX_KEYS = 1_000  # of one connection
_BUFFER_BYTES = 262_144  # unsent bytes of a connection above which updates are postponed
_RETRY_S = 1.0
_PING_S = 20.0

Key = tuple[str, ...]
S = TypeVar("S")


class StreamProtocol(WebSocketConnection):
    """One connection.

    Args:
        streams: what all connections share.
        server: uvicorn's set of connections.
    """

    def __init__(self, streams: Streams, server: set[Any]) -> None:
        super().__init__(server, MAX_MESSAGE_BYTES, _BUFFER_BYTES)
        self._streams = streams
        self._stale: dict[tuple[str, Key], None] = {}  # sent when the socket drains
        self._held: deque[bytes] = deque()  # messages that came while the log was full
        self._unacked: deque[tuple[Any, CommitGroup | None, Admitted]] = deque()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._key: str | None = None
        self._limited: frozenset[tuple[str, str]] = frozenset()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; published events stay in the log."""
        super().connection_lost(exc)
        self._streams.connections.discard(self)
        self._streams.interests.gone(self)
        self._streams.requests.gate.release(self._limited)
        self._limited = frozenset()
        self._unacked.clear()
        for task in self._tasks.values():
            task.cancel()

    def resume_writing(self) -> None:
        """Send the newest state of each key that changed meanwhile."""
        super().resume_writing()
        stale, self._stale = self._stale, {}
        for product, key in stale:
            self.tell(product, (key,))

    def tell(self, product: str, keys: Sequence[Key]) -> None:
        """Send the states of keys, or mark them stale if the socket is full."""
        if not self._open:
            return
        for key in keys:
            state = self._streams.interests.state(product, key)
            if self._paused:
                self._stale[product, key] = None
            elif state is not None:
                head = orjson.dumps({"product": product, "key": key, "version": state.version})
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

    def _opened(self) -> None:
        self._streams.connections.add(self)

    def _known(self, request: Request) -> bool:
        """Whether the shown key is known, if keys are required. Each source checks it again."""
        self._key = first_key((name.encode(), value.encode()) for name, value in request.headers.raw_items())
        gate = self._streams.requests.gate
        try:
            return not gate.keys_required or gate.key(self._key) is not None
        except RequestRefused:
            return False

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
            detail = "a message is an object with publish or subscribe"
        fields = content if isinstance(content, dict) else {}
        number = fields.get("id")
        if not isinstance(number, str | int | float | None):  # it is sent back, so its type is restricted
            self._refuse(None, RequestRefused("an id is a text or a number", 400))
        elif isinstance(fields.get("publish"), str):
            self._publish(fields, message)
        elif isinstance(fields.get("subscribe"), str):
            self._subscribe(fields)
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
            keys = self._keys(product, content.get("keys"))
        except RequestRefused as error:
            self._refuse(number, error)
            return
        interests = self._streams.interests
        new = interests.want(self, product, keys)
        self._send(orjson.dumps({"subscribed": product, "keys": len(keys), "id": number}))
        self.tell(product, [key for key in new if interests.state(product, key) is not None])
        if any(interests.state(product, key) is None for key in new):
            self._streams.follower.follow(product)

    def _keys(self, product: str, given: Any) -> list[Key]:
        declared = self._streams.pipeline.products.get(product)
        if declared is None or not declared.channel:
            raise RequestRefused(f"there is no product {product!r} to subscribe to", 404)
        self._streams.requests.gate.show(declared, self._streams.pipeline, self._key)
        if not isinstance(given, list):
            raise RequestRefused("keys is a list of keys, each a list of values", 400)
        parts = [key if isinstance(key, list) else [key] for key in given]
        if not all(parts) or not all(isinstance(value, str | int) for key in parts for value in key):
            raise RequestRefused("a key is a list of texts or whole numbers", 400)
        if len({len(key) for key in parts}) > 1:
            raise RequestRefused("the keys of a subscription name equally many columns", 400)
        width = self._streams.follower.width(product)
        if width is not None and any(len(key) > width for key in parts):
            raise RequestRefused(f"a key of {product!r} has {width} values at most", 400)
        others = self._streams.interests.count(self)
        if len(parts) > MAX_KEYS or others > 4 * MAX_KEYS:
            raise RequestRefused(f"a connection may want {MAX_KEYS} keys of a product at most", 413)
        return list({tuple(str(value) for value in key): None for key in parts})

    def _refuse(self, number: Any, error: RequestRefused) -> None:
        body = {
            "refused": number,
            "status": error.status,
            "code": refusal_code(error),
            "detail": error.reason,
            **error.members,
        }
        self._send(orjson.dumps(body))


@dataclass(frozen=True, slots=True)
class KeyState:
    """The rows of a key as a JSON array, and the version of the product in which they last changed."""

    version: int
    rows: bytes


class Interests(Generic[S]):
    """Which subscriber wants which keys of which product, and what it was told last. No I/O.

    A key's state is its latest rows; states between two reads are skipped. So a slow subscriber costs a set of keys,
    not a queue. A subscriber is anything hashable.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, dict[Key, set[S]]] = {}
        self._by: dict[S, dict[str, frozenset[Key]]] = {}
        self._states: dict[str, dict[Key, KeyState]] = {}

    def want(self, subscriber: S, product: str, keys: Iterable[Key]) -> frozenset[Key]:
        """Replace the keys that a subscriber wants of a product. Returns the new ones among them."""
        new = frozenset(keys)
        mine = self._by.setdefault(subscriber, {})
        old = mine.get(product, frozenset())
        for key in old - new:
            self._forget(subscriber, product, key)
        wanted = self._wanted.setdefault(product, {})
        for key in new - old:
            wanted.setdefault(key, set()).add(subscriber)
        if new:
            mine[product] = new
        else:
            mine.pop(product, None)
        if not wanted:
            del self._wanted[product]
        if not mine:
            del self._by[subscriber]
        return new - old

    def gone(self, subscriber: S) -> None:
        """Forget a subscriber."""
        for product in list(self._by.get(subscriber, ())):
            self.want(subscriber, product, ())

    def wanted(self, product: str) -> frozenset[Key]:
        """The keys of a product that any subscriber wants."""
        return frozenset(self._wanted.get(product, ()))

    def count(self, subscriber: S) -> int:
        """Number of keys that a subscriber wants, over all products."""
        return sum(len(keys) for keys in self._by.get(subscriber, {}).values())

    def state(self, product: str, key: Key) -> KeyState | None:
        """The state of a wanted key, if it has been read."""
        return self._states.get(product, {}).get(key)

    def updated(self, product: str, version: int, rows: Mapping[Key, bytes]) -> dict[S, list[Key]]:
        """Take the rows of keys in a version. Returns the changed keys by subscriber."""
        wanted = self._wanted.get(product, {})
        states = self._states.setdefault(product, {})
        changed: dict[S, list[Key]] = {}
        for key, body in rows.items():
            old = states.get(key)
            if key not in wanted or (old is not None and old.rows == body):
                continue
            states[key] = KeyState(version, body)
            for subscriber in wanted[key]:
                changed.setdefault(subscriber, []).append(key)
        if not states:
            del self._states[product]
        return changed

    def _forget(self, subscriber: S, product: str, key: Key) -> None:
        wanted = self._wanted[product]
        wanted[key].discard(subscriber)
        if not wanted[key]:
            del wanted[key]
            states = self._states.get(product, {})
            states.pop(key, None)
            if product in self._states and not states:
                del self._states[product]


class ProductFollower:
    """Follows the products that subscribers want, with one task a product, and tells subscribers of changed keys.

    The node reads the tables itself instead of relaying from a server: subscribers want the latest rows of keys, which
    needs neither filters nor positions; one watch a product serves every connection; and collecting continues without a
    server. docs/collecting.md weighs the alternatives.
    """

    def __init__(self, interests: Interests[StreamProtocol], tables: ProductTables) -> None:
        self._interests = interests
        self._rows = tables.rows
        self._watch = tables.watch
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Event] = {}

    def follow(self, product: str) -> None:
        """Read the product now, because new keys of it are wanted, and follow it from here on."""
        self._asked.setdefault(product, asyncio.Event()).set()
        if product not in self._tasks:
            self._tasks[product] = asyncio.create_task(self._follow(product), name=f"follow {product}")

    def width(self, product: str) -> int | None:
        """Most values in a key of the product; None if it is not followed, or has not been read yet."""
        return self._rows.width(product) if product in self._tasks else None

    async def close(self) -> None:
        """Stop following."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, product: str) -> None:
        asked = self._asked[product]
        try:
            while keys := self._interests.wanted(product):
                asked.clear()
                version = -1
                try:
                    version, rows = await asyncio.to_thread(self._rows.by_keys, product, keys)
                except RequestRefused as error:
                    if error.status != 404:  # wait for a product that does not exist yet
                        logger.warning("%s is not followed: %s", product, error)
                        return
                except Exception:  # subscribers of other products are not affected
                    logger.exception("the rows of %s cannot be read", product)
                    await asyncio.sleep(_RETRY_S)
                    continue
                else:
                    for subscriber, changed in self._interests.updated(product, version, rows).items():
                        subscriber.tell(product, changed)
                await self._until_newer(product, version, asked)
        finally:
            del self._tasks[product]
            del self._asked[product]

    async def _until_newer(self, product: str, version: int, asked: asyncio.Event) -> None:
        newer = asyncio.create_task(self._watch.newer(product, version))
        wanted = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait((newer, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            newer.cancel()
            wanted.cancel()


class Streams:
    """All publish/subscribe connections of a node, and what they share.

    Args:
        requests: keys, limits, tokens, and the sources that take publications: those that take events by HTTP.
        pipeline: its products with a channel can be subscribed to.
        tables: products.
        most: connections at a time.
        until_ready: waits until the node takes this many bytes of events.
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
        self.most = most
        self.until_ready = until_ready
        self.interests: Interests[StreamProtocol] = Interests()
        self.follower = ProductFollower(self.interests, tables)
        self.connections: set[StreamProtocol] = set()

    def protocol(
        self, config: object, server_state: ServerState, app_state: dict[str, Any], _loop: object = None
    ) -> StreamProtocol:
        """The protocol of an upgrade request, as uvicorn calls it."""
        return StreamProtocol(self, server_state.connections)

    async def keep_alive(self) -> None:
        """Ping every connection regularly, and cut those that leave two pings unanswered."""
        while True:
            await asyncio.sleep(_PING_S)
            for connection in list(self.connections):
                try:
                    connection.ping()
                except Exception:  # the other connections still get their ping
                    logger.exception("a connection cannot be pinged")
