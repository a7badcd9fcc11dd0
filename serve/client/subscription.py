"""A subscription that outlives its connections, what it yields, and where its position is kept.

A message is 1. received into a bounded queue; 2. handed to a reader; 3. done when the reader asks for the next one.
4. The position is stored, up to the first message that is not done. A process that dies between 2 and 4 gets it again;
in a running process, reconnecting repeats nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlencode, urlsplit, urlunsplit

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from lakehouse.contract.errors import MillraceError

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MOVES = {"snapshot", "resumed", "change"}
_REFUSALS = {4400, 4404}
_SILENCE_S = 60.0  # without a heartbeat for this long, the connection is dead

JsonRow: TypeAlias = Mapping[str, Any]


class ClientError(MillraceError):
    """Base of the client library's errors."""


class Refused(ClientError):
    """The server refuses this request; asking again does not help.

    Attributes:
        code: machine-readable, e.g. ``no_such_table``; or the close code as text.
        detail: why.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class BadMessage(ClientError):
    """A message that is not of the protocol.

    Attributes:
        problem: what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All rows at a position. It replaces whatever was held.

    Attributes:
        table: name of the table.
        key: key columns.
        position: everything up to here is in it.
        rows: whole rows.
        through: next offset by ``topic/partition``: every event before it is in it.
        committed_at: ms since the epoch.
        reason: why it comes although there was a position (``log`` or ``lagged``); empty for a first one.
    """

    table: str
    key: tuple[str, ...]
    position: str
    rows: Sequence[JsonRow]
    through: Mapping[str, int] | None
    committed_at: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What one commit changed.

    Attributes:
        table: name of the table.
        key: key columns.
        position: everything up to here is applied after it.
        upserts: whole rows, new or changed.
        deletes: keys that are gone.
        through, committed_at: as in a snapshot.
        events: events that the commit added.
        oldest_at, newest_at: when a collector had the oldest and newest of them, ms since the epoch.
    """

    table: str
    key: tuple[str, ...]
    position: str
    upserts: Sequence[JsonRow]
    deletes: Sequence[JsonRow]
    through: Mapping[str, int] | None
    committed_at: int
    events: int
    oldest_at: int | None
    newest_at: int | None


Message: TypeAlias = Snapshot | Change


class Assembler:
    """Puts snapshots and changes together from their parts. Use one for each connection."""

    def __init__(self) -> None:
        self.key: tuple[str, ...] = ()
        self._rows: list[JsonRow] = []
        self._upserts: list[JsonRow] = []
        self._deletes: list[JsonRow] = []
        self._reason = ""

    def received(self, text: str | bytes) -> tuple[Mapping[str, Any], Message | None]:
        """Content of one text message, and the snapshot or change that it completes. Raises BadMessage."""
        try:
            content = orjson.loads(text)
            kind = content["type"]
            if kind == "snapshot":
                return content, self._snapshot(content)
            if kind == "change":
                return content, self._change(content)
            if kind == "resumed":
                self.key = tuple(content["key"])
            elif kind == "expired":
                self._reason = content["reason"]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise BadMessage(f"{error!r} in {text[:80]!r}") from None
        return content, None

    def _snapshot(self, content: Mapping[str, Any]) -> Snapshot | None:
        if content["first"]:
            self._rows, self._upserts, self._deletes = [], [], []
            self.key = tuple(content["key"])
        self._rows.extend(content["rows"])
        if not content["last"]:
            return None
        rows, self._rows = self._rows, []
        reason, self._reason = self._reason, ""
        return Snapshot(**self._common(content), rows=rows, reason=reason)

    def _change(self, content: Mapping[str, Any]) -> Change | None:
        self._upserts.extend(content["upserts"])
        self._deletes.extend(content["deletes"])
        if not content["last"]:
            return None
        upserts, self._upserts = self._upserts, []
        deletes, self._deletes = self._deletes, []
        times: dict[str, Any] = {name: content.get(name) for name in ("oldest_at", "newest_at")}
        return Change(**self._common(content), upserts=upserts, deletes=deletes, events=content["events"], **times)

    def _common(self, content: Mapping[str, Any]) -> dict[str, Any]:
        names = ("table", "position", "through", "committed_at")
        return {name: content[name] for name in names} | {"key": self.key}


class TableView:
    """The table as of the last message applied.

    Attributes:
        position: of that message; empty before the first.
        rows: by the values of the key columns.
    """

    def __init__(self) -> None:
        self.position = ""
        self.rows: dict[tuple[Any, ...], JsonRow] = {}

    def apply(self, message: Message) -> None:
        if isinstance(message, Snapshot):
            self.rows = {tuple(row[name] for name in message.key): row for row in message.rows}
        else:
            for gone in message.deletes:
                self.rows.pop(tuple(gone[name] for name in message.key), None)
            for row in message.upserts:
                self.rows[tuple(row[name] for name in message.key)] = row
        self.position = message.position


class PositionStore(Protocol):
    """Keeps one subscription's position.

    Where possible, keep it with the application's result in one transaction: then each message takes effect exactly
    once.
    """

    async def load(self) -> str | None:
        """The position stored last; None: none yet."""

    async def save(self, position: str) -> None:
        """Returns when the position is durable."""


class MemoryStore:
    """Keeps the position as long as the process lives, for several subscriptions in turn."""

    def __init__(self, position: str | None = None) -> None:
        self.position = position

    async def load(self) -> str | None:
        return self.position

    async def save(self, position: str) -> None:
        self.position = position


class FileStore:
    """Keeps the position in a file, replaced as a whole and synced: after a crash it holds the old or the new
    position."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    async def load(self) -> str | None:
        """The position in the file; None if there is no file. Raises ClientError if the content is not a position."""
        return await asyncio.to_thread(self._load)

    async def save(self, position: str) -> None:
        await asyncio.to_thread(self._save, position)

    def _load(self) -> str | None:
        try:
            content = orjson.loads(self.path.read_bytes())
            return str(content["position"])
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ClientError(f"{self.path} holds no position; remove it to start with a snapshot") from None

    def _save(self, position: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(orjson.dumps({"position": position}))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclass(eq=False, slots=True)
class _Entry:
    message: Message
    done: bool = False


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What of a table is wanted, evaluated by the server.

    Attributes:
        where: SQL condition on rows.
        columns: those wanted, besides the key's; empty: all.
        select: a live aggregate (``SELECT … GROUP BY …``) instead of rows.
        conflate: when this reader lags, the latest of each key instead of every change.
    """

    where: str = ""
    columns: Sequence[str] = ()
    select: str = ""
    conflate: bool = False

    def parameters(self) -> dict[str, str]:
        texts = {"where": self.where, "columns": ",".join(self.columns), "select": self.select}
        texts["conflate"] = "1" if self.conflate else ""
        return {name: text for name, text in texts.items() if text}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to connect again.

    Attributes:
        wait_for_table: whether a table that does not exist is waited for.
        longest_s: longest pause between two attempts.
        jitter: 0 to 1, scales each pause.
    """

    wait_for_table: bool = True
    longest_s: float = 10.0
    jitter: Callable[[], float] = random.random


class Subscription:
    """A subscription: enter it with ``async with``, read it with ``async for``.

    Several tasks may read it: each message goes to one of them.

    Args:
        url: the server, e.g. ``http://127.0.0.1:8400`` (``ws`` and ``https`` are taken too).
        table: name of the table.
        store: where the position is kept; None: the first message of every run is a snapshot.
        query: what of the table is wanted.
        retry: when to connect again.
        queue: messages held for readers; when it is full the socket is not read, and the server says how far behind.

    Attributes:
        table: name of the table.
        connects: connections made so far.
        slow_notices: how often the server said that we lag.
        gaps: how often a change was missing and was requested again.
        lag_ms: age of the newest event in the table as of the last heartbeat; None if unknown.
    """

    def __init__(
        self,
        url: str,
        table: str,
        store: PositionStore | None = None,
        *,
        query: TableQuery = TableQuery(),
        retry: RetryPolicy = RetryPolicy(),
        queue: int = 256,
    ) -> None:
        self.table = table
        self.connects = 0
        self.slow_notices = 0
        self.gaps = 0
        self.lag_ms: int | None = None
        self._url = _endpoint(url)
        self._wanted = query.parameters()
        self._store = store
        self._retry = retry
        self._queue: asyncio.Queue[_Entry | None] = asyncio.Queue(maxsize=queue)
        self._open: deque[_Entry] = deque()  # received and not yet stored, in order
        self._received: str | None = None
        self._processed: str | None = None
        self._stored: str | None = None
        self._saving = asyncio.Lock()
        self._failure: BaseException | None = None
        self._server_behind = 0
        self._task: asyncio.Task[None] | None = None
        self._readers: list[_SubscriptionReader] = []

    # What an application asks

    @property
    def position(self) -> str | None:
        """Everything up to here is processed, and stored if there is a store."""
        return self._stored if self._store is not None else self._processed

    @property
    def behind(self) -> int:
        """Messages received and not yet processed, or those that the server counts if they are more."""
        return max(len(self._open), self._server_behind)

    @property
    def keeping_up(self) -> bool:
        """Whether the readers keep up: the queue is not full, and the server reports no greater backlog."""
        return not self._queue.full() and self._server_behind < self._queue.maxsize

    def reader(self) -> AsyncIterator[Message]:
        """One more reader. Asking it for the next message says that the one before is processed."""
        reader = _SubscriptionReader(self)
        self._readers.append(reader)
        return reader

    def __aiter__(self) -> AsyncIterator[Message]:
        return self.reader()

    async def __aenter__(self) -> Subscription:
        if self._store is not None:
            self._stored = self._processed = self._received = await self._store.load()
        self._task = asyncio.create_task(self._run(), name=f"subscription {self.table}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if kind is None:  # a reader that left its loop normally has processed its message
            for reader in self._readers:
                await reader.finish()

    # Readers

    async def _next(self) -> _Entry:
        entry = await self._queue.get()
        if entry is None:
            self._queue.put_nowait(None)  # for the other readers
            assert self._failure is not None
            raise self._failure
        return entry

    async def _done(self, entry: _Entry) -> None:
        entry.done = True
        async with self._saving:
            position = None
            while self._open and self._open[0].done:
                position = self._open.popleft().message.position
            if position is not None:
                if self._store is not None:
                    await self._store.save(position)
                    self._stored = position
                self._processed = position

    # The connection

    async def _run(self) -> None:
        attempt = 0
        try:
            while True:
                before = self._received
                try:
                    await self._connection()
                except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
                    log.info("%s: connection lost: %r", self.table, error)
                attempt = 0 if self._received != before else attempt + 1
                pause = min(self._retry.longest_s, 0.05 * 2 ** min(attempt, 12))
                await asyncio.sleep(pause * (0.5 + self._retry.jitter() / 2))
        except Exception as error:  # noqa: BLE001 - whatever it is, the readers must hear of it
            self._failure = error
            await self._queue.put(None)

    async def _connection(self) -> None:
        query = {"table": self.table, **self._wanted} | ({"from": self._received} if self._received else {})
        async with connect(
            f"{self._url}?{urlencode(query)}",
            max_size=_MAX_MESSAGE_BYTES,
            max_queue=16,
            compression=None,
            ping_interval=None,
            close_timeout=1,
        ) as connection:
            self.connects += 1
            assembler, reached = Assembler(), self._received
            refusal: Refused | None = None
            try:
                while True:
                    async with asyncio.timeout(_SILENCE_S):
                        text = await connection.recv()
                    content, message = assembler.received(text)
                    if not self._follows(content, reached):
                        return
                    reached = content["position"] if content["type"] in _MOVES else reached
                    if message is not None:
                        await self._take(message)
                    elif content["type"] == "error":
                        refusal = Refused(content["code"], content["detail"])
                    else:
                        await self._heed(connection, content)
            except ConnectionClosed as closed:
                self._check_refusal(closed, refusal)
                raise

    def _follows(self, content: Mapping[str, Any], reached: str | None) -> bool:
        """Whether a change starts where the last message ended. If not, the missing part is requested again."""
        if content["type"] != "change" or reached is None:
            return True
        if content.get("after", reached) == reached or content["position"] == reached:
            return True
        self.gaps += 1
        log.warning("%s: a change is missing; asking again from the last position", self.table)
        return False

    async def _take(self, message: Message) -> None:
        if not isinstance(message, Snapshot) and message.position == self._received:
            return  # at least once on the wire, once to the application
        self._received = message.position
        entry = _Entry(message)
        self._open.append(entry)
        await self._queue.put(entry)

    async def _heed(self, connection: ClientConnection, content: Mapping[str, Any]) -> None:
        match content:
            case {"type": "heartbeat", "behind": int(behind), "lag_ms": lag}:
                self._server_behind = behind
                self.lag_ms = lag if isinstance(lag, int) else None
                if self._processed is not None:
                    await connection.send(orjson.dumps({"type": "ack", "position": self._processed}).decode())
            case {"type": "slow", "behind": int(behind)}:
                self._server_behind = behind
                self.slow_notices += 1
                log.warning("%s: the server says we are %d messages behind", self.table, behind)

    def _check_refusal(self, closed: ConnectionClosed, refusal: Refused | None) -> None:
        code = closed.rcvd.code if closed.rcvd is not None else 0
        if code == 4404 and self._retry.wait_for_table:
            return
        if code in _REFUSALS:
            raise refusal or Refused(str(code), closed.rcvd.reason if closed.rcvd else "")


class _SubscriptionReader:
    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._given: _Entry | None = None

    def __aiter__(self) -> _SubscriptionReader:
        return self

    async def __anext__(self) -> Message:
        await self.finish()
        self._given = await self._subscription._next()
        return self._given.message

    async def finish(self) -> None:
        given, self._given = self._given, None
        if given is not None:
            await self._subscription._done(given)


subscribe = Subscription
"""``async with subscribe(URL, TABLE) as messages``"""


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.netloc:
        raise ClientError(f"{url!r} is no address of a server, such as http://127.0.0.1:8400")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/v1/subscribe", "", ""))
