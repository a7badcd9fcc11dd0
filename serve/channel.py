"""What the hub keeps for one table: its recent changes, and a feed for each view that somebody looks through."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.settings import ServeSettings
from serve.errors import RequestError
from serve.filters.view import LiveView, RowsView, View, faults_of, undone
from serve.lane import Lane, Snapshot
from serve.live import AggregateView
from serve.messages import Message, change_messages, snapshot_messages
from serve.model import Change, in_order
from serve.position import WHOLE, Position, Seal
from serve.push.codec import Codec
from serve.ring import Ring
from serve.rows import encode_rows
from serve.shown import view_of, visible
from serve.state import TableState
from serve.subscriber import Subscriber, SubscribeRequest

SLICE_ROWS = 1_000  # of a snapshot that are worked on before others have their turn: 1 to 3 ms
INLINE_ROWS = 2_000  # a table of so many is not worth slicing
_HISTORY = 256  # changes kept as rows, so that a new view can be served from a little while ago without reading files
_HISTORY_ROWS = 50_000
_VIEWS = 4_096  # as they were asked for, so that the same text is not parsed again


class Feed:
    """A view of one table at work: evaluated once for all who share it.

    Args:
        view: what of the table is seen.
        channel: the table.

    Raises:
        FilterError: the view does not fit the table.
    """

    def __init__(self, view: View, channel: Channel) -> None:
        self.view = view
        self.channel = channel
        self.lanes: dict[str, Lane] = {}
        self.waiting: set[Subscriber] = set()  # for a snapshot
        self.snapshot: Snapshot | None = None
        self.work: Iterator[None] | None = None  # what is to be done in slices before they can have one
        self.total = 0  # bytes of messages made, ever
        self.empty_since: float | None = None
        self.ended: RequestError | None = None  # why nothing more comes of it
        self._start_over()

    @property
    def head(self) -> Position:
        """The position of one who has everything."""
        return Position(self.channel.state.table.table_id, self.version, 0, self.view.id)

    def members(self) -> list[Subscriber]:
        """All its subscribers."""
        return [subscriber for lane in self.lanes.values() for subscriber in lane.members()]

    def lane(self, codec: Codec, *, conflates: bool = False) -> Lane:
        """The lane of a wire form, made when somebody first wants it; one of their own for those who conflate."""
        name = f"{codec.name} conflated" if conflates else codec.name
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(codec, self._new_ring(), self.channel.seal, conflates=conflates)
        return lane

    def taken(self, change: Change, now: float) -> dict[str, bytes]:
        """Put a change into the rings; its bytes by name of the lane.

        Raises:
            FilterError: the view does not fit the table any more, or fails on what the change holds.
        """
        with faults_of(self.view):
            messages = change_messages(self.live.advance(change), self.channel.seal, self.view.id)
            self.version = change.version
            self.total += sum([len(message.body) for message in messages])
            return {name: lane.append(messages, now) for name, lane in self.lanes.items()}

    def worked(self) -> bool:
        """A slice of :attr:`work`; whether that was the last one.

        Raises:
            FilterError: the view fails on what the table holds.
        """
        work, self.work = self.work, None  # nothing is left of work that fails
        with faults_of(self.view):
            if work is None or next(work, True) is True:
                return True
        self.work = work
        return False

    def restarted(self) -> None:
        """The table is another one now: the rings are empty, what subscribers had is void.

        Raises:
            FilterError: the view does not fit it.
        """
        with faults_of(self.view):
            self._start_over()
        for lane in self.lanes.values():
            lane.ring = self._new_ring()

    def usable(self, lane: Lane, *, made: bool = False) -> Snapshot | None:
        """The last snapshot, if the ring goes on from it and (unless it was made this moment) little came since."""
        last = self.snapshot
        if last is None or lane.ring.find(last.position) is None:
            return None
        return last if made or (self.total - last.total) * 4 <= last.size else None

    def begin(self, now: float) -> None:
        """Start the work that ends in a new snapshot, unless it is under way."""
        if self.work is None:
            if not self.opened and self.version != self.channel.state.version:
                self.restarted()
            unread = None if self.opened else list(self.channel.state.rows.values())
            self.work = self._building(unread, now)

    def backfilled(self, lane: Lane, position: Position, now: float) -> bool:
        """Fill a ring backwards from the channel's recent changes, so that it may hold an older position.

        Returns:
            Whether anything was put into it.
        """
        until = lane.ring.start
        if not self.opened or position >= until or lane.ring.full:
            return False
        wanted = self.channel.since(position.version)
        if wanted is None or (self.view.select and len(self.channel.state.rows) > INLINE_ROWS):
            return False
        live = self._live_before(wanted)
        start = position.at(position.version)
        made: list[Message] = []
        for change in wanted:
            if change.version > until.version + (until.ordinal > 0):
                break
            made += change_messages(live.advance(change), self.channel.seal, self.view.id)
        frames = lane.prepend(start, [m for m in made if m.position is not None and m.position <= until], now)
        return bool(frames)

    def _start_over(self) -> None:
        state = self.channel.state
        self.version = state.version
        self.snapshot = None
        self.work = None
        self.live: LiveView = live_view(self.view, state)
        self.opened = not isinstance(self.live, AggregateView)

    def _building(self, unread: list[Row] | None, now: float) -> Iterator[None]:
        if unread is not None:
            assert isinstance(self.live, AggregateView)
            yield from self.live.opening(unread)
            self.opened = True
            yield  # commits that came meanwhile are taken in now
        table, position, total, facts = self.live.table, self.head, self.total, self.channel.state.facts
        waiting = self.live.source(self.channel.state.rows)
        runs: list[list[tuple[Key, Row]]] = []
        for start in range(0, len(waiting), SLICE_ROWS):
            runs.append(sorted(self.live.rows(waiting[start : start + SLICE_ROWS]), key=_by_key))
            yield
        ordered = heapq.merge(*runs, key=_by_key)
        rows: list[tuple[Row, bytes]] = []
        while some := [row for _, row in islice(ordered, SLICE_ROWS)]:
            rows += zip(some, encode_rows(table.columns, some), strict=True)
            yield
        messages = []
        for message in snapshot_messages(table, position, facts, rows, self.channel.seal, self.view.told):
            messages.append(message)
            yield
        self.snapshot = Snapshot(messages, position, sum(len(m.body) for m in messages), total, now)

    def _live_before(self, changes: Sequence[Change]) -> LiveView:
        if not changes:
            return self.live
        table = changes[0].was or changes[0].table
        if not self.view.select:
            return RowsView(self.view, table)
        live = AggregateView(self.view, table)
        for _ in live.opening(undone(self.channel.state.rows, changes).values()):
            pass
        return live

    def _new_ring(self) -> Ring:
        settings = self.channel.settings
        size = settings.ring_bytes if self.view.id == WHOLE else min(settings.filter_ring_bytes, settings.ring_bytes)
        return Ring(self.head, max_frames=settings.ring_frames, max_bytes=size)


class Channel:
    """One table, its views and their subscribers.

    Args:
        state: the table's rows, changed by its tail in the same thread.
        codecs: wire forms that the whole table is kept in from the start.
        settings: bounds of the rings.
        seal: writes positions.
        spec: what is declared of it.
    """

    def __init__(
        self,
        state: TableState,
        codecs: Iterable[Codec],
        settings: ServeSettings,
        seal: Seal,
        spec: ChannelSpec = EVERYTHING,
    ) -> None:
        self.state = state
        self.spec = spec
        self.settings = settings
        self.seal = seal
        self.interval_ms: float | None = None  # between commits that brought events, as a moving average
        self._history: deque[Change] = deque()
        self._history_rows = 0
        self._views: dict[tuple[object, ...], View] = {}
        whole = Feed(View(), self)
        for codec in codecs:
            whole.lane(codec)
        self.feeds: dict[bytes, Feed] = {WHOLE: whole}

    @property
    def name(self) -> str:
        """The table's name."""
        return self.state.table.name

    @property
    def head(self) -> Position:
        """The position of one who has the whole table."""
        return Position(self.state.table.table_id, self.state.version)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that there are for subscribers."""
        return visible(self.state.table, self.spec).columns

    @property
    def whole(self) -> Feed:
        """The feed of the whole table."""
        return self.feeds[WHOLE]

    def view(self, request: SubscribeRequest, guard: str) -> View:
        """The view that a request asks for under a condition that it cannot escape; made once for all who ask alike.

        Raises:
            FilterError: it is refused.
        """
        if not (request.where or request.columns or request.select or guard or self.spec.narrows):
            return self.whole.view
        table = self.state.table
        wanted = (table.columns, request.where, request.columns, request.select, guard)
        view = self._views.get(wanted)
        if view is None:
            view = view_of(table, request, guard, self.spec)
            while len(self._views) >= _VIEWS:
                self._views.pop(next(iter(self._views)))
            self._views[wanted] = view
        return view

    def members(self) -> int:
        """How many subscribers."""
        return sum(len(lane.members()) for feed in self.feeds.values() for lane in feed.lanes.values())

    def remember(self, change: Change) -> None:
        """Keep a change for views that come later, and how often they come."""
        if self._history and change.facts.events:
            pause = max(0, change.facts.committed_at - self._history[-1].facts.committed_at)
            self.interval_ms = pause if self.interval_ms is None else 0.8 * self.interval_ms + 0.2 * pause
        self._history.append(change)
        self._history_rows += len(change.upserts) + len(change.deletes)
        while len(self._history) > _HISTORY or (self._history_rows > _HISTORY_ROWS and len(self._history) > 1):
            dropped = self._history.popleft()
            self._history_rows -= len(dropped.upserts) + len(dropped.deletes)

    def since(self, version: int) -> list[Change] | None:
        """Changes after a version, to the newest; None: they are not all here."""
        if version == self.state.version:
            return []
        if not self._history or self._history[0].version > version + 1 or version > self.state.version:
            return None
        return [change for change in self._history if change.version > version]

    def restarted(self, state: TableState) -> None:
        """The table is another one now."""
        self.state = state
        self.interval_ms = None
        self._history.clear()
        self._history_rows = 0

    def rows(self, limit: int | None = None) -> list[bytes]:
        """Current rows as JSON objects, in the order of their keys."""
        keys: Sequence[tuple[object, ...]] = sorted(self.state.rows, key=in_order)[:limit]
        return encode_rows(self.state.table.columns, (self.state.rows[key] for key in keys))


def live_view(view: View, state: TableState) -> LiveView:
    """The view at work on a state. A view with a ``select`` has to be opened with the rows yet.

    Raises:
        FilterError: the view does not fit the table.
    """
    return AggregateView(view, state.table) if view.select else RowsView(view, state.table)


def _by_key(pair: tuple[Key, Row]) -> tuple[object, ...]:
    return in_order(pair[0])
