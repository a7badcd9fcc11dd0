"""One webhook at work: a subscriber of the hub whose link is a queue of a few messages, each POSTed in turn.

1. Join the table from the stored position, with a window, so that no more than :data:`WINDOW` changes are ever held.
2. POST a message; when it was taken, store the position with the outcome; then the next one.
3. When one was not taken, leave the table: what is behind it stays in the table's log. Try again with back-off; after
the last attempt it is a dead letter. Then go on at 1 from behind it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import struct
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import orjson

from lakehouse.contract.settings import ServeSettings
from serve.errors import PositionError, RequestError
from serve.hub import Hub
from serve.messages import Message
from serve.position import Position
from serve.principal import Access, Principal
from serve.subscriber import Subscriber, SubscribeRequest
from serve.tables import Tables
from serve.webhooks.call import Caller, Outcome
from serve.webhooks.model import DEAD, DELIVERED, Delivery, Webhook
from serve.webhooks.store import Store

log = logging.getLogger(__name__)

WINDOW = 16
_LENGTHS = struct.Struct(">II")
_SKIPPED = frozenset({"resumed", "slow", "heartbeat"})
_LONGEST_S = 300.0
_MOVED_S = 1.0  # how often a position is stored that nothing had to be delivered for
_PAUSE_S = 5.0  # before a table, a key or a place is asked for again


class HookCodec:
    """Messages with their lengths, so that they can be told apart again. Empty changes are marked."""

    name = "webhook json"
    answers = False

    def frame(self, message: Message) -> bytes:
        """Lengths, head and body."""
        if message.kind in _SKIPPED:
            return b""
        position = message.head["position"] if message.position is not None else ""
        empty = message.kind == "change" and not message.rows and not message.deletes
        head = orjson.dumps([message.kind, position, message.head.get("after", ""), empty])
        return _LENGTHS.pack(len(head), len(message.body)) + head + message.body

    def heartbeat(self, message: Message) -> bytes:
        """None."""
        return b""


CODEC = HookCodec()


@dataclass(frozen=True, slots=True)
class Record:
    """A message out of the link.

    Attributes:
        kind, body: of the message.
        position, after: tokens; empty: it has none.
        empty: a change without rows.
    """

    kind: str
    position: str
    after: str
    empty: bool
    body: bytes


class HookLink:
    """The hub's side of a webhook; see :class:`serve.push.link.Link`. It takes in no more before it is empty.

    Args:
        hub: where it fetches.
        principal: whose it is.
    """

    def __init__(self, hub: Hub, principal: Principal) -> None:
        self.principal = principal
        self.subscriber = Subscriber(self, CODEC, "webhook", principal)
        self.closed: RequestError | None = None
        self.some = asyncio.Event()
        self._hub = hub
        self._records: deque[Record] = deque()
        self._empty = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Never of a change: a subscriber with a window fetches."""
        self._take(data)
        self.some.set()

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            head, body = _LENGTHS.unpack_from(data, at)
            at += _LENGTHS.size
            kind, position, after, empty = orjson.loads(data[at : at + head])
            self._records.append(Record(kind, position, after, empty, data[at + head : at + head + body]))
            at += head + body

    def pump(self) -> None:
        """There is something to fetch."""
        self.some.set()

    def close(self, code: int, reason: str) -> None:
        """Nothing more comes."""
        self.closed = RequestError(code, "closed", reason)
        self.some.set()

    def buffered(self) -> int:
        """What was fetched and is not delivered is no socket's."""
        return 0

    async def drained(self) -> None:
        """Returns when everything fetched has been delivered."""
        while self._records and self.closed is None:
            self._empty.clear()
            await self._empty.wait()

    def next(self) -> Record | None:
        """The next message; None: wait for :attr:`some`."""
        if not self._records and self.closed is None:
            self._take(self._hub.data_to_send(self.subscriber))
        record = self._records.popleft() if self._records else None
        if not self._records:
            self._empty.set()
        return record


class Runner:
    """See the module.

    Args:
        hook: what is called.
        hub, tables, access: of this process.
        store: positions and outcomes.
        caller: makes the requests.
        settings: attempts and pauses.
        counts: deliveries by outcome, of all webhooks.
    """

    def __init__(
        self,
        hook: Webhook,
        hub: Hub,
        tables: Tables,
        access: Access,
        store: Store,
        caller: Caller,
        settings: ServeSettings,
        counts: dict[str, int],
    ) -> None:
        self.hook = hook
        self._hub = hub
        self._tables = tables
        self._access = access
        self._store = store
        self._caller = caller
        self._settings = settings
        self._counts = counts
        self._told = ""
        self._last = ""  # the position that the receiver has
        self._moved_at = 0.0

    async def run(self) -> None:
        """Until it is cancelled, or the receiver wants no more."""
        while True:
            try:
                if await self._subscribed():
                    return
            except RequestError as error:
                await self._say("failing", str(error))
                await asyncio.sleep(_PAUSE_S * (0.5 + random.random()))

    async def _subscribed(self) -> bool:
        """From joining the table to the first message that was not taken at once; True: that is the end.

        Raises:
            RequestError: the table cannot be joined now.
        """
        principal = await asyncio.to_thread(self._access.principal_of, self.hook.key)
        if principal is None:
            raise RequestError(RequestError.UNAUTHORISED, "unauthorised", "the key that made it is gone")
        stored, _, _ = await asyncio.to_thread(self._store.progress, self.hook.id)
        self._last = stored
        link = HookLink(self._hub, principal)
        request = SubscribeRequest(
            self.hook.table,
            self._position(stored),
            self.hook.where,
            self.hook.columns,
            conflate=self.hook.conflate,
            window=WINDOW,
        )
        self._access.enter(principal, link)
        joining = asyncio.create_task(self._tables.join(link.subscriber, request))
        joining.add_done_callback(lambda _: link.pump())
        try:
            async for record in self._records(link, joining):
                if record.empty:
                    await self._passed(record)
                elif not await self._first(record):
                    break
                self._acknowledged(link, record)
            else:
                return False
        finally:
            joining.cancel()
            self._hub.unsubscribed(link.subscriber)
            self._access.leave(principal, link)
        return await self._retried()

    async def _records(self, link: HookLink, joining: asyncio.Task[None]) -> AsyncIterator[Record]:
        while True:
            link.some.clear()
            if (record := link.next()) is not None:
                yield record
                continue
            if link.closed is not None:
                raise link.closed
            if joining.done() and not joining.cancelled() and (error := joining.exception()) is not None:
                raise error
            await link.some.wait()

    def _position(self, token: str) -> Position | None:
        try:
            return self._hub.seal.parse(token) if token else None
        except PositionError:
            return None  # the lake's key is another one: from the beginning

    def _acknowledged(self, link: HookLink, record: Record) -> None:
        position = self._position(record.position)
        if position is not None:
            self._hub.acknowledged(link.subscriber, position)

    async def _passed(self, record: Record) -> None:
        """A change without rows for this webhook is not delivered; its position counts."""
        now = time.monotonic()
        if now - self._moved_at >= _MOVED_S:
            self._moved_at = now
            await asyncio.to_thread(self._store.moved, self.hook.id, record.position)

    async def _first(self, record: Record) -> bool:
        self._delivery = self._of(record)
        return not (await self._attempt()).error

    async def _retried(self) -> bool:
        """Until it was taken or is dead; True: the receiver wants no more."""
        while not self._outcome.gone and self._delivery.state not in (DELIVERED, DEAD):
            most = min(_LONGEST_S, self._settings.webhook_backoff_ms / 1000 * 2 ** (self._delivery.attempts - 1))
            await asyncio.sleep(most * random.random())
            await self._attempt()
        if self._outcome.gone:
            await self._say("stopped", "the receiver answered 410 Gone")
        return self._outcome.gone

    async def _attempt(self) -> Outcome:
        one, hook = self._delivery, self.hook
        outcome = self._outcome = await self._caller.post(hook.url, hook.secret, one.id, one.kind, one.body)
        attempts = one.attempts + 1
        done = replace(one, attempts=attempts, status=outcome.status, error=outcome.error, at=int(time.time() * 1000))
        position: str | None = None
        if not outcome.error:
            done = replace(done, state=DELIVERED)
            self._counts["delivered"] += 1
        else:
            self._counts["failed"] += 1
            log.info("webhook %s: attempt %d failed: %s", hook.id, attempts, outcome.error)
            if attempts >= self._settings.webhook_attempts:
                done = replace(done, state=DEAD)
                self._counts["dead"] += 1
        if done.state in (DELIVERED, DEAD) and done.position:
            position = self._last = done.position
        kept = done if done.state != DELIVERED else replace(done, body=b"")
        await asyncio.to_thread(self._store.tell, kept, position)
        self._delivery = done
        await self._say("failing" if outcome.error else "active", outcome.error)
        return outcome

    async def _say(self, state: str, detail: str) -> None:
        if self._told != state + detail:
            self._told = state + detail
            await asyncio.to_thread(self._store.say, self.hook.id, state, detail)

    def _of(self, record: Record) -> Delivery:
        body = record.body
        if record.after and self._last and record.after != self._last:  # changes without rows lie between
            body = body.replace(f'"after":"{record.after}"'.encode(), f'"after":"{self._last}"'.encode(), 1)
        return Delivery(delivery_id(self.hook, record, body), self.hook.id, record.kind, record.position, body)


def delivery_id(hook: Webhook, record: Record, body: bytes) -> str:
    """The same for the same message, before and after a crash."""
    digest = hashlib.sha256(b"\0".join((hook.id.encode(), record.kind.encode(), record.position.encode(), body)))
    return "msg_" + digest.hexdigest()[:32]
