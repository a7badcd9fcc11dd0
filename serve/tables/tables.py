"""The lake's tables in memory: finds them, follows each with one tail, tells the hub, and replays older changes.

A product's rows are refreshed ahead: the tail applies a commit before anybody asks. A tick of a tail is two `stat`
calls in the event loop: is there a next version, and is the log still the same folder? In an object store it is one
request in a thread, the rarer the longer a table stands still. A table that was dropped and built again starts over
under the same name. Files are read off the loop and the state is changed on it, so that readers
on the loop see whole versions only. Nothing is written here.

A subscriber whose position is older than the ring is replayed from the Delta log, also one that another process served
before: 1. load the state at the position's version, and look at it through the subscriber's view; 2. read commit after
commit and make the same messages that the hub made of them, as many at a time as the socket takes; 3. hand over to the
ring as soon as it holds the position.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from lakehouse.contract.avro import SCHEMAS
from lakehouse.contract.deltalog import Commit, DeltaLog, LogFollower, TableGone, TableUnreadable
from lakehouse.contract.lake import ALERTS, LAYERS, NAME_PATTERN, Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.added import Declared, QuerySpec
from lakehouse.contract.pipeline.folder import Alert
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from lakehouse.contract.pipeline.tenants import TenantBorder
from lakehouse.contract.storage import LakePath, is_away
from serve.core.channel import NOT_SERVED, LiveView, finished, opened_view, view_of
from serve.core.hub import Hub
from serve.core.messages import Message, change_messages
from serve.core.model import SubscribeRequest, TableChange, TableInfo
from serve.core.position import Position, Seal
from serve.core.ring import Outgoing, Subscriber
from serve.core.view import SubscriberView, filter_errors
from serve.errors import FilterError, PositionExpired, RequestError
from serve.tables.events import EventReader
from serve.tables.state import StateStep, TableReader, TableState

log = logging.getLogger(__name__)

CHUNK_BYTES = 262_144
BRONZE = LAYERS[0]
WARM_VERSIONS = 64
_SCAN_S = 0.5
_MOST_ASKED = 1_000
_WANTED_MS = 60_000  # a bronze table is followed for so long after its last subscriber
_REMOTE_SCAN_S = 10.0
_UNREADABLE_RETRY_S = 5.0
_FAILED_RETRY_S = 1.0
_FIRST_LOOK_S = 5.0
_AHEAD_MS = 5_000
_WINDOW_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.25
_REPLAYS = 4  # at a time; others wait
# In an object store each look is a request: seconds between two, a share of the time since the last commit.
_REMOTE_SHARE, _REMOTE_LEAST_S, _REMOTE_MOST_S = 0.05, 0.1, 2.0
_REMOTE_GAP_CHECK_S = 15.0
_GAP_CHECK_S = 2.0  # how often to check whether a missing version was cleaned up
_HALF_WRITTEN_TRIES = 40
_AGAIN_S = 0.5
_T = TypeVar("_T")
Declarations = tuple[Mapping[str, ChannelSpec], Mapping[str, str]]
"""Channels of all products and views, and the columns of tenants, both by table."""
_AT_ONCE_S = 1.0  # how long a subscriber may keep its slot while it takes what was rebuilt


@dataclass(frozen=True, slots=True)
class Opened:
    """The table is there, or was replaced."""

    state: TableState  # at the version where following starts; the tail changes it
    detail: str  # why earlier positions are void; empty the first time


class Tail:
    """Follows a table, which need not exist yet.

    Args:
        poll_ms: pause between two looks for a next version.
        warm: how many versions before the newest to start from, if the log has them: a process that just started then
            has the last changes for those who resume.
        executor: where files are read.
    """

    def __init__(self, reader: TableReader, *, poll_ms: int, warm: int = 0, executor: Executor | None = None) -> None:
        self._reader = reader
        self._name = reader.folder.name
        self._poll = poll_ms / 1000
        self._warm = warm
        self._executor = executor
        self._follower = LogFollower(reader.folder)
        self._seen_at = 0.0

    async def follow(self) -> AsyncIterator[Opened | TableChange]:
        """First :class:`Opened`, then one change a commit, in order, without end. Raises TableUnreadable."""
        detail = ""
        try:
            while True:
                state = await self._open()
                self._warm = 0  # a second opening follows a break: earlier versions are void
                yield Opened(state, detail)
                try:
                    while True:
                        yield state.apply(await self._next_step(state))
                except TableGone as gone:
                    detail = str(gone)
                    log.warning("tail starts over: %s", gone)
        finally:
            self._follower.close()

    async def _open(self) -> TableState:
        while True:
            try:
                if await self._call(self._follower.open):
                    return await self._call(self._load)
            except TableGone as gone:  # being built or dropped at this moment
                log.info("waiting for a table: %s", gone)
            except OSError as error:
                self._say_later("it cannot be opened yet", error)
            await asyncio.sleep(max(self._poll, 0.1))

    def _load(self) -> TableState:
        if self._warm:
            known = self._follower.log.versions()
            start = known[-1] - self._warm if known else 0
            if start > 0 and known[-self._warm - 1 :][0] == start:
                with contextlib.suppress(TableGone):
                    return self._reader.load(start)
        return self._reader.load()

    async def _next_step(self, state: TableState) -> StateStep:
        """Wait for the next commit. Errors of the operating system, such as too many open files, are retried."""
        while True:
            try:
                commit = await self._next_commit(state.version + 1)
                return await self._call(self._reader.prepare, state, commit)
            except OSError as error:
                self._say_later(f"version {state.version + 1} cannot be read yet", error)
                await asyncio.sleep(_AGAIN_S)

    async def _next_commit(self, version: int) -> Commit:
        """Wait for the version's file. Raises TableGone if the log was replaced, or cleaned up beyond it."""
        follower = self._follower
        loop = asyncio.get_running_loop()
        gap_check_s = _REMOTE_GAP_CHECK_S if follower.remote else _GAP_CHECK_S
        look_at = loop.time() + gap_check_s
        tries = 0
        while True:
            if follower.remote or follower.log.has(version):
                try:
                    if (commit := await self._call(follower.look, version)) is not None:
                        self._seen_at = loop.time()
                        return commit
                except ValueError:  # some file systems show a file before all of it is written
                    tries += 1
                    if tries > _HALF_WRITTEN_TRIES:
                        raise TableGone(self._name, f"version {version} in the log is not JSON") from None
            follower.check()
            await asyncio.sleep(self._pause(loop.time()))
            if loop.time() > look_at:
                look_at = loop.time() + gap_check_s
                await self._call(follower.check_gap, version)

    def _pause(self, now: float) -> float:
        """Seconds to the next look."""
        if not self._follower.remote:
            return to_next_beat(now, self._poll)
        return min(_REMOTE_MOST_S, max(_REMOTE_LEAST_S, _REMOTE_SHARE * (now - self._seen_at)))

    def _say_later(self, what: str, error: OSError) -> None:
        log.log(logging.DEBUG if is_away(error) else logging.WARNING, "%s: %s: %s", self._name, what, error)

    async def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def to_next_beat(now: float, pause: float) -> float:
    """Seconds to the next multiple of ``pause``, or to the one after if that is too close.

    All tails of a process poll at the same moments: waking up is most of the cost, and one wake-up serves all tables.
    """
    left = pause - now % pause
    return left if left > 0.2 * pause else left + pause


class Replay:
    """Rebuilds the messages after a position, for a view. It blocks: not for the event loop."""

    def __init__(self, reader: TableReader, position: Position, view: SubscriberView, seal: Seal) -> None:
        self.position = position  # after the messages made so far
        self._view = view
        self._seal = seal
        self._reader = reader
        self._log = DeltaLog(reader.folder)
        self._state: TableState | None = None
        self._live: LiveView | None = None

    def next_chunk(self, until: int) -> Sequence[Message]:
        """The next messages, each with a position, up to version ``until`` and about :data:`CHUNK_BYTES`.

        Raises PositionExpired: log or data files were cleaned up, the table was replaced, or the view did not fit then.
        """
        start = self.position
        messages: list[Message] = []
        size = 0
        try:
            state, live = self._opened()
            while state.version < until and size < CHUNK_BYTES:
                change = self._reader.advance(state, self._log.read(state.version + 1))
                with filter_errors(self._view):
                    made = change_messages(live.advance(change), self._seal, self._view.id)
                for message in made:
                    assert message.position is not None
                    if message.position > start:
                        messages.append(message)
                        size += len(message.body)
        except (TableGone, TableUnreadable, FilterError) as gone:
            raise PositionExpired(self._reader.folder.name, start.version, str(gone)) from gone
        if messages:
            assert messages[-1].position is not None
            self.position = messages[-1].position
        return messages

    def _opened(self) -> tuple[TableState, LiveView]:
        if self._state is None or self._live is None:
            self._state = self._reader.load(self.position.version)
            if self._state.table.table_id != self.position.table_id:
                raise TableGone(self._reader.folder.name, "the position is of another table of this name")
            with filter_errors(self._view):
                self._live = finished(opened_view(self._view, self._state))
        return self._state, self._live


def clock_ms() -> float:
    return time.monotonic() * 1000


def now_ms() -> int:
    return int(time.time() * 1000)


def _pauses(first: float) -> Iterator[float]:
    """Seconds between polls for something that most often happens soon; thousands may poll."""
    while True:
        yield first
        first = min(2 * first, _LONGEST_LOOK_S)


class Tables:
    """Tails of all products of a lake, and of bronze tables while somebody wants them.

    Args:
        border: between tenants; queries that are added and removed are entered.
        deliver: carries out the hub's deliveries.
        declared: returns what is declared if it has changed; called in a thread, before tables are looked for.
        sources: those of the bronze tables.
    """

    def __init__(
        self,
        lake: Lake,
        hub: Hub,
        border: TenantBorder,
        deliver: Callable[[Iterable[Outgoing]], None],
        declared: Callable[[], Declarations | None],
        sources: Mapping[str, Source],
    ) -> None:
        self.lake = lake
        self.sources = sources
        self._used: dict[str, float] = {}  # tails of bronze, and when somebody last wanted them
        self._declared = declared
        self._declaring = asyncio.Lock()
        self.problems: dict[str, str] = {}
        self.scanned = asyncio.Event()
        self._hub = hub
        self._settings = hub.settings
        self._border = border
        self._added: dict[str, str] = {}  # columns of the border that run-time queries declare
        self._added_at: tuple[int, int] | None = None
        self.reads: dict[str, set[str]] = {}  # by queries of the run time, and by its alerts; replaced as a whole
        self.asked: dict[tuple[str, str], float] = {}  # when a tenant last wanted a table that does not exist yet
        self._deliver = deliver
        self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="tail")
        self._replays = ThreadPoolExecutor(max_workers=_REPLAYS, thread_name_prefix="replay")
        self._slots = asyncio.Semaphore(_REPLAYS)
        self._tails: dict[str, asyncio.Task[None]] = {}
        self._opened = asyncio.Condition()
        self._enter_queries()

    async def run(self) -> None:
        """Follow all tables except bronze, including later ones, until cancelled."""
        try:
            while True:
                try:
                    await self._scan()
                except Exception:
                    log.exception("the lake's tables cannot be listed; those that are followed are")
                await asyncio.sleep(_REMOTE_SCAN_S if self.lake.remote else _SCAN_S)
        finally:
            for task in self._tails.values():
                task.cancel()
            await asyncio.gather(*self._tails.values(), return_exceptions=True)
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._replays.shutdown(wait=False, cancel_futures=True)

    def reader(self, folder: LakePath) -> TableReader:
        source = self.sources.get(folder.name) if folder.parent.name == BRONZE else None
        return TableReader(folder) if source is None else EventReader(folder, source, self.lake.shared / SCHEMAS)

    @property
    def ready(self) -> bool:
        """Whether every table that was found is in memory or known not to be served."""
        return self.scanned.is_set() and self._tails.keys() <= self._hub.channels.keys() | self.problems.keys()

    async def wait_for(self, name: str) -> None:
        """Wait a little for a table that exists but is not in memory yet. Raises RequestError: no lake to be read."""
        if name in self.sources:
            self._used[name] = clock_ms()
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
        """Subscribe, for any transport: wait for the table, and bring the subscriber up to date.

        ``accepted`` is called before the link is first pumped. Returns when the ring takes over. Raises RequestError.
        """
        subscriber.principal.check_table(request.table)
        await self.wait_for(request.table)
        if request.table not in self._hub.channels and len(self.asked) < _MOST_ASKED:
            self.asked[subscriber.principal.tenant, request.table] = clock_ms()
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
        """Bring a subscriber from a position older than the ring to the ring, at its own pace.

        A slow one, or one that does not acknowledge, holds neither a slot nor a table in memory meanwhile.
        """
        if await self._reached(subscriber, position):
            while subscriber.replaying:
                async with self._slots:
                    position = await self._rebuilt(subscriber, position)
                await self._taken(subscriber)
        subscriber.link.pump()

    async def _rebuilt(self, subscriber: Subscriber, position: Position) -> Position:
        """Hand over what follows a position, as long as it is taken at once; returns how far."""
        stream = subscriber.stream
        if stream is None or not subscriber.replaying:
            return position
        loop = asyncio.get_running_loop()
        replay = Replay(self.reader(self.lake.find(stream.channel.name).path), position, stream.view, self._hub.seal)
        while subscriber.replaying:
            try:
                until = stream.channel.state.version
                start = replay.position
                rebuilt = await loop.run_in_executor(self._replays, replay.next_chunk, until)
            except PositionExpired as expired:
                if subscriber.replaying:
                    self._hub.replay_failed(subscriber, expired.detail)
                break
            if subscriber.replaying:
                self._hub.replay_received(subscriber, start, rebuilt, clock_ms())
                try:
                    async with asyncio.timeout(_AT_ONCE_S):
                        await self._taken(subscriber)
                except TimeoutError:
                    break
        return replay.position

    async def _taken(self, subscriber: Subscriber) -> None:
        """Return when the socket has taken what was rebuilt, as far as its window allows."""
        pauses = _pauses(_WINDOW_LOOK_S)
        subscriber.link.pump()
        while subscriber.replaying and subscriber.backlog:
            await subscriber.link.drained()
            await asyncio.sleep(next(pauses))
            subscriber.link.pump()

    async def _reached(self, subscriber: Subscriber, position: Position) -> bool:
        """Wait until this process has reached the position; another process may have been ahead."""
        give_up = clock_ms() + _AHEAD_MS
        pauses = _pauses(self._settings.poll_ms / 1000)
        while subscriber.replaying and subscriber.stream is not None:
            if position.version <= subscriber.stream.channel.state.version:
                return True
            if clock_ms() > give_up:
                self._hub.replay_failed(subscriber, "the position is ahead of the table")
                break
            await asyncio.sleep(next(pauses))
        subscriber.link.pump()
        return False

    def _enter_queries(self) -> None:
        """Bring the border and :attr:`reads` up to date with the queries and alerts of the run time. It blocks."""
        declared, alerts = Declared(self.lake, QuerySpec), Declared(self.lake, Alert)
        if (stamp := (declared.stamp(), alerts.stamp())) == self._added_at:
            return
        queries = declared.all()
        self.reads = {name: {spec.relation} for name, spec in queries.items()}
        self.reads[ALERTS] = {alert.product for alert in alerts.all().values()}
        found = {name: spec.tenant_column for name, spec in queries.items()}
        for name in self._added.keys() - found.keys():
            self._border.columns.pop(name, None)
        self._border.columns.update(found)
        self._added, self._added_at = found, stamp

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._declaring:  # first: a table is never served otherwise than as it was declared when it was made
            changed = await loop.run_in_executor(self._executor, self._declared)
            if changed is not None:
                await self._redeclare(*changed)
            await loop.run_in_executor(self._executor, self._enter_queries)
        unserved = {name for name, problem in self.problems.items() if problem == NOT_SERVED}
        layers = LAYERS if self._used else LAYERS[1:]
        look = functools.partial(self.lake.tables, layers, self._tails.keys() | unserved)
        for table in await loop.run_in_executor(self._executor, look):
            if not self._hub.specs.get(table.name, EVERYTHING).served:
                self.problems[table.name] = NOT_SERVED
            elif table.name not in self._tails and (table.layer != BRONZE or table.name in self._used):
                self._tails[table.name] = asyncio.create_task(self._follow(table), name=f"tail {table.name}")
        self._let_go()
        self.scanned.set()

    async def _redeclare(self, specs: Mapping[str, ChannelSpec], columns: Mapping[str, str]) -> None:
        """Serve each table as it is declared now; one that is declared no more, as it was."""
        before, tenants = self._hub.specs, self._border.columns
        other = [
            name
            for name, spec in specs.items()
            if spec != before.get(name, EVERYTHING) or tenants.get(name) != columns.get(name)
        ]
        self._hub.specs = {**before, **specs}
        for name in specs.keys() - columns.keys():
            tenants.pop(name, None)
        tenants.update(columns)
        for name in other:
            self.problems.pop(name, None)
            if (tail := self._tails.pop(name, None)) is not None:
                tail.cancel()
                await asyncio.gather(tail, return_exceptions=True)
                why = RequestError(RequestError.FULL, "busy", "the table is declared otherwise now: connect again")
                self._deliver(self._hub.table_closed(name, why))

    def _let_go(self) -> None:
        """End the tails of bronze tables that nobody has wanted for a while."""
        for name in [name for name in self._used if name in self._tails]:
            channel = self._hub.channels.get(name)
            if channel is not None and channel.members():
                self._used[name] = clock_ms()
            elif clock_ms() - self._used[name] > _WANTED_MS:
                self._tails.pop(name).cancel()
                del self._used[name]
                why = RequestError(RequestError.FULL, "busy", "nobody wanted the table for a while: connect again")
                self._deliver(self._hub.table_closed(name, why))

    async def _follow(self, table: TableRef) -> None:
        warm = WARM_VERSIONS
        while True:
            reader = self.reader(table.path)
            tail = Tail(reader, poll_ms=self._settings.poll_ms, warm=warm, executor=self._executor)
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
                why = RequestError(RequestError.BAD_REQUEST, "not_served", str(error))
                self._deliver(self._hub.table_closed(table.name, why))
                pause = _UNREADABLE_RETRY_S
            except Exception:
                log.exception("tail of %s failed", table.name)
            warm = 0
            await asyncio.sleep(pause)

    def _check_fits(self, table: TableInfo) -> None:
        spec = self._hub.specs.get(table.name, EVERYTHING)
        try:
            if spec.narrows:
                view_of(table, SubscribeRequest(table.name), "", spec)
        except FilterError as error:
            raise TableUnreadable(table.name, f"products.{table.name}.channel does not fit it: {error}") from None

    async def _tell_opened(self, name: str, problem: str | None) -> None:
        if problem is None:
            self.problems.pop(name, None)
        else:
            self.problems[name] = problem
        async with self._opened:
            self._opened.notify_all()
