"""One webhook at work: a subscriber of the hub whose link is a queue of a few messages, each POSTed in turn.

1. Join the table from the stored position, with a window, so that no more than :data:`WINDOW` changes are ever held.
2. POST a message; when it was taken, store the position with the outcome; then the next one.
3. When one was not taken, leave the table: what is behind it stays in the table's log. Try again with back-off; after
the last attempt it is a dead letter. Then go on at 1 from behind it. What has no position (``expired``, a part of a
snapshot that is not the last) cannot be gone on behind: the webhook stays, and the next part waits in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import sqlite3
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from lakehouse.contract.settings import ServeSettings
from serve.errors import PositionError, RequestError, ServeError
from serve.hub import Hub
from serve.position import Position
from serve.principal import Access, Principal
from serve.subscriber import SubscribeRequest
from serve.tables import Tables
from serve.webhooks.call import Caller
from serve.webhooks.link import HookLink, Record
from serve.webhooks.model import DEAD, DELIVERED, FAILING, Delivery, Webhook
from serve.webhooks.store import Store

log = logging.getLogger(__name__)

WINDOW = 16
_LONGEST_S = 300.0
_MOVED_S = 1.0  # how often a position is stored that nothing had to be delivered for
_PAUSE_S = 5.0  # before a table, a key or a place is asked for again


class Gone(ServeError):
    """The receiver wants no more."""


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
        self._trouble = ""
        self._sent = ""  # the position of what was delivered last, or is a dead letter: the next ``after``
        self._moved_at = 0.0

    async def run(self) -> None:
        """Until it is cancelled, or the receiver wants no more."""
        while True:
            try:
                await self._subscribed()
                self._trouble = ""
                continue
            except Gone:
                await self._say("stopped", "the receiver answered 410 Gone")
                return
            except RequestError as error:
                trouble = str(error)
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"[:300]
                if trouble != self._trouble:
                    log.exception("webhook %s failed", self.hook.id)
            self._trouble = trouble
            try:
                await self._say("failing", trouble)
            except sqlite3.Error as error:
                log.warning("webhook %s: how it fares cannot be kept: %s", self.hook.id, error)
            await asyncio.sleep(_PAUSE_S * (0.5 + random.random()))

    async def _subscribed(self) -> None:
        """From joining the table until it has to be joined again.

        Raises:
            RequestError: the table cannot be joined now.
            Gone: the receiver wants no more.
        """
        principal = await self._principal()
        position, self._sent = await asyncio.to_thread(self._store.reached, self.hook.id)
        link = HookLink(self._hub, principal)
        request = SubscribeRequest(
            self.hook.table,
            self._position(position),
            self.hook.where,
            self.hook.columns,
            self.hook.select,
            conflate=self.hook.conflate,
            window=WINDOW,
        )
        self._access.enter(principal, link)
        joining = asyncio.create_task(self._tables.join(link.subscriber, request))
        joining.add_done_callback(lambda _: link.pump())
        try:
            async for record in self._records(link, joining):
                if record.lagged and self._sent:  # it can go on from there
                    return
                if record.empty:
                    await self._passed(record)
                else:
                    one = await self._attempt(self._of(record))
                    if not record.position:
                        one = await self._settled(one, principal)
                    if one.state == FAILING:
                        break
                self._acknowledged(link, record)
        finally:
            joining.cancel()
            self._hub.unsubscribed(link.subscriber)
            self._access.leave(principal, link)
        await self._settled(one, principal)

    async def _principal(self) -> Principal:
        principal = await asyncio.to_thread(self._access.principal_of, self.hook.key)
        if principal is None:
            raise RequestError(RequestError.UNAUTHORISED, "unauthorised", "the key that made it is gone")
        return principal

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

    async def _settled(self, one: Delivery, principal: Principal) -> Delivery:
        """Try until it was taken or is dead, as long as who asked for it may have it."""
        while one.state == FAILING:
            most = min(_LONGEST_S, self._settings.webhook_backoff_ms / 1000 * 2 ** (one.attempts - 1))
            await asyncio.sleep(most * random.random())
            if await self._principal() != principal:
                raise RequestError(RequestError.UNAUTHORISED, "unauthorised", "the key may see something else now")
            one = await self._attempt(one)
        return one

    async def _attempt(self, one: Delivery) -> Delivery:
        hook = self.hook
        outcome = await self._caller.post(hook.url, hook.secret, one.id, one.kind, one.body)
        attempts = one.attempts + 1
        one = replace(one, attempts=attempts, status=outcome.status, error=outcome.error, at=int(time.time() * 1000))
        if not outcome.error:
            one = replace(one, state=DELIVERED, body=b"")
            self._counts["delivered"] += 1
        else:
            self._counts["failed"] += 1
            log.info("webhook %s: attempt %d failed: %s", hook.id, attempts, outcome.error)
            if attempts >= self._settings.webhook_attempts:
                one = replace(one, state=DEAD)
                self._counts["dead"] += 1
        settled = one.state != FAILING and one.position
        await asyncio.to_thread(self._store.tell, one, one.position if settled else None)
        if settled:
            self._sent = one.position
        await self._say("failing" if outcome.error else "active", outcome.error)
        if outcome.gone:
            raise Gone
        return one

    async def _say(self, state: str, detail: str) -> None:
        if self._told != state + detail:
            await asyncio.to_thread(self._store.say, self.hook.id, state, detail)
            self._told = state + detail

    def _of(self, record: Record) -> Delivery:
        body = record.body
        if record.after and self._sent and record.after != self._sent:  # changes without rows lie between
            body = body.replace(f'"after":"{record.after}"'.encode(), f'"after":"{self._sent}"'.encode(), 1)
        ident = delivery_id(self.hook, record, self._sent)
        return Delivery(ident, self.hook.id, record.kind, record.position, body)


def delivery_id(hook: Webhook, record: Record, sent: str) -> str:
    """The same for the same message, before and after a crash.

    Args:
        hook: that it goes to.
        record: the message, as the hub made it.
        sent: where the webhook was before: what tells a message without a position from an earlier one.
    """
    parts = (hook.id.encode(), record.kind.encode(), (record.position or sent).encode(), record.body)
    return "msg_" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
