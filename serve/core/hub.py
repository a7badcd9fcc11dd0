"""The hub: who gets which bytes, without I/O. Events go in, deliveries come out; the clock is an argument.

Times called ``now`` are milliseconds of a clock that never goes back; ``at`` is milliseconds since the epoch.

Nothing is queued per subscriber. A live one gets a frame's bytes as they are. One that trails reads the shared ring as
its socket drains. One that falls off the ring is told and gets a snapshot. One that shows no sign of reading is told,
then cut (:mod:`serve.core.heartbeats`). :mod:`serve.core.streams` makes what is shared by many.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from lakehouse.contract.channel import ChannelSpec
from lakehouse.contract.settings import ServeSettings
from serve.core import heartbeats, messages
from serve.core.channel import ViewStream
from serve.core.codec import Codec
from serve.core.messages import Message
from serve.core.model import SubscribeRequest, TableChange
from serve.core.position import Position, Seal
from serve.core.ring import WireChannel
from serve.core.streams import ViewStreams
from serve.core.subscriber import HubCounters, Outgoing, Subscriber
from serve.errors import FilterError, RequestError
from serve.security.access import Principal
from serve.tables.state import TableState
from serve.views.view import SubscriberView

SLICE_BYTES = 131_072  # most that a trailing subscriber gets at once


MAX_WINDOW = 10_000


def _from_backlog(subscriber: Subscriber, counters: HubCounters) -> bytes | None:
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
    counters.messages += len(taken)
    subscriber.sent(sent)
    return b"".join(taken) if taken else None


def _from_snapshot(subscriber: Subscriber, wire_channel: WireChannel, counters: HubCounters) -> bytes:
    snapshot = subscriber.snapshot
    assert snapshot is not None
    data = snapshot.frame(wire_channel.codec, subscriber.parts)
    subscriber.parts += 1
    counters.messages += 1
    if subscriber.parts == len(snapshot.messages):
        subscriber.snapshot = None
        subscriber.at = snapshot.position
    return data


def _from_ring(subscriber: Subscriber, wire_channel: WireChannel, counters: HubCounters) -> bytes | None:
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
        counters.messages += 1
        counters.conflated += 1
        subscriber.sent([wire_channel.ring.frame(subscriber.cursor - 1).position])
        return data
    frames = wire_channel.ring.frames(subscriber.cursor, SLICE_BYTES, room)
    subscriber.cursor += len(frames)
    counters.messages += len(frames)
    subscriber.sent([frame.position for frame in frames if frame.data])
    return b"".join([frame.data for frame in frames])


class Hub:
    """All channels of one process.

    Args:
        settings: bounds and times.
        codecs: wire forms in which whole tables are kept from the start; others are added when somebody asks for them.
        seal: writes and reads positions.
        working: called when there is work for :meth:`work`.
        specs: declared channels by table.
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
        self.size = 0
        self.streams = ViewStreams(settings, codecs, seal, working, specs)
        self.channels = self.streams.channels
        self.counters = self.streams.counters
        self._beat_at = float("-inf")
        self._beats: Iterator[heartbeats.HeartbeatSlice] | None = None  # rest of the current round of heartbeats
        self._beaten = 0  # heartbeats sent in this round

    # Events from tables

    def table_opened(self, state: TableState, detail: str) -> list[Outgoing]:
        """A table is there, or was replaced: then its subscribers get ``expired`` with ``detail`` and a snapshot."""
        channel = self.channels.get(state.table.name)
        if channel is None:
            self.streams.open(state)
            return []
        channel.restarted(state)
        deliveries: list[Outgoing] = []
        for stream in list(channel.streams.values()):
            try:
                stream.restarted()
            except FilterError as error:
                deliveries += self.streams.drop(stream, error)
                continue
            members = stream.members()
            for subscriber in members:
                self.streams.start_over(subscriber, "log", detail or "the table was replaced")
            if members:
                deliveries.append(Outgoing(tuple(members), wake=True))
        return deliveries

    def table_closed(self, name: str, problem: str) -> list[Outgoing]:
        """A table cannot be served any more: its subscribers get ``not_served`` and are closed."""
        return self.streams.close(name, problem)

    def change_received(self, change: TableChange, now: float) -> Iterator[Outgoing]:
        """A commit: its bytes go to live subscribers.

        Deliveries are made one view at a time as they are consumed, so the first view does not wait for a thousand
        others. Consume all of them before the next event.
        """
        self.streams.now = now
        channel = self.channels[change.table.name]
        channel.remember(change)
        return self._caught_up([stream for stream in channel.streams.values() if stream.opened], change)

    def _caught_up(self, streams: list[ViewStream], change: TableChange) -> Iterator[Outgoing]:
        for stream in streams:
            yield from self.streams.catch_up(stream)
        change.settle()

    def work(self, now: float) -> list[Outgoing]:
        """Do a few milliseconds of long work, such as the snapshot of a large table; see :attr:`working`."""
        self.streams.now = now
        return self.streams.work()

    @property
    def working(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return self.streams.busy

    # Events from subscribers

    def view_of(self, table: str, principal: Principal, request: SubscribeRequest) -> SubscriberView:
        """See :meth:`serve.core.streams.ViewStreams.view_of`."""
        return self.streams.view_of(table, principal, request)

    def subscribed(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> Position | None:
        """A subscriber asks for a table, from a position or with a snapshot first.

        Returns:
            None: it can be sent to. A position: the ring does not reach back to it. Replay the changes after it from
                the log, then call :meth:`replay_received`.

        Raises:
            RequestError: no such table, too many subscribers or filters, or a refused filter.
        """
        self.streams.now = now
        view = self.view_of(request.table, subscriber.principal, request)
        if self.size >= self.settings.max_subscribers:
            self.counters.refused += 1
            raise RequestError(RequestError.FULL, "full", f"{self.size} subscribers are connected, which is the bound")
        if not 0 <= request.window <= MAX_WINDOW:
            raise RequestError(RequestError.BAD_REQUEST, "bad_request", f"window is 1 to {MAX_WINDOW}")
        stream = self.streams.stream(request.table, view)
        subscriber.conflate, subscriber.window = request.conflate, request.window
        self.size += 1
        self.counters.subscribed += 1
        self._enter(subscriber, stream)
        return self._begins(subscriber, stream, request.position)

    def refiltered(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> None:
        """It wants other rows or columns: ``expired``, then a snapshot.

        Raises RequestError; then the old filter stays.
        """
        self.streams.now = now
        stream = subscriber.stream
        if stream is None:
            raise RequestError(RequestError.BAD_REQUEST, "bad_message", "there is no subscription yet")
        other = self.streams.stream(
            stream.channel.name, self.view_of(stream.channel.name, subscriber.principal, request)
        )
        self._exit(subscriber)
        self._enter(subscriber, other)
        self.streams.start_over(subscriber, "filter", "the filter was changed")

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
        wire_channel = self._wire_channel(subscriber)
        frames = wire_channel.prepend(start, rebuilt, now)
        subscriber.backlog.extend((frame.data, frame.position) for frame in frames)
        self._joins(subscriber, wire_channel, frames[-1].position if frames else start)

    def replay_failed(self, subscriber: Subscriber, detail: str) -> None:
        """The log does not reach back to the position: a snapshot follows."""
        self.streams.start_over(subscriber, "log", detail)

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
        """It has processed everything up to ``position``; a position that the ring does not hold is ignored.

        Returns:
            Whether its window now takes more: ask :meth:`data_to_send`.
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

    def behind(self, subscriber: Subscriber) -> int:
        """Messages in the ring that it has not been handed yet."""
        if subscriber.live or subscriber.wire_channel is None:
            return 0
        return max(0, subscriber.wire_channel.ring.next - subscriber.cursor)

    def data_to_send(self, subscriber: Subscriber) -> bytes:
        """The next bytes for a subscriber whose socket takes some.

        Empty if it has everything, its window is full, it is silent, or its next bytes are being made (it will be
        woken).
        """
        while (wire_channel := subscriber.wire_channel) is not None and not (subscriber.live or subscriber.silent):
            if subscriber.backlog:
                data = _from_backlog(subscriber, self.counters)
            elif subscriber.snapshot is not None:
                data = _from_snapshot(subscriber, wire_channel, self.counters)
            elif subscriber.replaying or subscriber in self._stream_of(subscriber).waiting:
                return b""
            elif subscriber.room != 0 and not wire_channel.ring.holds(subscriber.cursor):
                lost = wire_channel.ring.first - subscriber.cursor
                self.streams.start_over(subscriber, "lagged", f"{lost} messages behind what the server keeps")
                data = b""
            else:
                data = _from_ring(subscriber, wire_channel, self.counters)
            if data is None:
                return b""
            if data:
                self.counters.bytes += len(data)
                return data
        return b""

    # The clock

    def tick(self, now: float, at: int) -> list[Outgoing]:
        """Send due heartbeats, warn and cut slow subscribers, drop unused views."""
        self.streams.now = now
        deliveries: list[Outgoing] = []
        for channel in self.channels.values():
            for stream in list(channel.streams.values()):
                for wire_channel in stream.wire_channels.values():
                    for subscriber in heartbeats.suspects(wire_channel):
                        deliveries.extend(heartbeats.checked(self.streams, subscriber, wire_channel, now))
                heartbeats.tidy(channel, stream, now)
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
            self._beats = heartbeats.slices(self.channels)
        deliveries: list[Outgoing] = []
        due = self.size * heartbeats.SPREAD * (now - self._beat_at) / self.settings.heartbeat_ms
        most = max(self._beaten + heartbeats.SLICE, due)
        while self._beaten < most:
            if (some := next(self._beats, None)) is None:
                self._beats = None
                break
            self._beaten += len(some.members)
            deliveries += heartbeats.beats(some, now, at)
        return deliveries

    @property
    def beating(self) -> bool:
        """Whether a round of heartbeats is under way."""
        return self._beats is not None

    def waiting(self) -> Iterator[Subscriber]:
        """Subscribers whose socket takes no more. Report a shrunken buffer by :meth:`heard_from`."""
        for channel in self.channels.values():
            for stream in channel.streams.values():
                for wire_channel in stream.wire_channels.values():
                    yield from [subscriber for subscriber in wire_channel.trailing if subscriber.paused]

    # Parts

    def _enter(self, subscriber: Subscriber, stream: ViewStream) -> None:
        subscriber.stream = stream
        stream.empty_since = None
        stream.wire_channel(subscriber.codec, conflates=subscriber.conflate).join(subscriber)

    def _exit(self, subscriber: Subscriber) -> None:
        assert subscriber.stream is not None and subscriber.wire_channel is not None
        subscriber.wire_channel.leave(subscriber)
        subscriber.stream.waiting.discard(subscriber)
        subscriber.stream = None
        subscriber.forget()

    def _begins(self, subscriber: Subscriber, stream: ViewStream, position: Position | None) -> Position | None:
        if not stream.opened:
            self.streams.begin(stream)
        if position is None:
            self.streams.give_snapshot(subscriber, stream)
        elif position.table_id != stream.channel.state.table.table_id:
            self.streams.start_over(subscriber, "log", "the position is of another table of this name")
        elif position.view != stream.view.id:
            self.streams.start_over(subscriber, "filter", "the position is of another filter or other columns")
        else:
            self.counters.resumed += 1
            told = messages.resumed(stream.live.table, position, self.seal, stream.view.description)
            subscriber.backlog.append((subscriber.codec.frame(told), None))
            subscriber.at = position
            return None if self._joins(subscriber, self._wire_channel(subscriber), position) else position
        return None

    def _joins(self, subscriber: Subscriber, wire_channel: WireChannel, position: Position) -> bool:
        cursor = wire_channel.ring.find(position)
        if cursor is None and self._stream_of(subscriber).backfill(wire_channel, position, self.streams.now):
            cursor = wire_channel.ring.find(position)
        subscriber.replaying = cursor is None
        if cursor is not None:
            subscriber.cursor = cursor
        return cursor is not None

    def _stream_of(self, subscriber: Subscriber) -> ViewStream:
        assert subscriber.stream is not None
        return subscriber.stream

    def _wire_channel(self, subscriber: Subscriber) -> WireChannel:
        assert subscriber.wire_channel is not None
        return subscriber.wire_channel
