"""Exactly once to a third party that is not idempotent.

:class:`ExactlyOnce` takes a subscription's messages through eleven steps. After a crash it goes on with what its log
holds, and the server sends again what was not acknowledged upstream.

====  ====================  ===========================================================================================
step                        a crash after it
====  ====================  ===========================================================================================
1     receive the message   the server sends the message again
2     log the message       the message is taken from the log again
3     store its items as    the same; items that are done are passed over
      *received*
4     process an item       the item is processed again: :meth:`OnceHandler.process` has no effects
5     log the request       the request is taken from the log; it was certainly not sent
6     store the item as     nobody knows whether the request was sent: the third party is asked
      *sending*
7     send the request      the same: the third party is asked, and has it
8     store the item as     the request is removed from the log, and not sent
      *done*
9     remove the request    the message is taken from the log; its items are done
10    remove the message    the server sends the message again; its items are done
11    acknowledge upstream  nothing is left to do
====  ====================  ===========================================================================================

A request without an answer, because it timed out or because the third party never answers, is like a crash after
step 6. *Write and read back*: :meth:`OnceHandler.lookup` asks the third party until it has the item, or until
``settle_s`` have passed since the request began. Within this time a request takes effect or never will. Only then is it
sent again. A third party that can neither be asked nor recognises a repetition cannot be called exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import orjson

from lakehouse.contract.errors import crash_point
from lakehouse.contract.storage import try_lock
from serve.client.stores import ClientDatabase
from serve.client.subscription import Change, JsonRow, Message, Snapshot
from serve.client.transports import ClientError, pause_s

log = logging.getLogger(__name__)

_T = TypeVar("_T")
RECEIVED, SENDING, DONE, DECLINED = "received", "sending", "done", "declined"
_FINISHED = (DONE, DECLINED)
_LONGEST_S = 5.0  # between two attempts
_LOG = """
CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY, position TEXT UNIQUE, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, id TEXT UNIQUE, content BLOB NOT NULL)
"""
_SEEN = """
CREATE TABLE IF NOT EXISTS seen (id TEXT PRIMARY KEY, state TEXT NOT NULL, at REAL NOT NULL, answer BLOB NOT NULL)
"""


class Declined(ClientError):
    """Raised by a handler: the third party refuses this request for good, and has not done anything."""


@dataclass(frozen=True, slots=True)
class SeenItem:
    """What is known of an item.

    Attributes:
        state: ``received``, ``sending``, ``done`` or ``declined``.
        at: when it came into this state, seconds since the epoch.
        answer: the third party's, or why it declined; JSON.
    """

    id: str
    state: str
    at: float
    answer: Any = None


class SeenStore(Protocol):
    """Remembers items for ever: an item that is forgotten is done again when it comes again."""

    async def get(self, ids: Sequence[str]) -> Mapping[str, SeenItem]:
        """Those of the items that are known."""

    async def put(self, items: Sequence[SeenItem]) -> None:
        """Returns when they are durable; a finished item stays as it is."""


class SqliteSeen:
    """Keeps seen items in a SQLite file, about 100 bytes each. Several processes of one machine may share it."""

    def __init__(self, path: Path | str) -> None:
        self._database = ClientDatabase(path, _SEEN)

    async def get(self, ids: Sequence[str]) -> Mapping[str, SeenItem]:
        def read(database: sqlite3.Connection) -> dict[str, SeenItem]:
            asked = "SELECT id, state, at, answer FROM seen WHERE id IN (SELECT value FROM json_each(?))"
            rows = database.execute(asked, [orjson.dumps(list(ids)).decode()])
            return {row[0]: SeenItem(row[0], row[1], row[2], orjson.loads(row[3])) for row in rows}

        return await self._database.run(read)

    async def put(self, items: Sequence[SeenItem]) -> None:
        rows = [(item.id, item.state, item.at, orjson.dumps(item.answer)) for item in items]
        changed = (
            "INSERT INTO seen VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, "
            "at = excluded.at, answer = excluded.answer WHERE state NOT IN ('done', 'declined')"
        )
        await self._database.run(lambda database: database.executemany(changed, rows))

    def close(self) -> None:
        self._database.close()


class OnceHandler(Protocol):
    """What an application says of its third party."""

    def items(self, message: Message) -> Iterable[tuple[str, JsonRow]]:
        """The items that a message asks for, each with an id that is always the same for the same item."""

    def process(self, item: JsonRow) -> Mapping[str, Any]:
        """The request for an item, as JSON. It may be called again, so it has no effects."""

    async def request(self, item_id: str, request: Mapping[str, Any]) -> Any:
        """Send a request; the third party's answer, as JSON. None: it gives none, so it is asked for the item.

        Raises Declined if it refuses for good; any other exception means that the outcome is unknown.
        """

    async def lookup(self, item_id: str, request: Mapping[str, Any]) -> Any:
        """Ask the third party for an item: what it has of it, as JSON; None if it has nothing."""


class ExactlyOnce:
    """Has a third party do each item exactly once. Enter it with ``async with``: it finishes what an earlier run left.

    One process at a time works for a subscription. With a shared store another machine may take over from one that is
    lost, because an item is known there before its request is sent.

    Args:
        path: file of the log and of the local seen-message store; created if absent.
        shared: seen-message store that other machines ask too; while it is unreachable, no request is sent.
        settle_s: time within which a request takes effect or never will.

    Raises:
        ClientError: on entering, if another process uses the file.
    """

    def __init__(
        self, handler: OnceHandler, path: Path | str, *, shared: SeenStore | None = None, settle_s: float = 30.0
    ) -> None:
        self._handler = handler
        self._database = ClientDatabase(path, _LOG)
        self._seen = SqliteSeen(path)
        self._shared = shared
        self._settle_s = settle_s
        self._lock = -1

    async def __aenter__(self) -> ExactlyOnce:
        lock = Path(f"{self._database.path}.lock")
        handle = try_lock(lock)
        if handle is None:
            raise ClientError(f"{lock}: another process works with this log; one at a time")
        self._lock = handle
        for item_id, content in await self._rows("SELECT id, content FROM requests ORDER BY number"):
            await self._finish(item_id, orjson.loads(content))
        for position, content in await self._rows("SELECT position, content FROM messages ORDER BY number"):
            await self._work(position, _message(content))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._seen.close()
        os.close(self._lock)

    async def run(self, messages: AsyncIterable[Message]) -> None:
        """Process a subscription's messages for ever."""
        done = False
        async for message in messages:  # asking for the next one acknowledges the one before
            if done:
                crash_point("once.acknowledge_upstream")
            crash_point("once.receive")
            await self.process(message)
            done = True

    async def process(self, message: Message) -> None:
        """Steps 2 to 10. When this returns, the message may be acknowledged upstream."""
        kind = "snapshot" if isinstance(message, Snapshot) else "change"
        content = orjson.dumps({"kind": kind, **asdict(message)})
        await self._do("INSERT OR IGNORE INTO messages (position, content) VALUES (?, ?)", message.position, content)
        crash_point("once.log_message")
        await self._work(message.position, message)

    async def state(self, ids: Sequence[str]) -> Mapping[str, SeenItem]:
        """What is known of items."""
        known = dict(await self._seen.get(ids))
        missing = [item_id for item_id in ids if item_id not in known]
        if missing and self._shared is not None:
            elsewhere = await _patiently(self._shared.get, missing)
            await self._seen.put(list(elsewhere.values()))
            known |= elsewhere
        return known

    async def _work(self, position: str, message: Message) -> None:
        items = dict(self._handler.items(message))
        known = await self.state(list(items))
        fresh = [SeenItem(item_id, RECEIVED, time.time()) for item_id in items if item_id not in known]
        await self._seen.put(fresh)
        crash_point("once.store_received")
        for item_id, item in items.items():
            if item_id in known and known[item_id].state in _FINISHED:
                continue
            request = self._handler.process(item)
            crash_point("once.process")
            await self._do("INSERT OR IGNORE INTO requests (id, content) VALUES (?, ?)", item_id, orjson.dumps(request))
            crash_point("once.log_request")
            await self._finish(item_id, request)
        await self._do("DELETE FROM messages WHERE position = ?", position)
        crash_point("once.remove_message")

    async def _finish(self, item_id: str, request: Mapping[str, Any]) -> None:
        """Steps 6 to 9 of a logged request, however far it is."""
        found = (await self.state([item_id])).get(item_id)
        if found is None or found.state not in _FINISHED:
            began = found.at if found is not None and found.state == SENDING else None
            await self._store(await self._sent(item_id, request, began))
            crash_point("once.acknowledge")
        await self._do("DELETE FROM requests WHERE id = ?", item_id)
        crash_point("once.remove_request")

    async def _sent(self, item_id: str, request: Mapping[str, Any], began: float | None) -> SeenItem:
        """The item once the third party has it. ``began``: when a request that may have been sent began."""
        attempt = 0
        while True:
            answer = None if began is None else await self._read_back(item_id, request, began)
            if answer is not None:
                return SeenItem(item_id, DONE, time.time(), answer)
            began = time.time()
            await self._store(SeenItem(item_id, SENDING, began))
            crash_point("once.store_sending")
            try:
                answer = await self._handler.request(item_id, request)
            except Declined as error:
                log.warning("%s is declined: %s", item_id, error)
                return SeenItem(item_id, DECLINED, time.time(), str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the third party may have done it
                log.info("%s: %r; the third party is asked whether it was done", item_id, error)
            crash_point("once.request")
            if answer is not None:
                return SeenItem(item_id, DONE, time.time(), answer)
            await asyncio.sleep(pause_s(attempt, _LONGEST_S))
            attempt += 1

    async def _read_back(self, item_id: str, request: Mapping[str, Any], began: float) -> Any:
        """What the third party has of an item; None once it certainly has nothing and will have nothing."""
        attempt = 0
        while True:
            settled = time.time() >= began + self._settle_s
            try:
                answer = await self._handler.lookup(item_id, request)
                if answer is not None or settled:
                    return answer
            except Exception as error:  # noqa: BLE001 - without an answer nothing is known
                log.info("%s: the third party cannot be asked: %r", item_id, error)
            await asyncio.sleep(pause_s(attempt, _LONGEST_S))
            attempt += 1

    async def _store(self, item: SeenItem) -> None:
        await self._seen.put([item])
        if self._shared is not None:
            await _patiently(self._shared.put, [item])

    async def _do(self, statement: str, *values: Any) -> None:
        await self._database.run(lambda database: database.execute(statement, values))

    async def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        return await self._database.run(lambda database: database.execute(statement).fetchall())


async def _patiently(ask: Callable[[Any], Awaitable[_T]], what: Any) -> _T:
    """The answer of the shared store, however long it takes."""
    attempt = 0
    while True:
        try:
            return await ask(what)
        except Exception as error:  # noqa: BLE001 - without the shared store nothing may be sent
            log.warning("the shared seen-message store fails: %r; trying again", error)
        await asyncio.sleep(pause_s(attempt, _LONGEST_S))
        attempt += 1


def _message(content: bytes) -> Message:
    fields = orjson.loads(content)
    kind = {"snapshot": Snapshot, "change": Change}[fields.pop("kind")]
    fields["key"] = tuple(fields["key"])
    message: Message = kind(**fields)
    return message
