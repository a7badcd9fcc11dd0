"""Publishing events to a collector without losing one: sender-based logging in the client.

An event is

1. given its id and written to the client's log, a SQLite file; :meth:`Publisher.publish` returns;
2. posted, in a batch, to the collector, whose answer is a token;
3. followed by that token as far as the application wants (:attr:`PublisherOptions.until`);
4. removed from the log.

A crash after 1 or 2 sends it again at the next start, with the same id; after 3, it asks for the token again. The
source has to name that id (``event_id`` in ``pipeline.toml``): then a repeated event counts once.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from serve.client.stores import ClientDatabase
from serve.client.subscription import InThread
from serve.client.transports import ClientError, ConnectionLost, Forbidden, Refused, Unauthorized, http_base, pause_s

log = logging.getLogger(__name__)

STATES = ("logged", "queued", "in_bronze", "in_product")
"""How far an event is, in order. It may also be ``rejected``, or ``shed`` by its source's declaration."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS outbox (
    number INTEGER PRIMARY KEY AUTOINCREMENT, source TEXT NOT NULL, id TEXT NOT NULL, payload BLOB NOT NULL,
    token TEXT, sent_at REAL, state TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '', UNIQUE (source, id)
)
"""
_BATCH_EVENTS = 1_000
_BATCH_BYTES = 4 * 1024 * 1024  # the collector takes 8 MiB, and one event more may be in the batch
_FOLLOWED = 100  # tokens asked for in one round
_AT_ONCE = 8  # of them at the same time
_FOLLOW_S = 0.5  # between two rounds
_TIMEOUT_S = 30.0
_UNKNOWN_S = 60.0  # after which an event that the collector does not know is sent again
_FINAL: Mapping[int, type[Refused]] = {
    401: Unauthorized,
    403: Forbidden,
    **dict.fromkeys((400, 404, 405, 415), Refused),
}


@dataclass(frozen=True, slots=True)
class EventState:
    """How far an event is: one of :data:`STATES`, ``rejected`` or ``shed``; ``products``: versions that hold it."""

    event_id: str
    state: str
    products: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """How to publish.

    Attributes:
        until: the state that an event must reach before it leaves the log, one of :data:`STATES`. The collector's
            answer already says ``logged``; the others are asked for by token, with a request for each event.
        on_state: called with each state that an event is found in.
        limit: most events in the log; :meth:`Publisher.publish` waits while it is full.
        longest_s: longest pause between two attempts.
    """

    until: str = "logged"
    on_state: Callable[[EventState], None] = lambda _: None
    limit: int = 100_000
    longest_s: float = 10.0


class Publisher:
    """Publishes events to one source. Enter it with ``async with``: it goes on with what an earlier run left.

    Leaving does not wait for the collector; :meth:`settled` does. One process at a time should use a log.

    Args:
        url: the collector, e.g. ``http://127.0.0.1:8401``.
        path: the log's file; created if absent.
        event_id: field of the payload that is its id, as the source declares it.
    """

    def __init__(
        self,
        url: str,
        source: str,
        path: Path | str,
        event_id: str,
        *,
        key: str = "",
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        if options.until not in STATES:
            raise ClientError(f"{options.until!r} is no state: {', '.join(STATES)}")
        self.source = source
        self._base = http_base(url)
        self._field = event_id
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._options = options
        self._database = ClientDatabase(path, _SCHEMA)
        self._news = asyncio.Event()  # something to send
        self._less = asyncio.Condition()  # something has left the log, or all is over
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Publisher:
        await self.waiting()  # the log can be used
        self._news.set()
        work = [self._forever(self._send, self._news)]
        if self._options.until != "logged":
            work.append(self._forever(self._follow, None))
        self._tasks = [asyncio.create_task(each, name=f"publisher {self.source}") for each in work]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._database.close()

    async def publish(self, *events: Mapping[str, Any]) -> list[str]:
        """Write events to the log, all or none; their ids. An event without an id gets one.

        An event whose id is in the log already is not written again. Raises Refused if the collector has given a final
        answer.
        """
        ids, rows = [], []
        for event in events:
            found = event.get(self._field)
            whole = event if found is not None else {**event, self._field: str(uuid.uuid4())}
            ids.append(str(whole[self._field]))
            rows.append((self.source, ids[-1], orjson.dumps(whole)))

        def write(database: sqlite3.Connection) -> bool:
            [(held,)] = database.execute("SELECT count(*) FROM outbox WHERE source = ?", [self.source])
            if held and held + len(rows) > self._options.limit:
                return False
            database.executemany("INSERT OR IGNORE INTO outbox (source, id, payload) VALUES (?, ?, ?)", rows)
            return True

        async with self._less:
            while True:
                if self._failure is not None:
                    raise self._failure
                if await self._database.run(write):
                    break
                if not await self.waiting():
                    raise ClientError(f"{self._database.path} is full of rejected events: forget() them")
                await self._less.wait()
        self._news.set()
        return ids

    async def waiting(self) -> int:
        """Events in the log that have neither reached ``until`` nor been rejected."""
        asked = "SELECT count(*) FROM outbox WHERE source = ? AND state <> 'rejected'"
        [(count,)] = await self._rows(asked)
        return int(count)

    async def settled(self) -> None:
        """Return when every event has reached ``until`` or is rejected. Raises Refused as :meth:`publish` does."""
        async with self._less:
            while await self.waiting():
                if self._failure is not None:
                    raise self._failure
                await self._less.wait()

    async def rejected(self) -> list[tuple[EventState, bytes]]:
        """Rejected events and their payloads. They stay in the log until they are forgotten."""
        asked = "SELECT id, reason, payload FROM outbox WHERE source = ? AND state = 'rejected' ORDER BY number"
        rows = await self._rows(asked)
        return [(EventState(event_id, "rejected", reason=reason), payload) for event_id, reason, payload in rows]

    async def forget(self, ids: Iterable[str]) -> None:
        """Remove rejected events from the log."""
        named = [(self.source, event_id) for event_id in ids]
        gone = "DELETE FROM outbox WHERE source = ? AND id = ? AND state = 'rejected'"
        await self._database.run(lambda database: database.executemany(gone, named))
        await self._told()

    # Steps 2 to 4

    async def _rows(self, asked: str, *more: int) -> list[tuple[Any, ...]]:
        return await self._database.run(lambda database: database.execute(asked, [self.source, *more]).fetchall())

    async def _told(self) -> None:
        async with self._less:
            self._less.notify_all()

    async def _forever(self, once: Callable[[httpx.AsyncClient], Any], news: asyncio.Event | None) -> None:
        """Do something again and again. After a failure of the network it is tried again; a final answer ends it."""
        attempt = 0
        try:
            async with httpx.AsyncClient(base_url=self._base, headers=self._headers, timeout=_TIMEOUT_S) as http:
                while True:
                    if news is not None:
                        await news.wait()
                        news.clear()
                    try:
                        await once(http)
                        attempt = 0
                        await asyncio.sleep(0 if news is not None else _FOLLOW_S)
                    except (httpx.HTTPError, ConnectionLost) as error:
                        log.info("%s: %r; trying again", self.source, error)
                        await asyncio.sleep(pause_s(attempt, self._options.longest_s))
                        attempt += 1
                        if news is not None:
                            news.set()
        except Exception as error:  # noqa: BLE001 - whatever it is, publish() and settled() must raise it
            self._failure = error
            await self._told()

    async def _send(self, http: httpx.AsyncClient) -> None:
        """Post everything that is not sent, in order."""
        while batch := await self._batch():
            body = b"[" + b",".join(payload for _, _, payload in batch) + b"]"
            sent_at = time.time()
            answer = await http.post(
                f"/v1/{quote(self.source, safe='')}", content=body, headers={"Content-Type": "application/json"}
            )
            await self._answered(batch, _accepted(answer), sent_at)

    async def _batch(self) -> list[tuple[int, str, bytes]]:
        asked = (
            "SELECT number, id, payload FROM outbox WHERE source = ? AND sent_at IS NULL AND state = '' "
            "ORDER BY number LIMIT ?"
        )
        rows = await self._rows(asked, _BATCH_EVENTS)
        batch, size = [], 0
        for row in rows:
            batch.append(row)
            size += len(row[2])
            if size > _BATCH_BYTES:
                break
        return batch

    async def _answered(
        self, batch: Sequence[tuple[int, str, bytes]], answer: Mapping[str, Any], sent_at: float
    ) -> None:
        reasons = {item["index"]: item["detail"] for item in answer.get("rejected", ())}
        shed = frozenset(answer.get("shed", ()))
        tokens = answer.get("tokens") or [None] * len(batch)
        states, kept, done = [], [], []
        for index, (number, event_id, _) in enumerate(batch):
            if index in reasons:
                states.append(EventState(event_id, "rejected", reason=reasons[index]))
                kept.append((None, sent_at, "rejected", reasons[index], number))
                continue
            states.append(EventState(event_id, "shed" if index in shed else "logged"))
            if self._options.until == "logged" or tokens[index] is None:
                done.append((number,))
            else:
                kept.append((tokens[index], sent_at, "logged", "", number))
        await self._write(kept, done)
        for state in states:
            self._options.on_state(state)

    async def _follow(self, http: httpx.AsyncClient) -> None:
        """Ask for the oldest tokens."""
        asked = (
            "SELECT number, id, token, sent_at, state FROM outbox WHERE source = ? AND token IS NOT NULL "
            "ORDER BY number LIMIT ?"
        )
        rows = await self._rows(asked, _FOLLOWED)
        slots = asyncio.Semaphore(_AT_ONCE)

        async def ask(token: str) -> Mapping[str, Any]:
            async with slots:
                return _accepted(await http.get(f"/v1/acks/{quote(token, safe='')}"))

        answers = await asyncio.gather(*(ask(row[2]) for row in rows), return_exceptions=True)
        kept: list[tuple[Any, ...]] = []
        done: list[tuple[int]] = []
        for (number, event_id, token, sent_at, before), answer in zip(rows, answers, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            state = str(answer["state"])
            found = EventState(event_id, state, answer.get("products") or {}, answer.get("reason") or "")
            if state == "unknown":
                if time.time() - sent_at > _UNKNOWN_S:
                    log.warning("%s: the collector does not know event %s: it is sent again", self.source, event_id)
                    kept.append((None, None, "", "", number))
                    self._news.set()
                continue
            if state == "rejected":
                kept.append((None, sent_at, state, found.reason, number))
            elif STATES.index(state) >= STATES.index(self._options.until):
                done.append((number,))
            elif state != before:
                kept.append((token, sent_at, state, "", number))
            if state != before:
                self._options.on_state(found)
        await self._write(kept, done)

    async def _write(self, kept: Sequence[tuple[Any, ...]], done: Sequence[tuple[int]]) -> None:
        def write(database: sqlite3.Connection) -> None:
            changed = "UPDATE outbox SET token = ?, sent_at = ?, state = ?, reason = ? WHERE number = ?"
            database.executemany(changed, kept)
            database.executemany("DELETE FROM outbox WHERE number = ?", done)

        if kept or done:
            await self._database.run(write)
            await self._told()


class SyncPublisher(InThread[Publisher]):
    """Makes a publisher one to enter with ``with``: ``with SyncPublisher(Publisher(…)) as publisher``."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher, f"publisher {publisher.source}")

    def publish(self, *events: Mapping[str, Any]) -> list[str]:
        """As :meth:`Publisher.publish`."""
        return self.wait(self.state.publish(*events))

    def settled(self) -> None:
        """As :meth:`Publisher.settled`."""
        self.wait(self.state.settled())

    def rejected(self) -> list[tuple[EventState, bytes]]:
        """As :meth:`Publisher.rejected`."""
        return self.wait(self.state.rejected())

    def forget(self, ids: Iterable[str]) -> None:
        """As :meth:`Publisher.forget`."""
        self.wait(self.state.forget(ids))


def _accepted(answer: httpx.Response) -> Mapping[str, Any]:
    """The content of an answer that took the request. Raises Refused, or ConnectionLost if asking again may help."""
    try:
        content = orjson.loads(answer.content) if answer.content else {}
    except orjson.JSONDecodeError:
        content = {}
    if answer.is_success or "rejected" in content:  # of a batch that is refused as a whole, each event has its reason
        return content
    kind = _FINAL.get(answer.status_code)
    said = str(content.get("detail", f"HTTP {answer.status_code} {HTTPStatus(answer.status_code).phrase}"))
    if kind is None:
        raise ConnectionLost(said)
    raise kind(str(content.get("type", "")).rpartition(":")[2] or f"http_{answer.status_code}", said)
