"""The hub: who gets which bytes, without I/O. Events go in, deliveries come out; the clock is an argument.

Times called ``now`` are milliseconds of a clock that never goes back; ``at`` is milliseconds since the epoch.

Nothing is queued per subscriber. A live one gets a frame's bytes as they are; one that trails reads the shared ring as
its socket drains; one that falls off the ring is told and gets a snapshot; one that gives no sign of reading is told,
then cut (:mod:`serve.pace`). What has to be made for many is :mod:`serve.feeds`'.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from lakehouse.contract.channel import ChannelSpec
from lakehouse.contract.settings import ServeSettings
from serve import messages, outgoing, pace
from serve.channel import Feed
from serve.delivery import Delivery
from serve.errors import FilterError, RequestError
from serve.feeds import Feeds
from serve.filters.view import View
from serve.lane import Lane
from serve.messages import Message
from serve.model import Change
from serve.position import Position, Seal
from serve.principal import Principal
from serve.push.codec import Codec
from serve.state import TableState
from serve.subscriber import Subscriber, SubscribeRequest

MAX_WINDOW = 10_000


class Hub:
    """All channels of one process.

    Args:
        settings: bounds and times.
        codecs: wire forms that whole tables are kept in from the start; others come when somebody asks for them.
        seal: writes and reads positions.
        working: called when there is work for :meth:`work`.
        specs: what is declared of tables' channels, by table.
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
        self.feeds = Feeds(settings, codecs, seal, working, specs)
        self.channels = self.feeds.channels
        self.counters = self.feeds.counters
        self._beat_at = float("-inf")
        self._beats: Iterator[pace.Slice] | None = None  # whose heartbeat is due yet
        self._beaten = 0  # who had theirs, of those

    # Events from tables

    def table_opened(self, state: TableState, detail: str) -> list[Delivery]:
        """A table is there, or has been replaced (then its subscribers hear ``detail`` and get a snapshot)."""
        channel = self.channels.get(state.table.name)
        if channel is None:
            self.feeds.open(state)
            return []
        channel.restarted(state)
        deliveries: list[Delivery] = []
        for feed in list(channel.feeds.values()):
            try:
                feed.restarted()
            except FilterError as error:
                deliveries += self.feeds.drop(feed, error)
                continue
            members = feed.members()
            for subscriber in members:
                self.feeds.start_over(subscriber, "log", detail or "the table was replaced")
            if members:
                deliveries.append(Delivery(tuple(members), wake=True))
        return deliveries

    def table_closed(self, name: str, problem: str) -> list[Delivery]:
        """A table cannot be served any more; where it was, its subscribers hear ``not_served`` and are closed."""
        return self.feeds.close(name, problem)

    def change_received(self, change: Change, now: float) -> Iterator[Delivery]:
        """A commit: its bytes go to whoever is live. Deliveries are made one view at a time as they are asked for, all
        of them before anything else is told to the hub: so the first view does not wait for a thousand others."""
        self.feeds.now = now
        channel = self.channels[change.table.name]
        channel.remember(change)
        return self._caught_up([feed for feed in channel.feeds.values() if feed.opened], change)

    def _caught_up(self, feeds: list[Feed], change: Change) -> Iterator[Delivery]:
        for feed in feeds:
            yield from self.feeds.catch_up(feed)
        change.settle()

    def work(self, now: float) -> list[Delivery]:
        """A few milliseconds of what takes long, such as the snapshot of a large table; see :attr:`working`."""
        self.feeds.now = now
        return self.feeds.work()

    @property
    def working(self) -> bool:
        """Whether there is something for :meth:`work`."""
        return self.feeds.busy

    # Events from subscribers

    def view_of(self, table: str, principal: Principal, request: SubscribeRequest) -> View:
        """See :meth:`serve.feeds.Feeds.view_of`."""
        return self.feeds.view_of(table, principal, request)

    def subscribed(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> Position | None:
        """A subscriber asks for a table, from a position or with a snapshot first.

        Returns:
            None: it can be sent to. A position: the ring does not reach it; replay the changes after it from the log,
            then call :meth:`replay_received`.

        Raises:
            RequestError: no such table, too many subscribers or filters, or a filter that is refused.
        """
        self.feeds.now = now
        view = self.view_of(request.table, subscriber.principal, request)
        if self.size >= self.settings.max_subscribers:
            self.counters.refused += 1
            raise RequestError(RequestError.FULL, "full", f"{self.size} subscribers are connected, which is the bound")
        if not 0 <= request.window <= MAX_WINDOW:
            raise RequestError(RequestError.BAD_REQUEST, "bad_request", f"window is 1 to {MAX_WINDOW}")
        feed = self.feeds.feed(request.table, view)
        subscriber.conflate, subscriber.window = request.conflate, request.window
        self.size += 1
        self.counters.subscribed += 1
        self._enter(subscriber, feed)
        return self._begins(subscriber, feed, request.position)

    def refiltered(self, subscriber: Subscriber, request: SubscribeRequest, now: float) -> None:
        """It wants other rows or columns of its table from now on: ``expired``, then a snapshot of those.

        Raises:
            RequestError: the filter is refused; the old one stays.
        """
        self.feeds.now = now
        feed = subscriber.feed
        if feed is None:
            raise RequestError(RequestError.BAD_REQUEST, "bad_message", "there is no subscription yet")
        other = self.feeds.feed(feed.channel.name, self.view_of(feed.channel.name, subscriber.principal, request))
        self._exit(subscriber)
        self._enter(subscriber, other)
        self.feeds.start_over(subscriber, "filter", "the filter was changed")

    def unsubscribed(self, subscriber: Subscriber) -> None:
        """The connection is gone."""
        if subscriber.feed is not None:
            self._exit(subscriber)
            self.size -= 1

    def replay_received(self, subscriber: Subscriber, start: Position, rebuilt: Sequence[Message], now: float) -> None:
        """Messages after ``start``, rebuilt from the log: they go out before anything else. Where the ring has room
        before its first frame it keeps them. ``subscriber.replaying`` is False when the ring takes it on from there."""
        lane = self._lane(subscriber)
        frames = lane.prepend(start, rebuilt, now)
        subscriber.backlog.extend((frame.data, frame.position) for frame in frames)
        self._joins(subscriber, lane, frames[-1].position if frames else start)

    def replay_failed(self, subscriber: Subscriber, detail: str) -> None:
        """The log does not reach back to the position: a snapshot, then."""
        self.feeds.start_over(subscriber, "log", detail)

    def paused(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes no more for now."""
        if subscriber.lane is None:
            return
        subscriber.paused = True
        if subscriber.waiting_since is None:
            subscriber.waiting_since = now
        if subscriber.live:
            subscriber.lane.falls_behind(subscriber)

    def drained(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes more: ask :meth:`data_to_send`."""
        subscriber.paused = False
        self.heard_from(subscriber, now)

    def heard_from(self, subscriber: Subscriber, now: float) -> bool:
        """A sign that it reads: a pong, or its buffer has shrunk.

        Returns:
            Whether it was silent, and so has missed something maybe: ask :meth:`data_to_send`.
        """
        was_silent, subscriber.silent = subscriber.silent, False
        subscriber.waiting_since = now if subscriber.paused else None
        if (subscriber.live or subscriber.idle) and subscriber.acked is None:
            subscriber.told_slow = False
        return was_silent

    def acknowledged(self, subscriber: Subscriber, position: Position) -> bool:
        """It says it has processed everything up to ``position``; one that the ring does not hold is passed over.

        Returns:
            Whether its window takes more now: ask :meth:`data_to_send`.
        """
        lane = subscriber.lane
        if lane is None:
            return False
        processed = bisect_right(subscriber.unacked, position)
        del subscriber.unacked[:processed]
        cursor = lane.ring.find(position)
        if cursor is not None:
            subscriber.acked = max(cursor, subscriber.acked or cursor)
            if cursor == lane.ring.next:
                subscriber.told_slow = False
        return processed > 0

    def reached(self, subscriber: Subscriber) -> Position | None:
        """Where the bytes that it was handed bring it; None: into the middle of a snapshot."""
        if subscriber.live and subscriber.lane is not None:
            return subscriber.lane.ring.head
        return subscriber.at

    def behind(self, subscriber: Subscriber) -> int:
        """Messages in the ring that it was not handed yet."""
        if subscriber.live or subscriber.lane is None:
            return 0
        return max(0, subscriber.lane.ring.next - subscriber.cursor)

    def data_to_send(self, subscriber: Subscriber) -> bytes:
        """The next bytes for a subscriber whose socket takes some; empty: it has everything, its window is full, it is
        silent, or what comes next is being made (then it will be woken)."""
        while (lane := subscriber.lane) is not None and not (subscriber.live or subscriber.silent):
            if subscriber.backlog:
                data = outgoing.from_backlog(subscriber, self.counters)
            elif subscriber.snapshot is not None:
                data = outgoing.from_snapshot(subscriber, lane, self.counters)
            elif subscriber.replaying or subscriber in self._feed_of(subscriber).waiting:
                return b""
            elif subscriber.room != 0 and not lane.ring.holds(subscriber.cursor):
                lost = lane.ring.first - subscriber.cursor
                self.feeds.start_over(subscriber, "lagged", f"{lost} messages behind what the server keeps")
                data = b""
            else:
                data = outgoing.from_ring(subscriber, lane, self.counters)
            if data is None:
                return b""
            if data:
                self.counters.bytes += len(data)
                return data
        return b""

    # The clock

    def tick(self, now: float, at: int) -> list[Delivery]:
        """Heartbeats when they are due; who is slow is told, who gives no sign is cut; unused views are dropped."""
        self.feeds.now = now
        deliveries: list[Delivery] = []
        for channel in self.channels.values():
            for feed in list(channel.feeds.values()):
                for lane in feed.lanes.values():
                    for subscriber in pace.suspects(lane):
                        deliveries.extend(pace.checked(self, subscriber, lane, now))
                pace.tidy(channel, feed, now)
        deliveries += self.beat(now, at)
        return deliveries

    def beat(self, now: float, at: int) -> list[Delivery]:
        """The heartbeats that are due: some at a time, so that a change never waits for all of them and their pongs.
        Where :attr:`beating`, call it again after some 20 ms."""
        if self._beats is None:
            if now - self._beat_at < self.settings.heartbeat_ms:
                return []
            self._beat_at, self._beaten = now, 0
            self._beats = pace.slices(self.channels)
        deliveries: list[Delivery] = []
        due = self.size * pace.SPREAD * (now - self._beat_at) / self.settings.heartbeat_ms
        most = max(self._beaten + pace.SLICE, due)
        while self._beaten < most:
            if (some := next(self._beats, None)) is None:
                self._beats = None
                break
            self._beaten += len(some.members)
            deliveries += pace.heartbeats(some, now, at)
        return deliveries

    @property
    def beating(self) -> bool:
        """Whether some are still to have their heartbeat."""
        return self._beats is not None

    def waiting(self) -> Iterator[Subscriber]:
        """Subscribers whose socket takes no more: report those whose buffer has shrunk by :meth:`heard_from`."""
        for channel in self.channels.values():
            for feed in channel.feeds.values():
                for lane in feed.lanes.values():
                    yield from [subscriber for subscriber in lane.trailing if subscriber.paused]

    # Parts

    def _enter(self, subscriber: Subscriber, feed: Feed) -> None:
        subscriber.feed = feed
        feed.empty_since = None
        feed.lane(subscriber.codec, conflates=subscriber.conflate).join(subscriber)

    def _exit(self, subscriber: Subscriber) -> None:
        assert subscriber.feed is not None and subscriber.lane is not None
        subscriber.lane.leave(subscriber)
        subscriber.feed.waiting.discard(subscriber)
        subscriber.feed = None
        subscriber.forget()

    def _begins(self, subscriber: Subscriber, feed: Feed, position: Position | None) -> Position | None:
        if not feed.opened:
            self.feeds.begin(feed)
        if position is None:
            self.feeds.give_snapshot(subscriber, feed)
        elif position.table_id != feed.channel.state.table.table_id:
            self.feeds.start_over(subscriber, "log", "the position is of another table of this name")
        elif position.view != feed.view.id:
            self.feeds.start_over(subscriber, "filter", "the position is of another filter or other columns")
        else:
            self.counters.resumed += 1
            told = messages.resumed(feed.live.table, position, self.seal, feed.view.told)
            subscriber.backlog.append((subscriber.codec.frame(told), None))
            subscriber.at = position
            return None if self._joins(subscriber, self._lane(subscriber), position) else position
        return None

    def _joins(self, subscriber: Subscriber, lane: Lane, position: Position) -> bool:
        cursor = lane.ring.find(position)
        if cursor is None and self._feed_of(subscriber).backfilled(lane, position, self.feeds.now):
            cursor = lane.ring.find(position)
        subscriber.replaying = cursor is None
        if cursor is not None:
            subscriber.cursor = cursor
        return cursor is not None

    def _feed_of(self, subscriber: Subscriber) -> Feed:
        assert subscriber.feed is not None
        return subscriber.feed

    def _lane(self, subscriber: Subscriber) -> Lane:
        assert subscriber.lane is not None
        return subscriber.lane
