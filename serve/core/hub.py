"""The hub: who gets which bytes, without I/O. Events go in, deliveries come out; the clock is an argument.

Times called ``now`` are milliseconds of a clock that never goes back; ``at`` is milliseconds since the epoch.

Nothing is queued per subscriber. A live one gets a frame's bytes as they are. One that trails reads the shared ring as
its socket drains. One that falls off the ring is told and gets a snapshot. One that shows no sign of reading is told,
then cut.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from lakehouse.contract.settings import ServeSettings
from serve.core import messages
from serve.core.channel import INLINE_ROWS, Channel, ViewStream
from serve.core.messages import Codec, Message
from serve.core.model import Principal, SubscribeRequest, TableChange, no_such_table
from serve.core.position import WHOLE, Position, Seal
from serve.core.ring import HubCounters, Outgoing, Subscriber, WireChannel
from serve.core.view import SubscriberView
from serve.errors import FilterError, RequestError
from serve.tables.state import TableState

log = logging.getLogger(__name__)

SLICE_BYTES = 131_072  # most that a trailing subscriber gets at once
MAX_WINDOW = 10_000
TOO_SLOW = 4408
LINGER_MS = 30_000  # an unused view is kept up to date for a while: its subscribers may come back
SNAPSHOT_MS = 30_000  # life of a filter's snapshot, for others that ask alike
# How long a ping and its pong may take. Then nothing more is written to a subscriber that has not answered: filling a
# stopped reader's socket would cost the others the time to write.
SILENT_MS = 1_000
SLICE = 100  # heartbeats at a time: about 1 ms, and as much again for the pongs
SPREAD = 2  # all are sent within this fraction (1/2) of the pause between heartbeats


class Hub:
    """All channels of one process.

    Args:
        codecs: wire forms in which whole tables are kept from the start; others are added when somebody asks for them.
        working: called when there is work for :meth:`work`.
        specs: declared channels by table; others may be set while a table is not open.
    """

    def __init__(
        self,
        settings: ServeSettings,
        codecs: Iterable[Codec],
        seal: Seal,
        working: Callable[[], None] = lambda: None,
        specs: Mapping[str, ChannelSpec] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.seal = seal
        self.specs = specs
        self.size = 0
        self.channels: dict[str, Channel] = {}
        self.followed: Counter[tuple[str, ViewStream]] = Counter()  # subscribers, by tenant and view
        self.counters = HubCounters()
        self._codecs = tuple(codecs)
        self._working = working
        self._now = 0.0  # of the current event
        self._busy: deque[ViewStream] = deque()  # with long work
        self._owed: list[Outgoing] = []  # made where they could not be returned
        self._beat_at = float("-inf")
        self._beats: Iterator[tuple[ViewStream, WireChannel, Sequence[Subscriber]]] | None = None  # rest of this round
        self._beaten = 0  # heartbeats sent in this round

    # Events from tables

    def table_opened(self, state: TableState, detail: str) -> list[Outgoing]:
        """A table is there, or was replaced: then its subscribers get ``expired`` with ``detail`` and a snapshot."""
        channel = self.channels.get(state.table.name)
        if channel is None:
            spec = self.specs.get(state.table.name, EVERYTHING)
            self.channels[state.table.name] = Channel(state, self._codecs, self.settings, self.seal, spec)
            return []
        channel.restarted(state)
        deliveries: list[Outgoing] = []
        for stream in list(channel.streams.values()):
            try:
                stream.restarted()
            except FilterError as error:
                deliveries += self._drop(stream, error)
                continue
            members = stream.members()
            for subscriber in members:
                self._start_over(subscriber, "log", detail or "the table was replaced")
            if members:
                deliveries.append(Outgoing(tuple(members), wake=True))
        return deliveries

    def table_closed(self, name: str, why: RequestError) -> list[Outgoing]:
        """A table cannot be served any more as it was: its subscribers are told why, and closed."""
        channel = self.channels.pop(name, None)
        streams = [] if channel is None else list(channel.streams.values())
        return [delivery for stream in streams for delivery in self._ended(stream, why)]

    def change_received(self, change: TableChange, now: float) -> Iterator[Outgoing]:
        """A commit: its bytes go to live subscribers.

        Deliveries are made one view at a time as they are consumed, so the first view does not wait for a thousand
        others. Consume all of them before the next event.
        """
        self._now = now
        channel = self.channels[change.table.name]
        channel.remember(change)
        return self._caught_up([stream for stream in channel.streams.values() if stream.opened], change)

    def _caught_up(self, streams: list[ViewStream], change: TableChange) -> Iterator[Outgoing]:
        for stream in streams:
            yield from self._catch_up(stream)
        change.settle()

    def work(self, now: float) -> list[Outgoing]:
        """Do a few milliseconds of long work, such as the snapshot of a large table; see :attr:`working`."""
        self._now = now
        if self._owed:
            owed, self._owed = self._owed, []
            return owed
        if not self._busy:
            return []
        stream = self._busy.popleft()
        deliveries = self._step(stream)
        if stream.work is not None:
            self._busy.append(stream)
        return deliveries

    @property
    def working(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._busy or self._owed)

    # Events from subscribers

    def view_of(self, table: str, principal: Principal, request: SubscribeRequest) -> SubscriberView:
        """What a principal sees with this request: the one place where its rights are applied. Raises RequestError."""
        principal.check_table(table)
        channel = self.channels.get(table)
        if channel is None:
            raise no_such_table(table)
        try:
            return channel.view(request, principal.condition(table))
        except FilterError as error:
            raise RequestError(RequestError.BAD_REQUEST, "bad_filter", str(error)) from None

    def subscribed(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> Position | None:
        """A subscriber asks for a table, from a position or with a snapshot first.

        Returns None if it can be sent to. A position: the ring does not reach back to it, so replay what comes after it
        from the log, then call :meth:`replay_received`.

        Raises RequestError: no such table, too many subscribers or filters, or a refused filter.
        """
        self._now = now
        view = self.view_of(request.table, subscriber.principal, request)
        if self.size >= self.settings.max_subscribers:
            self.counters.refused += 1
            raise RequestError(RequestError.FULL, "full", f"{self.size} subscribers are connected, which is the bound")
        if not 0 <= request.window <= MAX_WINDOW:
            raise RequestError(RequestError.BAD_REQUEST, "bad_request", f"window is 1 to {MAX_WINDOW}")
        stream = self._stream(request.table, view)
        subscriber.conflate, subscriber.window = request.conflate, request.window
        self.size += 1
        self.counters.subscribed += 1
        self._enter(subscriber, stream)
        return self._begins(subscriber, stream, request.position)

    def refiltered(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> None:
        """It wants other rows or columns: ``expired``, then a snapshot. Raises RequestError; the old filter stays."""
        self._now = now
        stream = subscriber.stream
        if stream is None:
            raise RequestError(RequestError.BAD_REQUEST, "bad_message", "there is no subscription yet")
        table = stream.channel.name
        other = self._stream(table, self.view_of(table, subscriber.principal, request))
        self._exit(subscriber)
        self._enter(subscriber, other)
        self._start_over(subscriber, "filter", "the filter was changed")

    def unsubscribed(self, subscriber: Subscriber) -> None:
        """The connection is gone."""
        if subscriber.stream is not None:
            self._exit(subscriber)
            self.size -= 1

    def replay_received(self, subscriber: Subscriber, start: Position, rebuilt: Sequence[Message], now: float) -> None:
        """Messages after ``start``, rebuilt from the log; they go out before anything else.

        The ring keeps those that it has room for. ``subscriber.replaying`` is False once the ring reaches back far
        enough.
        """
        wire_channel = subscriber.wire_channel
        assert wire_channel is not None
        frames = wire_channel.prepend(start, rebuilt, now)
        subscriber.backlog.extend((frame.data, frame.position) for frame in frames)
        self._joins(subscriber, frames[-1].position if frames else start)

    def replay_failed(self, subscriber: Subscriber, detail: str) -> None:
        """The log does not reach back to the position: a snapshot follows."""
        self._start_over(subscriber, "log", detail)

    def paused(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes no more for now."""
        if subscriber.wire_channel is None:
            return
        subscriber.paused = True
        if subscriber.waiting_since is None:
            subscriber.waiting_since = now
        if subscriber.live:
            subscriber.wire_channel.falls_behind(subscriber)

    def drained(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes more: ask :meth:`data_to_send`."""
        subscriber.paused = False
        self.heard_from(subscriber, now)

    def heard_from(self, subscriber: Subscriber, now: float) -> bool:
        """A sign that it reads: a pong, or a shrunken buffer. True if it was silent: ask :meth:`data_to_send`."""
        was_silent, subscriber.silent = subscriber.silent, False
        subscriber.waiting_since = now if subscriber.paused else None
        if (subscriber.live or subscriber.idle) and subscriber.acked is None:
            subscriber.told_slow = False
        return was_silent

    def acknowledged(self, subscriber: Subscriber, position: Position) -> bool:
        """It has processed everything up to ``position``; one that the ring does not hold is ignored.

        Returns whether its window now takes more: ask :meth:`data_to_send`.
        """
        wire_channel = subscriber.wire_channel
        if wire_channel is None:
            return False
        processed = bisect_right(subscriber.unacked, position)
        del subscriber.unacked[:processed]
        cursor = wire_channel.ring.find(position)
        if cursor is not None:
            subscriber.acked = max(cursor, subscriber.acked or cursor)
            if cursor == wire_channel.ring.next:
                subscriber.told_slow = False
        return processed > 0

    def reached(self, subscriber: Subscriber) -> Position | None:
        """Position that the bytes handed out bring it to; None in the middle of a snapshot."""
        if subscriber.live and subscriber.wire_channel is not None:
            return subscriber.wire_channel.ring.head
        return subscriber.at

    def behind(self, subscriber: Subscriber, now: float) -> tuple[int, float]:
        """Messages in the ring that it has not been handed yet, and the age of the first of them in ms."""
        if subscriber.live or subscriber.wire_channel is None:
            return 0, 0.0
        ring, cursor = subscriber.wire_channel.ring, subscriber.cursor
        if cursor >= ring.next:
            return 0, 0.0
        return ring.next - cursor, now - ring.frame(max(cursor, ring.first)).at

    def data_to_send(self, subscriber: Subscriber) -> bytes:
        """The next bytes for a subscriber whose socket takes some.

        Empty if it has everything, its window is full, it is silent, or its next bytes are being made (it will be
        woken).
        """
        while (wire_channel := subscriber.wire_channel) is not None and not (subscriber.live or subscriber.silent):
            if subscriber.backlog:
                data = self._from_backlog(subscriber)
            elif subscriber.snapshot is not None:
                data = self._from_snapshot(subscriber, wire_channel)
            elif subscriber.replaying or (subscriber.stream is not None and subscriber in subscriber.stream.waiting):
                return b""
            elif subscriber.room != 0 and subscriber.cursor < wire_channel.ring.first:
                lost = wire_channel.ring.first - subscriber.cursor
                self._start_over(subscriber, "lagged", f"{lost} messages behind what the server keeps")
                data = b""
            else:
                data = self._from_ring(subscriber, wire_channel)
            if data is None:
                return b""
            if data:
                self.counters.bytes += len(data)
                return data
        return b""

    def _from_backlog(self, subscriber: Subscriber) -> bytes | None:
        """What goes out before anything else; None if its window is full."""
        taken: list[bytes] = []
        sent: list[Position] = []
        size = 0
        for data, position in subscriber.backlog:
            full = subscriber.window and position is not None and len(sent) >= (subscriber.room or 0)
            if full or (taken and size + len(data) > SLICE_BYTES):
                break
            taken.append(data)
            size += len(data)
            if position is not None:
                sent.append(position)
        del subscriber.backlog[: len(taken)]
        self.counters.messages += len(taken)
        subscriber.sent(sent)
        return b"".join(taken) if taken else None

    def _from_snapshot(self, subscriber: Subscriber, wire_channel: WireChannel) -> bytes:
        snapshot = subscriber.snapshot
        assert snapshot is not None
        data = snapshot.frame(wire_channel.codec, subscriber.parts)
        subscriber.parts += 1
        self.counters.messages += 1
        if subscriber.parts == len(snapshot.messages):
            subscriber.snapshot = None
            subscriber.at = snapshot.position
        return data

    def _from_ring(self, subscriber: Subscriber, wire_channel: WireChannel) -> bytes | None:
        """Frames from its cursor on, which the ring must hold; None if it has everything or its window is full."""
        room = subscriber.room
        if room == 0:
            return None
        if subscriber.cursor == wire_channel.ring.next:
            if not subscriber.paused and not subscriber.idle:
                wire_channel.has_everything(subscriber)
            return None
        if subscriber.conflate and (both := wire_channel.merge(subscriber.cursor)) is not None:
            data, subscriber.cursor = both
            self.counters.messages += 1
            self.counters.conflated += 1
            subscriber.sent([wire_channel.ring.frame(subscriber.cursor - 1).position])
            return data
        frames = wire_channel.ring.frames(subscriber.cursor, SLICE_BYTES, room)
        subscriber.cursor += len(frames)
        self.counters.messages += len(frames)
        subscriber.sent([frame.position for frame in frames if frame.data])
        return b"".join([frame.data for frame in frames])

    # The clock

    def tick(self, now: float, at: int) -> list[Outgoing]:
        """Send due heartbeats, warn and cut slow subscribers, drop unused views."""
        self._now = now
        deliveries: list[Outgoing] = []
        for stream, wire_channel in self._wire_channels():
            for subscriber in _suspects(wire_channel):
                deliveries += self._checked(subscriber, wire_channel, now)
            _tidy(stream, now)
        deliveries += self.beat(now, at)
        return deliveries

    def beat(self, now: float, at: int) -> list[Outgoing]:
        """The heartbeats that are due, some at a time, so that a change never waits for all of them and their pongs.

        Call it again after some 20 ms while :attr:`beating`.
        """
        if self._beats is None:
            if now - self._beat_at < self.settings.heartbeat_ms:
                return []
            self._beat_at, self._beaten = now, 0
            self._beats = self._slices()
        deliveries: list[Outgoing] = []
        due = self.size * SPREAD * (now - self._beat_at) / self.settings.heartbeat_ms
        most = max(self._beaten + SLICE, due)
        while self._beaten < most:
            if (some := next(self._beats, None)) is None:
                self._beats = None
                break
            self._beaten += len(some[2])
            deliveries += _beats(*some, now, at)
        return deliveries

    @property
    def beating(self) -> bool:
        """Whether a round of heartbeats is under way."""
        return self._beats is not None

    def waiting(self) -> Iterator[Subscriber]:
        """Subscribers whose socket takes no more. Report a shrunken buffer by :meth:`heard_from`."""
        for _, wire_channel in self._wire_channels():
            yield from [subscriber for subscriber in wire_channel.trailing if subscriber.paused]

    def _wire_channels(self) -> Iterator[tuple[ViewStream, WireChannel]]:
        for channel in list(self.channels.values()):
            for stream in list(channel.streams.values()):
                for wire_channel in list(stream.wire_channels.values()):
                    yield stream, wire_channel

    def _slices(self) -> Iterator[tuple[ViewStream, WireChannel, Sequence[Subscriber]]]:
        """All subscribers, some at a time, as they are when the heartbeat reaches their wire channel."""
        for stream, wire_channel in self._wire_channels():
            members = wire_channel.members()
            for start in range(0, len(members), SLICE):
                yield stream, wire_channel, members[start : start + SLICE]

    def _checked(self, subscriber: Subscriber, wire_channel: WireChannel, now: float) -> Iterator[Outgoing]:
        """The messages or the close that are due to one subscriber."""
        waited = 0.0 if subscriber.waiting_since is None else now - subscriber.waiting_since
        if waited >= self.settings.cut_after_ms:
            self.counters.cut += 1
            log.warning("%s: cut, it has read nothing for %.0f ms", subscriber.label, waited)
            yield Outgoing((subscriber,), close=TOO_SLOW, reason=f"nothing read for {waited:.0f} ms")
            return
        if subscriber.live and waited >= SILENT_MS:
            wire_channel.falls_behind(subscriber)
            subscriber.silent = True
        behind, behind_ms = _behind(subscriber, wire_channel, now, waited)
        if behind_ms >= self.settings.slow_after_ms and not subscriber.told_slow:
            subscriber.told_slow = True
            self.counters.slow += 1
            log.info("%s: slow, %d messages and %.0f ms behind", subscriber.label, behind, behind_ms)
            cut_in = self.settings.cut_after_ms - waited
            name = "" if subscriber.stream is None else subscriber.stream.channel.name
            message = messages.slow(name, behind, int(behind_ms), int(cut_in))
            yield Outgoing((subscriber,), subscriber.codec.frame(message))

    # Parts

    def _enter(self, subscriber: Subscriber, stream: ViewStream) -> None:
        subscriber.stream = stream
        self.followed[subscriber.principal.tenant, stream] += 1
        stream.empty_since = None
        stream.wire_channel(subscriber.codec, conflates=subscriber.conflate).join(subscriber)

    def _exit(self, subscriber: Subscriber) -> None:
        assert subscriber.stream is not None and subscriber.wire_channel is not None
        whose = subscriber.principal.tenant, subscriber.stream
        self.followed[whose] -= 1
        if not self.followed[whose]:
            del self.followed[whose]
        subscriber.wire_channel.leave(subscriber)
        subscriber.stream.waiting.discard(subscriber)
        subscriber.stream = None
        subscriber.forget()

    def _begins(self, subscriber: Subscriber, stream: ViewStream, position: Position | None) -> Position | None:
        if not stream.opened:
            self._begin(stream)
        if position is None:
            self._give_snapshot(subscriber, stream)
        elif position.table_id != stream.channel.state.table.table_id:
            self._start_over(subscriber, "log", "the position is of another table of this name")
        elif position.view != stream.view.id:
            self._start_over(subscriber, "filter", "the position is of another filter or other columns")
        else:
            self.counters.resumed += 1
            told = messages.resumed(stream.live.table, position, self.seal, stream.view.description)
            subscriber.backlog.append((subscriber.codec.frame(told), None))
            subscriber.at = position
            return None if self._joins(subscriber, position) else position
        return None

    def _joins(self, subscriber: Subscriber, position: Position) -> bool:
        """Whether the ring holds the position, from which the subscriber then reads."""
        stream, wire_channel = subscriber.stream, subscriber.wire_channel
        assert stream is not None and wire_channel is not None
        cursor = wire_channel.ring.find(position)
        if cursor is None and stream.backfill(wire_channel, position, self._now):
            cursor = wire_channel.ring.find(position)
        subscriber.replaying = cursor is None
        if cursor is not None:
            subscriber.cursor = cursor
        return cursor is not None

    # Views

    def filters(self) -> int:
        """Number of distinct views, whole tables not counted."""
        return sum(len(channel.streams) - 1 for channel in self.channels.values())

    def _stream(self, table: str, view: SubscriberView) -> ViewStream:
        channel = self.channels[table]
        stream = channel.streams.get(view.id)
        if stream is None:
            if self.filters() >= self.settings.max_filters and not self._evicted():
                self.counters.refused += 1
                problem = f"{self.settings.max_filters} filters are in use, which is the bound"
                raise RequestError(RequestError.FULL, "full", problem)
            stream = channel.streams[view.id] = ViewStream(view, channel)
        return stream

    def _evicted(self) -> bool:
        for channel in self.channels.values():
            for ident, stream in channel.streams.items():
                if ident != WHOLE and not stream.members():
                    del channel.streams[ident]
                    return True
        return False

    def _drop(self, stream: ViewStream, error: FilterError) -> list[Outgoing]:
        """Drop a view that no longer fits its table, or fails."""
        log.warning("%s: a filter is dropped: %s", stream.channel.name, error, exc_info=error.__cause__)
        stream.channel.streams.pop(stream.view.id, None)
        return self._ended(stream, RequestError(RequestError.BAD_REQUEST, "bad_filter", str(error)))

    def _ended(self, stream: ViewStream, why: RequestError) -> list[Outgoing]:
        """End a stream: its subscribers are told and closed."""
        stream.work, stream.ended = None, why
        deliveries = []
        for wire_channel in stream.wire_channels.values():
            if members := wire_channel.members():
                told = wire_channel.codec.frame(messages.error(why.code, why.detail))
                deliveries.append(Outgoing(members, told, close=why.close, reason=why.detail))
        return deliveries

    def _catch_up(self, stream: ViewStream) -> list[Outgoing]:
        """Apply every change that the stream has not taken yet, ordinarily one."""
        missed = stream.channel.since(stream.version)
        deliveries: list[Outgoing] = []
        try:
            if missed is None:  # it missed more changes than are kept: start over
                stream.restarted()
                for subscriber in stream.members():
                    self._start_over(subscriber, "lagged", "the table changed faster than the view of it was made")
            for change in missed or ():
                for name, data in stream.apply_change(change, self._now).items():
                    wire_channel = stream.wire_channels[name]
                    if wire_channel.live and data:
                        self.counters.messages += len(wire_channel.live)
                        self.counters.bytes += len(wire_channel.live) * len(data)
                        deliveries.append(Outgoing(wire_channel.listed(), data))
                    if wire_channel.idle:
                        deliveries.append(Outgoing(tuple(wire_channel.idle), wake=True))
                        for subscriber in tuple(wire_channel.idle):
                            wire_channel.trails(subscriber)
        except FilterError as error:
            return [*deliveries, *self._drop(stream, error)]
        return deliveries

    def _begin(self, stream: ViewStream) -> None:
        """Start a snapshot; that of a small table is finished at once."""
        if stream.ended is not None:
            return
        deliveries: list[Outgoing] = []
        try:
            stream.begin(self._now)
        except FilterError as error:
            deliveries = self._drop(stream, error)
        if len(stream.channel.state.rows) <= INLINE_ROWS and len(stream.waiting) <= 1:
            while stream.work is not None:
                deliveries = self._step(stream)
        if stream.ended is not None:
            self._owed += deliveries
            self._working()
        elif stream.work is not None and stream not in self._busy:
            self._busy.append(stream)
            self._working()

    def _step(self, stream: ViewStream) -> list[Outgoing]:
        if stream.work is None:
            return []
        try:
            done = stream.run_slice()
        except FilterError as error:
            return self._drop(stream, error)
        if not done:
            return self._catch_up(stream) if stream.opened else []
        waiting = tuple(stream.waiting)
        stream.waiting.clear()
        for subscriber in waiting:
            self._give_snapshot(subscriber, stream, made=True)
        return [Outgoing(waiting, wake=True)] if waiting else []

    def _give_snapshot(self, subscriber: Subscriber, stream: ViewStream, *, made: bool = False) -> None:
        """Give it the last snapshot, or the next. A snapshot just made is used even if changes came meanwhile."""
        wire_channel = subscriber.wire_channel
        assert wire_channel is not None
        snapshot = stream.usable_snapshot(wire_channel, made=made)
        if snapshot is None:
            stream.waiting.add(subscriber)
            self._begin(stream)
            return
        cursor = wire_channel.ring.find(snapshot.position)
        assert cursor is not None, "a snapshot is of a position in the ring"
        self.counters.snapshots += 1
        subscriber.snapshot, subscriber.parts, subscriber.cursor = snapshot, 0, cursor
        subscriber.at = None

    def _start_over(self, subscriber: Subscriber, reason: str, detail: str) -> None:
        stream, wire_channel = subscriber.stream, subscriber.wire_channel
        assert stream is not None and wire_channel is not None
        self.counters.expired[reason] += 1
        log.info("%s: expired (%s): %s", subscriber.label, reason, detail)
        wire_channel.trails(subscriber)
        subscriber.forget()
        stream.waiting.discard(subscriber)
        told = messages.expired(stream.channel.name, reason, detail)
        subscriber.backlog.append((subscriber.codec.frame(told), None))
        self._give_snapshot(subscriber, stream)


def _suspects(wire_channel: WireChannel) -> list[Subscriber]:
    """Subscribers to be checked: not those that have everything and owe no answer."""
    live = [each for each in wire_channel.live if each.waiting_since is not None or each.acked is not None]
    return [*live, *wire_channel.idle, *wire_channel.trailing]


def _beats(
    stream: ViewStream, wire_channel: WireChannel, members: Sequence[Subscriber], now: float, at: int
) -> Iterator[Outgoing]:
    """Heartbeats to members that have everything, or as much as their window takes; the wait for an answer begins."""
    groups: dict[int, list[Subscriber]] = {}
    for subscriber in members:
        has_everything = subscriber.live or subscriber.idle
        held = (subscriber.room == 0 or subscriber.silent) and not subscriber.paused  # held back by its window or by us
        if subscriber.wire_channel is not wire_channel or not (has_everything or held):
            continue
        if subscriber.waiting_since is None and wire_channel.codec.answers:
            subscriber.waiting_since = now
            subscriber.asked_at = wire_channel.ring.next
        unread = wire_channel.ring.next if has_everything else subscriber.cursor
        behind = wire_channel.ring.next - (unread if subscriber.acked is None else subscriber.acked)
        groups.setdefault(behind, []).append(subscriber)
    if groups:
        channel = stream.channel
        token = channel.seal.token(stream.head)
        for behind, group in groups.items():
            message = messages.heartbeat(channel.name, token, behind, channel.state.facts.newest_at, at)
            yield Outgoing(tuple(group), wire_channel.codec.heartbeat(message))


def _tidy(stream: ViewStream, now: float) -> None:
    """Drop a view that had no subscribers for a while, and filters' snapshots that nobody asked for."""
    if stream.view.id == WHOLE:
        return
    if stream.snapshot is not None and now - stream.snapshot.at >= SNAPSHOT_MS:
        stream.snapshot = None
    if any(each.live or each.idle or each.trailing for each in stream.wire_channels.values()):
        return
    if stream.empty_since is None:
        stream.empty_since = now
    elif now - stream.empty_since >= LINGER_MS:
        stream.work = None
        stream.channel.streams.pop(stream.view.id, None)


def _behind(subscriber: Subscriber, wire_channel: WireChannel, now: float, waited: float) -> tuple[int, float]:
    """Messages that it is behind, and the age of the first of them in ms."""
    ring = wire_channel.ring
    has_everything = subscriber.live or subscriber.idle
    if subscriber.acked is not None:
        cursor = subscriber.acked
    elif has_everything or subscriber.silent:
        return max(0, ring.next - subscriber.asked_at), waited
    else:
        cursor = subscriber.cursor
    if not subscriber.replaying and cursor < ring.next:
        waited = max(waited, now - ring.frame(max(cursor, ring.first)).at)
    return max(0, ring.next - cursor), waited
