"""Webhooks at work. Each is run by one server process, the first to take its lock; the operating system gives the lock
back when that process ends, and another takes it within a second.

A webhook is a subscriber of the hub whose link is a queue of a few messages, each POSTed in turn:

1. Join the table from the stored position, with a window, so that no more than :data:`WINDOW` changes are ever held.
2. POST a message; when it was taken, store the position with the outcome; then the next one.
3. When one was not taken, leave the table: what is behind it stays in the table's log. Try again with back-off; after
the last attempt it is a dead letter. Then go on at 1 from behind it. What has no position (``expired``, a part of a
snapshot that is not the last) cannot be gone on behind: the webhook stays, and the next part waits in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import orjson

from lakehouse.contract.settings import ServeSettings
from lakehouse.contract.storage import try_lock
from serve.access import ReaderGate
from serve.core.hub import Hub
from serve.core.messages import Message
from serve.core.model import Principal, SubscribeRequest
from serve.core.position import Position, Seal
from serve.core.ring import Subscriber
from serve.errors import RequestError, ServeError
from serve.tables.tables import Tables
from serve.webhooks.call import WebhookCaller
from serve.webhooks.store import DEAD, DELIVERED, FAILING, Webhook, WebhookDelivery, WebhookStore

log = logging.getLogger(__name__)

# Only for open connections. The webhook's state shows the text of an `error`; it is not posted at each attempt.
_SKIPPED = frozenset({"resumed", "slow", "heartbeat", "error"})
WINDOW = 16
MAX_ATTEMPTS = 8  # a few minutes to half an hour; after that the delivery is a dead letter, which can be fetched
_TIMEOUT_S = 10.0  # of one attempt
_KEPT = 1_000  # deliveries, and as many dead letters, of each webhook
_LONGEST_S = 300.0
_MOVED_S = 1.0  # between stored positions, while nothing has to be delivered
_PAUSE_S = 5.0  # before joining again
_LOOK_S = 1.0


class HookCodec:
    """Messages as lines of JSON."""

    name = "webhook"
    answers = False

    def frame(self, message: Message) -> bytes:
        return b"" if message.kind in _SKIPPED else message.body + b"\n"

    def heartbeat(self, message: Message) -> bytes:
        return b""


CODEC = HookCodec()


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A message out of the link: its JSON text, and what that says."""

    body: bytes
    content: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["type"])

    @property
    def position(self) -> str:
        """Where it brings the receiver; empty if nowhere."""
        moves = self.kind == "change" or self.content.get("last", False)
        return str(self.content["position"]) if moves else ""

    @property
    def empty(self) -> bool:
        """Whether it is a change without rows."""
        return self.kind == "change" and not self.content["upserts"] and not self.content["deletes"]

    @property
    def lagged(self) -> bool:
        """Whether the hub has dropped what comes next; the table's log has it."""
        return self.kind == "expired" and self.content["reason"] == "lagged"


class HookLink:
    """The hub's side of a webhook; see :class:`serve.core.ring.Link`. It fetches only when it is empty."""

    def __init__(self, hub: Hub, principal: Principal) -> None:
        self.principal = principal
        self.subscriber = Subscriber(self, CODEC, "webhook", principal)
        self.closed: RequestError | None = None
        self._some = asyncio.Event()
        self._hub = hub
        self._records: deque[LinkRecord] = deque()
        self._empty = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Not called for changes: a subscriber with a window fetches."""
        self._take(data)
        self._some.set()

    def _take(self, data: bytes) -> None:
        self._records.extend(LinkRecord(line, orjson.loads(line)) for line in data.splitlines())

    def pump(self) -> None:
        self._some.set()

    def close(self, code: int, reason: str) -> None:
        self.closed = RequestError(code, "closed", reason)
        self._some.set()

    def buffered(self) -> int:
        """0: fetched messages are not in a socket."""
        return 0

    async def drained(self) -> None:
        """Return when everything fetched has been delivered."""
        while self._records and self.closed is None:
            self._empty.clear()
            await self._empty.wait()

    async def records(self, joining: asyncio.Task[None]) -> AsyncIterator[LinkRecord]:
        """The messages, until the hub closes the link or the table cannot be joined: that error is raised."""
        while True:
            self._some.clear()
            if not self._records and self.closed is None:
                self._take(self._hub.data_to_send(self.subscriber))
            record = self._records.popleft() if self._records else None
            if not self._records:
                self._empty.set()
            if record is not None:
                yield record
            elif self.closed is not None:
                raise self.closed
            elif joining.done() and not joining.cancelled() and (error := joining.exception()) is not None:
                raise error
            else:
                await self._some.wait()


class ReceiverGone(ServeError):
    """The receiver wants no more."""


class WebhookRunner:
    """One webhook at work; see the module."""

    def __init__(self, hook: Webhook, fleet: WebhookFleet, store: WebhookStore, caller: WebhookCaller) -> None:
        self.hook = hook
        self._fleet = fleet
        self._store = store
        self._caller = caller
        self._key = secret_of(fleet.hub.seal, hook.id)
        self._told = ""
        self._trouble = ""
        self._sent = ""  # position of the last message, delivered or dead: the next ``after``
        self._moved_at = 0.0

    async def run(self) -> None:
        """Run until cancelled, or until the receiver answers 410."""
        while True:
            try:
                await self._subscribed()
                self._trouble = ""
                continue
            except ReceiverGone:
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
        """From joining the table until it must be joined again.

        Raises:
            RequestError: the table cannot be joined now.
            ReceiverGone: the receiver wants no more.
        """
        principal = await self._principal()
        progress = await asyncio.to_thread(self._store.progress, self.hook.id)
        self._sent = progress.sent
        link = HookLink(self._fleet.hub, principal)
        request = SubscribeRequest(
            self.hook.table,
            self._position(progress.position),
            self.hook.where,
            self.hook.columns,
            self.hook.select,
            conflate=self.hook.conflate,
            window=WINDOW,
        )
        self._fleet.gate.enter(principal, link)
        joining = asyncio.create_task(self._fleet.tables.join(link.subscriber, request))
        joining.add_done_callback(lambda _: link.pump())
        try:
            async for record in link.records(joining):
                if record.lagged and self._sent:  # resume from there
                    return
                if record.empty:
                    await self._passed(record)
                else:
                    one = await self._attempt(self._of(record))
                    if not record.position:
                        one = await self._settled(one, principal)
                    if one.state == FAILING:
                        break
                if (position := self._position(record.position)) is not None:
                    self._fleet.hub.acknowledged(link.subscriber, position)
        finally:
            joining.cancel()
            self._fleet.hub.unsubscribed(link.subscriber)
            self._fleet.gate.leave(principal, link)
        await self._settled(one, principal)

    async def _principal(self) -> Principal:
        principal = await asyncio.to_thread(self._fleet.gate.principal_of, self.hook.key)
        if principal is None:
            raise RequestError(RequestError.UNAUTHORIZED, "unauthorized", "the key that made it is gone")
        return principal

    def _position(self, token: str) -> Position | None:
        try:
            return self._fleet.hub.seal.parse(token) if token else None
        except RequestError:
            return None  # the lake has another key: start over

    async def _passed(self, record: LinkRecord) -> None:
        """Store the position of a change without rows for this webhook; nothing is delivered."""
        now = time.monotonic()
        if now - self._moved_at >= _MOVED_S:
            self._moved_at = now
            await asyncio.to_thread(self._store.record_position, self.hook.id, record.position)

    async def _settled(self, one: WebhookDelivery, principal: Principal) -> WebhookDelivery:
        """Retry until it is taken or dead, as long as its owner keeps the rights."""
        while one.state == FAILING:
            most = min(_LONGEST_S, self._fleet.settings.webhook_backoff_ms / 1000 * 2 ** (one.attempts - 1))
            await asyncio.sleep(most * random.random())
            if await self._principal() != principal:
                raise RequestError(RequestError.UNAUTHORIZED, "unauthorized", "the key may see something else now")
            one = await self._attempt(one)
        return one

    async def _attempt(self, one: WebhookDelivery) -> WebhookDelivery:
        hook = self.hook
        extra = cloud_event(hook, one) if hook.cloudevents else None
        status, error = await self._caller.post(hook.url, self._key, one.id, one.kind, one.body, extra)
        attempts = one.attempts + 1
        one = replace(one, attempts=attempts, status=status, error=error, at=int(time.time() * 1000))
        if not error:
            one = replace(one, state=DELIVERED, body=b"")
            self._fleet.counts["delivered"] += 1
        else:
            self._fleet.counts["failed"] += 1
            log.info("webhook %s: attempt %d failed: %s", hook.id, attempts, error)
            if attempts >= MAX_ATTEMPTS:
                one = replace(one, state=DEAD)
                self._fleet.counts["dead"] += 1
        settled = one.state != FAILING and one.position
        await asyncio.to_thread(self._store.record, one, one.position if settled else None)
        if settled:
            self._sent = one.position
        await self._say("failing" if error else "active", error)
        if status == HTTPStatus.GONE:
            raise ReceiverGone
        return one

    async def _say(self, state: str, detail: str) -> None:
        if self._told != state + detail:
            await asyncio.to_thread(self._store.set_state, self.hook.id, state, detail)
            self._told = state + detail

    def _of(self, record: LinkRecord) -> WebhookDelivery:
        body = record.body
        after = record.content.get("after", "")
        if after and self._sent and after != self._sent:  # skip over changes without rows
            body = body.replace(f'"after":"{after}"'.encode(), f'"after":"{self._sent}"'.encode(), 1)
        ident = delivery_id(self.hook, record, self._sent)
        return WebhookDelivery(ident, self.hook.id, record.kind, record.position, body)


def secret_of(seal: Seal, ident: str) -> bytes:
    """The signing secret of a webhook. It follows from the lake's key and the webhook's id, and is stored nowhere."""
    return seal.derived(b"webhook " + ident.encode())


def delivery_id(hook: Webhook, record: LinkRecord, sent: str) -> str:
    """An id that is the same for the same message, before and after a crash.

    ``sent``, where the webhook was before, tells messages without a position apart.
    """
    parts = (hook.id.encode(), record.kind.encode(), (record.position or sent).encode(), record.body)
    return "msg_" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def cloud_event(hook: Webhook, one: WebhookDelivery) -> dict[str, str]:
    """Headers that make a message a CloudEvent (1.0, binary mode): the body stays the message."""
    headers = {
        "ce-specversion": "1.0",
        "ce-id": one.id,
        "ce-source": f"/v1/tables/{hook.table}",
        "ce-type": f"millrace.{one.kind}",
    }
    if committed := orjson.loads(one.body).get("committed_at"):
        headers["ce-time"] = datetime.fromtimestamp(committed / 1000, UTC).isoformat()
    return headers


class WebhookFleet:
    """The webhooks of a lake, as far as this process runs them.

    Attributes:
        counts: attempts and dead letters by outcome, of all webhooks.
    """

    def __init__(self, folder: Path, hub: Hub, tables: Tables, gate: ReaderGate, settings: ServeSettings) -> None:
        self.hub = hub
        self.tables = tables
        self.gate = gate
        self.settings = settings
        self.counts = {"delivered": 0, "failed": 0, "dead": 0}
        self._folder = folder
        self._made: WebhookStore | None = None
        self._running: dict[str, tuple[asyncio.Task[None], int]] = {}
        self._look = asyncio.Event()
        self._trust = httpx.create_ssl_context(trust_env=False)

    @property
    def running(self) -> int:
        return len(self._running)

    async def store(self) -> WebhookStore:
        """The store, created when a webhook is first added."""
        if self._made is None:
            self._made = await asyncio.to_thread(WebhookStore, self._folder, _KEPT)
        return self._made

    def changed(self) -> None:
        """Look for added and removed webhooks now."""
        self._look.set()

    async def run(self) -> None:
        """Start and stop runners until cancelled."""
        try:
            while True:
                try:
                    if self._made is not None or (self._folder / "webhooks.db").exists():
                        await self._reconcile()
                except Exception:
                    log.exception("webhooks could not be looked at")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._look.wait()
                self._look.clear()
        finally:
            for ident in list(self._running):
                await self._stop(ident)
            if self._made is not None:
                self._made.close()

    async def _reconcile(self) -> None:
        store = await self.store()
        known = await asyncio.to_thread(store.all)
        for ident in list(self._running):
            if ident not in known:
                await self._stop(ident)
                (self._folder / f"{ident}.lock").unlink(missing_ok=True)
        for ident, hook in known.items():
            if ident in self._running:
                task, _ = self._running[ident]
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    log.error("webhook %s failed", ident, exc_info=error)
                    await self._stop(ident)
                continue
            progress = await asyncio.to_thread(store.progress, ident)
            if progress.state != "stopped" and (lock := try_lock(self._folder / f"{ident}.lock")) is not None:
                self._running[ident] = asyncio.create_task(self._call(hook, store)), lock

    async def _call(self, hook: Webhook, store: WebhookStore) -> None:
        async with WebhookCaller(_TIMEOUT_S, private=self.settings.webhook_private, trust=self._trust) as caller:
            await WebhookRunner(hook, self, store, caller).run()

    async def _stop(self, ident: str) -> None:
        task, lock = self._running.pop(ident)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.close(lock)
