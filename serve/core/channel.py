"""What the hub keeps for one table: recent changes, and a stream for each view in use.

A subscriber's request is applied under its principal's condition, to the channel that the pipeline declares
(``[products.NAME.channel]``). Snapshot, changes, resume, look-ups and history all use :func:`view_of`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TypeAlias, TypeVar

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.settings import ServeSettings
from lakehouse.contract.sql import INT, TEXT
from lakehouse.contract.sql.closures import Columns, pin_of
from lakehouse.contract.sql.filters import checked, conjunction, parse_condition
from lakehouse.contract.tomlfile import line_of
from serve.core.aggregate import AggregateView, aggregate_view, rows_of_select
from serve.core.messages import Codec, Message, change_messages, encode_rows, snapshot_messages
from serve.core.model import SubscribeRequest, TableChange, TableInfo, in_order
from serve.core.position import WHOLE, Position, Seal
from serve.core.ring import Ring, SharedSnapshot, Subscriber, WireChannel
from serve.core.view import RowsView, SubscriberView, filter_errors, rows_before, rows_view
from serve.errors import FilterError, RequestError
from serve.tables.state import TableState

_T = TypeVar("_T")
LiveView: TypeAlias = RowsView | AggregateView
"""A view at work on one table."""

NOT_SERVED = "its pipeline declares that it has no channel; query it with SQL"
_FILTER_RING_BYTES = 1_048_576  # of a filter; a filter passes a part of its table, and there may be thousands
SLICE_ROWS = 1_000  # of a snapshot, built before others get their turn: 1 to 3 ms
INLINE_ROWS = 2_000  # tables up to this size are not sliced
_HISTORY = 256  # recent changes kept as rows, to serve a new view from an older position without reading files
_HISTORY_ROWS = 50_000
_VIEWS = 4_096  # parsed views by request text
_RATE_MS = 10_000


class ViewStream:
    """A view of one table at work, evaluated once for all who share it. Raises FilterError if it does not fit the
    table.
    """

    def __init__(self, view: SubscriberView, channel: Channel) -> None:
        self.view = view
        self.channel = channel
        self.wire_channels: dict[str, WireChannel] = {}
        self.waiting: set[Subscriber] = set()  # for a snapshot
        self.snapshot: SharedSnapshot | None = None
        self.work: Iterator[None] | None = None  # builds a snapshot in slices
        self.total = 0  # bytes of all messages so far
        self.empty_since: float | None = None
        self.ended: RequestError | None = None  # why the stream has ended
        self._start_over()

    @property
    def head(self) -> Position:
        """Position of a subscriber that has everything."""
        return Position(self.channel.state.table.table_id, self.version, 0, self.view.id)

    def members(self) -> list[Subscriber]:
        return [subscriber for wire_channel in self.wire_channels.values() for subscriber in wire_channel.members()]

    @cached_property
    def pinned(self) -> tuple[str, frozenset[str]] | None:
        """A column of texts or whole numbers, and the values that the subscribers' condition asks for; None: any."""
        try:
            columns = Columns.of(self.channel.state.table)
            tree = parse_condition(self.view.where, columns)
            pin = None if tree is None else pin_of(tree, columns)
        except FilterError:  # the table has other columns by now
            return None
        named = {at: name for name, (at, kind) in columns.at.items() if kind in (TEXT, INT)}
        return None if pin is None or pin.column not in named else (named[pin.column], frozenset(map(str, pin.values)))

    def wire_channel(self, codec: Codec, *, conflates: bool = False) -> WireChannel:
        """The ring of a wire form, made when somebody first wants it. Conflating subscribers have one of their own."""
        name = f"{codec.name} conflated" if conflates else codec.name
        wire_channel = self.wire_channels.get(name)
        if wire_channel is None:
            wire_channel = self.wire_channels[name] = WireChannel(
                codec, self._new_ring(), self.channel.seal, conflates=conflates
            )
        return wire_channel

    def apply_change(self, change: TableChange, now: float) -> dict[str, bytes]:
        """Put a change into the rings; returns its bytes by name of the wire channel. Raises FilterError: the view no
        longer fits the table, or fails on the change.
        """
        with filter_errors(self.view):
            messages = change_messages(self.live.advance(change), self.channel.seal, self.view.id)
            self.version = change.version
            self.total += sum([len(message.body) for message in messages])
            return {name: wire_channel.append(messages, now) for name, wire_channel in self.wire_channels.items()}

    def run_slice(self) -> bool:
        """Do a slice of :attr:`work`; True if it was the last. Raises FilterError if the view fails on a row."""
        work, self.work = self.work, None  # work that fails is dropped
        with filter_errors(self.view):
            if work is None or next(work, True) is True:
                return True
        self.work = work
        return False

    def restarted(self) -> None:
        """The table was replaced: the rings are empty, what subscribers had is void. Raises FilterError."""
        with filter_errors(self.view):
            self._start_over()
        for wire_channel in self.wire_channels.values():
            wire_channel.ring = self._new_ring()

    def usable_snapshot(self, wire_channel: WireChannel, *, made: bool = False) -> SharedSnapshot | None:
        """The last snapshot, if the ring continues from it and, unless it was just made, little has changed since."""
        last = self.snapshot
        if last is None or wire_channel.ring.find(last.position) is None:
            return None
        return last if made or (self.total - last.total) * 4 <= last.size else None

    def begin(self, now: float) -> None:
        """Start building a snapshot, unless one is under way."""
        if self.work is None:
            if not self.opened and self.version != self.channel.state.version:
                self.restarted()
            unread = None if self.opened else list(self.channel.state.rows.values())
            self.work = self._building(unread, now)

    def backfill(self, wire_channel: WireChannel, position: Position, now: float) -> bool:
        """Extend a ring backwards from the channel's recent changes, towards an older position. True if it grew."""
        until = wire_channel.ring.start
        if not self.opened or position >= until or wire_channel.ring.full:
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
        frames = wire_channel.prepend(start, [m for m in made if m.position is not None and m.position <= until], now)
        return bool(frames)

    def _start_over(self) -> None:
        state = self.channel.state
        self.version = state.version
        self.snapshot = None
        self.work = None
        self.live: LiveView = live_view(self.view, state.table)
        self.opened = not isinstance(self.live, AggregateView)

    def _building(self, unread: list[Row] | None, now: float) -> Iterator[None]:
        if unread is not None:
            assert isinstance(self.live, AggregateView)
            yield from self.live.opening(unread)
            self.opened = True
            yield  # the caller applies commits that came meanwhile
        table, position, total = self.live.table, self.head, self.total
        facts = self.view.facts(self.channel.state.facts)
        rows = yield from rows_in_order(self.live, self.channel.state.rows)
        messages = []
        for message in snapshot_messages(table, position, facts, rows, self.channel.seal, self.view.description):
            messages.append(message)
            yield
        self.snapshot = SharedSnapshot(messages, position, sum(len(m.body) for m in messages), total, now)

    def _live_before(self, changes: Sequence[TableChange]) -> LiveView:
        if not changes:
            return self.live
        live = live_view(self.view, changes[0].was or changes[0].table)
        if isinstance(live, AggregateView):
            finished(live.opening(rows_before(self.channel.state.rows, changes).values()))
        return live

    def _new_ring(self) -> Ring:
        settings = self.channel.settings
        size = settings.ring_bytes if self.view.id == WHOLE else min(_FILTER_RING_BYTES, settings.ring_bytes)
        return Ring(self.head, max_frames=settings.ring_frames, max_bytes=size)


class Channel:
    """One table, its views and their subscribers.

    Args:
        state: the table's rows, changed by its tail in the same thread.
        codecs: wire forms in which the whole table is kept from the start.
        spec: the declared channel.
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
        self.interval_ms: float | None = None  # moving average between commits with events
        self._history: deque[TableChange] = deque()
        self._history_rows = 0
        self._added: deque[tuple[int, int]] = deque(maxlen=_HISTORY)  # commits: when, and how many events
        self._views: dict[tuple[object, ...], SubscriberView] = {}
        whole = ViewStream(SubscriberView(), self)
        for codec in codecs:
            whole.wire_channel(codec)
        self.streams: dict[bytes, ViewStream] = {WHOLE: whole}

    @property
    def name(self) -> str:
        return self.state.table.name

    @property
    def seen(self) -> TableInfo:
        """The table with the columns that subscribers may see."""
        return visible(self.state.table, self.spec)

    def view(self, request: SubscribeRequest, guard: str) -> SubscriberView:
        """The view for a request under the condition ``guard``, shared by all that ask alike. Raises FilterError."""
        if not (request.where or request.columns or request.select or guard or self.spec.narrows):
            return self.streams[WHOLE].view
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
        return sum(len(stream.members()) for stream in self.streams.values())

    def events_per_s(self, now_ms: int) -> float:
        """Events that commits of the last ten seconds have added, a second."""
        return sum(events for at, events in self._added if at > now_ms - _RATE_MS) * 1_000 / _RATE_MS

    def remember(self, change: TableChange) -> None:
        """Keep a change for views that come later, and update the average interval between changes."""
        self._added.append((change.facts.committed_at, change.facts.events))
        if self._history and change.facts.events:
            pause = max(0, change.facts.committed_at - self._history[-1].facts.committed_at)
            self.interval_ms = pause if self.interval_ms is None else 0.8 * self.interval_ms + 0.2 * pause
        self._history.append(change)
        self._history_rows += len(change.upserts) + len(change.deletes)
        while len(self._history) > _HISTORY or (self._history_rows > _HISTORY_ROWS and len(self._history) > 1):
            dropped = self._history.popleft()
            self._history_rows -= len(dropped.upserts) + len(dropped.deletes)

    def since(self, version: int) -> list[TableChange] | None:
        """Changes after a version up to the newest; None if some are no longer kept."""
        if version == self.state.version:
            return []
        if not self._history or self._history[0].version > version + 1 or version > self.state.version:
            return None
        return [change for change in self._history if change.version > version]

    def restarted(self, state: TableState) -> None:
        """The table was replaced."""
        self.state = state
        self.interval_ms = None
        self._history.clear()
        self._history_rows = 0


def live_view(view: SubscriberView, table: TableInfo) -> LiveView:
    """The view at work on a table. An aggregate must still be opened with the rows. Raises FilterError."""
    return AggregateView(view, table) if view.select else RowsView(view, table)


def opened_view(view: SubscriberView, state: TableState) -> Generator[None, None, LiveView]:
    """The view at work on a state, with all of its rows, in steps of a few milliseconds. Raises FilterError."""
    live = live_view(view, state.table)
    if isinstance(live, AggregateView):
        yield from live.opening(list(state.rows.values()))
    return live


def rows_in_order(
    live: LiveView, rows: Mapping[Key, Row], limit: int | None = None
) -> Generator[None, None, list[tuple[Row, bytes]]]:
    """The view's rows in the order of their keys, each with its JSON, in steps of a few milliseconds."""
    waiting = live.source(rows)
    runs: list[list[tuple[Key, Row]]] = []
    for start in range(0, len(waiting), SLICE_ROWS):
        runs.append(sorted(live.rows(waiting[start : start + SLICE_ROWS]), key=_by_key))
        yield
    ordered = islice(heapq.merge(*runs, key=_by_key), limit)
    found: list[tuple[Row, bytes]] = []
    while some := [row for _, row in islice(ordered, SLICE_ROWS)]:
        found += zip(some, encode_rows(live.table.columns, some), strict=True)
        yield
    return found


def finished(steps: Generator[None, None, _T]) -> _T:
    """The result of work in steps, done at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result


def _by_key(pair: tuple[Key, Row]) -> tuple[object, ...]:
    return in_order(pair[0])


def channels_of(pipeline: Pipeline) -> dict[str, ChannelSpec]:
    """The declared channels of products and views. Raises ConfigError: a condition is not SQL, or not allowed in
    filters. Its columns are checked when the table is known (:func:`visible`, :func:`view_of`).
    """
    found = {name: product.channel for name, product in pipeline.products.items()}
    found |= {name: view.channel for name, view in pipeline.views.items()}
    for name, spec in found.items():
        try:
            if spec.where:
                checked(spec.where)
        except FilterError as error:
            raise ConfigError(
                str(error),
                key=f"products.{name}.channel.where",
                remedy="docs/reference/protocol.md lists what a filter may hold",
                file=pipeline.path,
                line=line_of(pipeline.path, f"products.{name}.channel"),
            ) from None
    return found


def visible(table: TableInfo, spec: ChannelSpec) -> TableInfo:
    """The table with the columns that subscribers may see. Raises FilterError if one is missing."""
    if not spec.columns:
        return table
    known = Columns.of(table)
    seen, _ = table.narrowed({known.resolve(name) for name in spec.columns} | set(table.key))
    return seen


def view_of(table: TableInfo, request: SubscribeRequest, guard: str, spec: ChannelSpec = EVERYTHING) -> SubscriberView:
    """The view for a request: a filter, columns, or a SELECT of rows or of an aggregate, on visible columns only.

    ``guard`` is its principal's condition, on any column. Raises FilterError: the request is refused, or ``spec``, the
    declared channel, does not fit the table.
    """
    seen = visible(table, spec)
    known = Columns.of(table)
    both = conjunction(*(parse_condition(text, known) for text in (spec.where, guard)))
    guard = "" if both is None else both.sql("duckdb")
    if request.select and request.columns:
        raise FilterError("columns and select are two ways to say the same", "Give one of them")
    asked, where = request.columns, request.where
    if request.select:
        plain = rows_of_select(request.select, seen)
        if plain is None:
            return aggregate_view(table, request.select, where, guard, seen)
        asked = tuple(plain[0])
        both = conjunction(*(parse_condition(text, Columns.of(seen)) for text in (where, plain[1])))
        where = "" if both is None else both.sql("duckdb")
    return rows_view(table, where, asked or (seen.columns if spec.columns else ()), guard, seen)
