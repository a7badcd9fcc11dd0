"""The lake's tables in memory: finds them, follows each with one tail, and tells the hub.

In the terms of caching: a product's rows are *refreshed ahead* (the tail applies a commit before anybody asks); what is
not kept, bronze and ad-hoc results, is *read through* (:mod:`serve.query`). Nothing is written here: write-through,
write-around and write-back are the lakehouse's business, and a product is written through to Delta, the only store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from lakehouse.contract.channel import EVERYTHING
from lakehouse.contract.deltalog import TableUnreadable
from lakehouse.contract.lake import NAME_PATTERN, Lake, TableRef
from lakehouse.contract.settings import ServeSettings
from serve.delivery import Delivery
from serve.errors import PositionExpired, RequestError
from serve.hub import Hub
from serve.model import TableInfo
from serve.position import Position
from serve.replay import Replay
from serve.shown import NOT_SERVED, misfit
from serve.subscriber import Subscriber, SubscribeRequest
from serve.tail import Opened, Tail

log = logging.getLogger(__name__)

WARM_VERSIONS = 64
_SCAN_S = 0.5
_UNREADABLE_RETRY_S = 5.0
_FAILED_RETRY_S = 1.0
_FIRST_LOOK_S = 5.0
_AHEAD_MS = 5_000
_WINDOW_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.25
_REPLAYS = 4  # at a time; the others wait their turn
_AT_ONCE_S = 1.0  # for as long one may take what was rebuilt for it and keep its turn


def clock_ms() -> float:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic() * 1000


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return int(time.time() * 1000)


def _pauses(first: float) -> Iterator[float]:
    """Between looks for something that most often happens soon, s: there may be thousands who look."""
    while True:
        yield first
        first = min(2 * first, _LONGEST_LOOK_S)


class Tables:
    """Tails of all products of a lake.

    Args:
        lake: where tables are.
        hub: told of every table and commit.
        settings: poll interval.
        deliver: carries out the hub's deliveries.
    """

    def __init__(
        self, lake: Lake, hub: Hub, settings: ServeSettings, deliver: Callable[[Iterable[Delivery]], None]
    ) -> None:
        self.lake = lake
        self._specs = hub.feeds.specs
        self.problems: dict[str, str] = {}
        self.scanned = asyncio.Event()
        self._hub = hub
        self._settings = settings
        self._deliver = deliver
        self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tail")
        self._replays = ThreadPoolExecutor(max_workers=_REPLAYS, thread_name_prefix="replay")
        self._slots = asyncio.Semaphore(_REPLAYS)
        self._tails: dict[str, asyncio.Task[None]] = {}
        self._opened = asyncio.Condition()

    async def run(self) -> None:
        """Follow every table beside bronze, those too that come later. Runs until it is cancelled."""
        try:
            while True:
                try:
                    await self._scan()
                except Exception:
                    log.exception("the lake's tables cannot be listed; those that are followed are")
                await asyncio.sleep(_SCAN_S)
        finally:
            for task in self._tails.values():
                task.cancel()
            await asyncio.gather(*self._tails.values(), return_exceptions=True)
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._replays.shutdown(wait=False, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """Whether every table that was found is in memory or known not to be served."""
        return self.scanned.is_set() and self._tails.keys() <= self._hub.channels.keys() | self.problems.keys()

    async def wait_for(self, name: str) -> None:
        """Wait a little for a table that exists and is not in memory yet.

        Raises:
            RequestError: the lake cannot be looked at now.
        """
        if name in self._hub.channels or not NAME_PATTERN.fullmatch(name):
            return
        try:
            await self._scan()
        except OSError as error:
            log.warning("the lake's tables cannot be listed: %s", error)
            raise RequestError(RequestError.FULL, "busy", "the lake cannot be read at the moment; ask again") from None
        if name not in self._tails:
            return
        try:
            async with asyncio.timeout(_FIRST_LOOK_S), self._opened:
                await self._opened.wait_for(lambda: name in self._hub.channels or name in self.problems)
        except TimeoutError:
            log.warning("table %s is not in memory after %.0f s", name, _FIRST_LOOK_S)

    async def join(
        self, subscriber: Subscriber, request: SubscribeRequest, accepted: Callable[[], None] | None = None
    ) -> None:
        """What every transport does with a request: wait for the table, subscribe, and bring the subscriber up to date.

        Returns when the ring takes it on; its link is pumped meanwhile, first after ``accepted`` was called.

        Raises:
            RequestError: it cannot be served.
        """
        if not subscriber.principal.may_read(request.table):
            raise RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {request.table!r} is served here")
        await self.wait_for(request.table)
        if problem := self.problems.get(request.table):
            raise RequestError(RequestError.BAD_REQUEST, "not_served", problem)
        replay_from = self._hub.subscribed(subscriber, request, clock_ms())
        subscriber.label += f" {request.table}"
        if accepted is not None:
            accepted()
        subscriber.link.pump()
        if replay_from is not None:
            await self.replay(subscriber, replay_from)

    async def replay(self, subscriber: Subscriber, position: Position) -> None:
        """Bring a subscriber from a position that is older than the ring to the ring, at its own pace: one that takes
        its time, or does not acknowledge, keeps nobody else's turn, nor a table in memory."""
        if await self._reached(subscriber, position):
            while subscriber.replaying:
                async with self._slots:
                    position = await self._rebuilt(subscriber, position)
                await self._taken(subscriber)
        subscriber.link.pump()

    async def _rebuilt(self, subscriber: Subscriber, position: Position) -> Position:
        """Hands it what follows a position, as long as it takes it at once; how far that is."""
        feed = subscriber.feed
        if feed is None or not subscriber.replaying:
            return position
        loop = asyncio.get_running_loop()
        replay = Replay(self.lake.find(feed.channel.name).path, position, feed.view, self._hub.seal)
        while subscriber.replaying:
            try:
                until = feed.channel.state.version
                chunk = await loop.run_in_executor(self._replays, replay.next_chunk, until)
            except PositionExpired as expired:
                if subscriber.replaying:
                    self._hub.replay_failed(subscriber, expired.detail)
                break
            if subscriber.replaying:
                self._hub.replay_received(subscriber, chunk.start, chunk.messages, clock_ms())
                try:
                    async with asyncio.timeout(_AT_ONCE_S):
                        await self._taken(subscriber)
                except TimeoutError:
                    break
        return replay.position

    async def _taken(self, subscriber: Subscriber) -> None:
        """Returns when its socket has taken what was rebuilt, as far as its window lets it."""
        pauses = _pauses(_WINDOW_LOOK_S)
        subscriber.link.pump()
        while subscriber.replaying and subscriber.backlog:
            await subscriber.link.drained()
            await asyncio.sleep(next(pauses))
            subscriber.link.pump()

    async def _reached(self, subscriber: Subscriber, position: Position) -> bool:
        """Waits for this process to be as far as the position; another one may have been ahead."""
        give_up = clock_ms() + _AHEAD_MS
        pauses = _pauses(self._settings.poll_ms / 1000)
        while subscriber.replaying and subscriber.feed is not None:
            if position.version <= subscriber.feed.channel.state.version:
                return True
            if clock_ms() > give_up:
                self._hub.replay_failed(subscriber, "the position is ahead of the table")
                break
            await asyncio.sleep(next(pauses))
        subscriber.link.pump()
        return False

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        for table in await loop.run_in_executor(self._executor, self.lake.tables):
            if not self._specs.get(table.name, EVERYTHING).served:
                self.problems[table.name] = NOT_SERVED
            elif table.layer != "bronze" and table.name not in self._tails:
                self._tails[table.name] = asyncio.create_task(self._follow(table), name=f"tail {table.name}")
        self.scanned.set()

    async def _follow(self, table: TableRef) -> None:
        warm = WARM_VERSIONS
        while True:
            tail = Tail(table.path, poll_ms=self._settings.poll_ms, warm=warm, executor=self._executor)
            pause = _FAILED_RETRY_S
            try:
                async for event in tail.follow():
                    if isinstance(event, Opened):
                        self._check_fits(event.state.table)
                        self._deliver(self._hub.table_opened(event.state, event.detail))
                        await self._tell_opened(table.name, None)
                    else:
                        if event.was is not None:
                            self._check_fits(event.table)
                        self._deliver(self._hub.change_received(event, clock_ms()))
            except TableUnreadable as error:
                if self.problems.get(table.name) != str(error):
                    log.warning("%s", error)
                await self._tell_opened(table.name, str(error))
                self._deliver(self._hub.table_closed(table.name, str(error)))
                pause = _UNREADABLE_RETRY_S
            except Exception:
                log.exception("tail of %s failed", table.name)
            warm = 0
            await asyncio.sleep(pause)

    def _check_fits(self, table: TableInfo) -> None:
        if why := misfit(table, self._specs):
            raise TableUnreadable(table.name, f"products.{table.name}.channel does not fit it: {why}")

    async def _tell_opened(self, name: str, problem: str | None) -> None:
        if problem is None:
            self.problems.pop(name, None)
        else:
            self.problems[name] = problem
        async with self._opened:
            self._opened.notify_all()
