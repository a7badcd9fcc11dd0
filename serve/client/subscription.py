"""A subscription that outlives its connections, what it yields, and where its position is kept.

A message is 1. received into a bounded queue; 2. handed to a reader; 3. done when the reader asks for the next one.
4. The position is stored, up to the first message that is not done. A process that dies between 2 and 4 gets it again;
in a running process, reconnecting repeats nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from serve.client.stores import PositionStore
from serve.client.transports import (
    TRANSPORTS,
    BadMessage,
    ClientError,
    ConnectionLost,
    Forbidden,
    NoSuchTable,
    Refused,
    StreamRequest,
    TransportBlocked,
    http_base,
    pause_s,
    raise_refusal,
    receive,
)

log = logging.getLogger(__name__)

_MOVES = {"snapshot", "resumed", "change"}

JsonRow: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All rows at a position. It replaces whatever was held.

    Attributes:
        position: everything up to here is in it.
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

    def received(self, content: Mapping[str, Any]) -> Message | None:
        """Take one message; the snapshot or change that it completes. Raises BadMessage."""
        try:
            kind = content["type"]
            if kind == "snapshot":
                return self._snapshot(content)
            if kind == "change":
                return self._change(content)
            if kind == "resumed":
                self.key = tuple(content["key"])
            elif kind == "expired":
                self._reason = content["reason"]
        except (KeyError, TypeError) as error:
            raise BadMessage(f"{error!r} in {str(content)[:80]!r}") from None
        return None

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
    """The table as of the last message applied: its position (empty before), and rows by values of the key columns."""

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


@dataclass(eq=False, slots=True)
class _Entry:
    message: Message
    done: bool = False


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What of a table is wanted, evaluated by the server.

    Attributes:
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
class SlowNotice:
    """The server says that this subscriber lags by ``behind`` messages, the oldest of them ``behind_ms`` old.

    ``cut_in_ms``: time until the server ends a connection that takes nothing.
    """

    behind: int
    behind_ms: int
    cut_in_ms: int


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How to connect.

    Attributes:
        transport: ``websocket``, ``sse`` or ``poll``; ``auto``: the first of them that gets through.
        wait_for_table: whether a table that does not exist is waited for; else NoSuchTable is raised.
        longest_s: longest pause between two attempts.
        queue: messages held for readers; when it is full nothing is read, and the server says how far behind.
        on_slow: called when the server says that this subscriber is too slow, once until it has caught up.
        ticket: fetches a ticket for each request, for a program that does not have the key.
    """

    transport: str = "auto"
    wait_for_table: bool = False
    longest_s: float = 10.0
    queue: int = 256
    on_slow: Callable[[SlowNotice], None] = lambda _: None
    ticket: Callable[[], Awaitable[str]] | None = None


class Subscription:
    """A subscription: enter it with ``async with``, read it with ``async for``.

    It reconnects until it is left, or until the server gives a final answer, which every reader gets as
    :class:`Refused`. Several tasks may read it: each message goes to one of them.

    Args:
        url: the server, e.g. ``http://127.0.0.1:8400`` (``ws`` and ``https`` are taken too).
        store: where the position is kept; None: the first message of every run is a snapshot.
        key: API key, sent in a header.

    Attributes:
        connects: connections over which messages came.
        gaps: how often a change was missing and was requested again.
        lag_ms: age of the newest event in the table as of the last heartbeat; None if unknown.
        slow: the server's last notice that we are too slow; None when we have caught up since.
    """

    def __init__(
        self,
        url: str,
        table: str,
        store: PositionStore | None = None,
        *,
        key: str = "",
        query: TableQuery = TableQuery(),
        options: ClientOptions = ClientOptions(),
    ) -> None:
        if options.transport not in ("auto", *TRANSPORTS):
            raise ClientError(f"{options.transport!r} is no transport: auto, {', '.join(TRANSPORTS)}")
        self.table = table
        self.connects = 0
        self.gaps = 0
        self.lag_ms: int | None = None
        self.slow: SlowNotice | None = None
        asked = {"table": table, **query.parameters()}
        self._request = StreamRequest(http_base(url), asked, key, options.ticket, lambda: self._processed)
        self._transports = TRANSPORTS if options.transport == "auto" else (options.transport,)
        self.transport = self._transports[0]
        self._store = store
        self._options = options
        self._queue: asyncio.Queue[_Entry | None] = asyncio.Queue(maxsize=options.queue)
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
        """Connect again and again. A blocked transport gives way to the next; the one that worked last is kept."""
        attempt = blocked = 0
        worked = self.transport
        try:
            while True:
                before, connects = self._received, self.connects
                try:
                    await self._connection()
                except TransportBlocked as error:
                    log.info("%s: %s does not get through: %s", self.table, self.transport, error)
                    following = self._transports.index(self.transport) + 1
                    self.transport = self._transports[following % len(self._transports)]
                    blocked += 1
                    if blocked < len(self._transports):
                        continue
                    if 400 <= error.status < 500:
                        raise (Forbidden if error.status == 403 else Refused)(
                            f"http_{error.status}", str(error)
                        ) from None
                except ConnectionLost as error:
                    log.info("%s: connection lost: %s", self.table, error)
                    worked = self.transport = self.transport if self.connects > connects else worked
                except NoSuchTable:
                    if not self._options.wait_for_table:
                        raise
                blocked = 0
                attempt = 0 if self._received != before else attempt + 1
                await asyncio.sleep(pause_s(attempt, self._options.longest_s))
        except Exception as error:  # noqa: BLE001 - whatever it is, the readers must hear of it
            self._failure = error
            await self._queue.put(None)

    async def _connection(self) -> None:
        """Take messages until the connection ends or a change is missing."""
        resume = {"from": self._received} if self._received else {}
        request = replace(self._request, query={**self._request.query, **resume})
        assembler, reached, first = Assembler(), self._received, True
        async with aclosing(receive(self.transport, request)) as contents:
            async for content in contents:
                self.connects += first
                first = False
                message = assembler.received(content)
                if not self._follows(content, reached):
                    return
                reached = content["position"] if content["type"] in _MOVES else reached
                if message is not None:
                    await self._take(message)
                else:
                    self._heed(content)

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

    def _heed(self, content: Mapping[str, Any]) -> None:
        match content:
            case {"type": "heartbeat", "behind": int(behind)}:
                caught_up = content.get("position") == self._processed  # what it counts may not be acknowledged yet
                self._server_behind = 0 if caught_up else behind
                self.lag_ms = content.get("lag_ms", self.lag_ms)
                self.slow = self.slow if self._server_behind else None
            case {"type": "slow", "behind": int(behind), "behind_ms": int(late), "cut_in_ms": int(cut)}:
                self._server_behind = behind
                is_new, self.slow = self.slow is None, SlowNotice(behind, late, cut)
                if is_new:  # each long poll says it again
                    log.warning("%s: the server says we are %d messages and %d ms behind", self.table, behind, late)
                    self._options.on_slow(self.slow)
            case {"type": "error", "code": str(code), "detail": str(detail)}:
                raise_refusal(code, detail)
            case {"type": "close", "detail": str(detail)}:
                raise ConnectionLost(detail)


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


# Without asyncio

_T = TypeVar("_T")
_C = TypeVar("_C", bound=AbstractAsyncContextManager[Any])


class InThread(Generic[_C]):
    """Enters and leaves an asynchronous object in the loop of a thread, for programs without asyncio."""

    def __init__(self, state: _C, name: str) -> None:
        self.state = state
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.wait(self.state.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait(self.state.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncSubscription(InThread[Subscription]):
    """Makes a subscription one to enter with ``with`` and to read with ``for``.

    ``with SyncSubscription(subscribe(URL, TABLE)) as messages``. Several threads may read it, each with a
    :meth:`reader` of its own.

    Attributes:
        state: the subscription itself; read ``position``, ``behind``, ``lag_ms``, ``slow`` and ``keeping_up`` there.
    """

    def __init__(self, subscription: Subscription) -> None:
        super().__init__(subscription, f"subscription {subscription.table}")

    def __iter__(self) -> Iterator[Message]:
        return self.reader()

    def reader(self) -> Iterator[Message]:
        """One more reader. Asking it for the next message says that the one before is processed."""
        messages = self.state.reader()

        async def following() -> Message:
            return await anext(messages)

        while True:
            yield self.wait(following())
