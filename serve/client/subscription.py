"""A subscription that outlives its connections.

A message is 1. received into a bounded queue; 2. handed to a reader; 3. done when the reader asks for the next one.
4. The position is stored, up to the first message that is not done. A process that dies between 2 and 4 gets it again;
in a running process, reconnecting repeats nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlencode, urlsplit, urlunsplit

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from serve.client.messages import Assembler, ClientError, Message, Refused, Snapshot
from serve.client.store import PositionStore

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MOVES = {"snapshot", "resumed", "change"}
_REFUSALS = {4400, 4404}
_SILENCE_S = 60.0  # without a heartbeat for this long, the connection is dead


@dataclass(eq=False, slots=True)
class _Entry:
    message: Message
    done: bool = False


@dataclass(frozen=True, slots=True)
class _Retry:
    """When to connect again; see :func:`subscribe`."""

    wait_for_table: bool
    longest_s: float
    jitter: Callable[[], float]


def subscribe(
    url: str,
    table: str,
    store: PositionStore | None = None,
    *,
    queue: int = 256,
    wait_for_table: bool = True,
    backoff_max_s: float = 10.0,
    jitter: Callable[[], float] = random.random,
    where: str = "",
    columns: Sequence[str] = (),
    select: str = "",
    conflate: bool = False,
) -> Subscription:
    """A subscription; enter it with ``async with``, read it with ``async for``.

    Args:
        url: the server, e.g. ``http://127.0.0.1:8400`` (``ws`` and ``https`` are taken too).
        table: name of the table.
        store: where the position is kept; None: the first message of every run is a snapshot.
        queue: messages held for readers; when it is full the socket is not read, and the server says how far behind.
        wait_for_table: whether a table that does not exist is waited for.
        backoff_max_s: longest pause between two attempts to connect.
        jitter: 0 to 1, scales each pause.
        where: SQL condition on rows, evaluated by the server.
        columns: those wanted, beside the key's; empty: all.
        select: a live aggregate (``SELECT … GROUP BY …``) instead of rows.
        conflate: when this reader lags, the latest of each key instead of every change.
    """
    asked = {"where": where, "columns": ",".join(columns), "select": select, "conflate": "1" if conflate else ""}
    wanted = {name: text for name, text in asked.items() if text}
    return Subscription(url, table, store, queue, _Retry(wait_for_table, backoff_max_s, jitter), wanted)


class Subscription:
    """See :func:`subscribe`. Several tasks may read it: each message goes to one of them.

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
        store: PositionStore | None,
        queue: int,
        retry: _Retry,
        wanted: Mapping[str, str],
    ) -> None:
        self.table = table
        self.connects = 0
        self.slow_notices = 0
        self.gaps = 0
        self.lag_ms: int | None = None
        self._url = _endpoint(url)
        self._wanted = wanted
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


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.netloc:
        raise ClientError(f"{url!r} is no address of a server, such as http://127.0.0.1:8400")
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + "/v1/subscribe", "", ""))
