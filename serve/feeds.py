"""The feeds of one process: which views of which tables are kept, and what is made before anybody is served.

The hub's other half (:mod:`serve.hub` has the subscribers' side); no I/O, no clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.settings import ServeSettings
from serve import messages
from serve.channel import INLINE_ROWS, Channel, Feed
from serve.delivery import Counters, Delivery
from serve.errors import FilterError, RequestError
from serve.filters.view import View
from serve.lane import Lane
from serve.position import WHOLE, Seal
from serve.principal import Principal
from serve.push.codec import Codec
from serve.state import TableState
from serve.subscriber import Subscriber, SubscribeRequest

log = logging.getLogger(__name__)


class Feeds:
    """See the module; arguments as of :class:`serve.hub.Hub`."""

    def __init__(
        self,
        settings: ServeSettings,
        codecs: Iterable[Codec],
        seal: Seal,
        working: Callable[[], None],
        specs: Mapping[str, ChannelSpec],
    ) -> None:
        self.specs = specs
        self.settings = settings
        self.seal = seal
        self.channels: dict[str, Channel] = {}
        self.counters = Counters()
        self.now = 0.0  # of the event that is being handled
        self._codecs = tuple(codecs)
        self._busy: deque[Feed] = deque()
        self._owed: list[Delivery] = []  # by what could not hand them out itself
        self._working = working

    @property
    def busy(self) -> bool:
        """Whether there is something for :meth:`work`."""
        return bool(self._busy or self._owed)

    def open(self, state: TableState) -> None:
        """A table that was not there before."""
        spec = self.specs.get(state.table.name, EVERYTHING)
        self.channels[state.table.name] = Channel(state, self._codecs, self.settings, self.seal, spec)

    def close(self, table: str, problem: str) -> list[Delivery]:
        """A table cannot be served any more: its subscribers are told and closed."""
        channel = self.channels.pop(table, None)
        why = RequestError(RequestError.BAD_REQUEST, "not_served", problem)
        feeds = [] if channel is None else list(channel.feeds.values())
        return [delivery for feed in feeds for delivery in self._ended(feed, why)]

    def work(self) -> list[Delivery]:
        """What is still to be handed out, or else a slice of what takes long."""
        if self._owed:
            owed, self._owed = self._owed, []
            return owed
        if not self._busy:
            return []
        feed = self._busy.popleft()
        deliveries = self._step(feed)
        if feed.work is not None:
            self._busy.append(feed)
        return deliveries

    def view_of(self, table: str, principal: Principal, request: SubscribeRequest) -> View:
        """What a principal sees of a table when it asks like this: the one place where its rights are applied.

        Raises:
            RequestError: no such table, or none for this principal; or the request's SQL is refused.
        """
        channel = self.channels.get(table)
        if channel is None or not principal.may_read(table):
            raise RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {table!r} is served here")
        try:
            return channel.view(request, principal.condition(table))
        except FilterError as error:
            raise RequestError(RequestError.BAD_REQUEST, "bad_filter", str(error)) from None

    def filters(self) -> int:
        """Distinct views kept up to date, beside whole tables."""
        return sum(len(channel.feeds) - 1 for channel in self.channels.values())

    def feed(self, table: str, view: View) -> Feed:
        channel = self.channels[table]
        feed = channel.feeds.get(view.id)
        if feed is None:
            if self.filters() >= self.settings.max_filters and not self._evicted():
                self.counters.refused += 1
                problem = f"{self.settings.max_filters} filters are in use, which is the bound"
                raise RequestError(RequestError.FULL, "full", problem)
            feed = channel.feeds[view.id] = Feed(view, channel)
        return feed

    def _evicted(self) -> bool:
        for channel in self.channels.values():
            for ident, feed in channel.feeds.items():
                if ident != WHOLE and not feed.members():
                    del channel.feeds[ident]
                    return True
        return False

    def drop(self, feed: Feed, error: FilterError) -> list[Delivery]:
        """The view makes no sense any more."""
        log.warning("%s: a filter is dropped: %s", feed.channel.name, error, exc_info=error.__cause__)
        feed.channel.feeds.pop(feed.view.id, None)
        return self._ended(feed, RequestError(RequestError.BAD_REQUEST, "bad_filter", str(error)))

    def _ended(self, feed: Feed, why: RequestError) -> list[Delivery]:
        """Nothing more comes of a feed: its subscribers are told and closed."""
        feed.work, feed.ended = None, why
        deliveries = []
        for lane in feed.lanes.values():
            if members := lane.members():
                told = lane.codec.frame(messages.error(why.code, why.detail))
                deliveries.append(Delivery(members, told, close=why.close, reason=why.detail))
        return deliveries

    def catch_up(self, feed: Feed) -> list[Delivery]:
        """Everything that the feed has not taken yet; ordinarily one commit."""
        missed = feed.channel.since(feed.version)
        deliveries: list[Delivery] = []
        try:
            if missed is None:  # more has happened while it was made than is kept: it begins anew
                feed.restarted()
                for subscriber in feed.members():
                    self.start_over(subscriber, "lagged", "the table changed faster than the view of it was made")
            for change in missed or ():
                for name, data in feed.taken(change, self.now).items():
                    lane = feed.lanes[name]
                    if lane.live and data:
                        deliveries.append(self._counted(lane, data))
                    if lane.idle:
                        deliveries.append(Delivery(tuple(lane.idle), wake=True))
                        for subscriber in tuple(lane.idle):
                            lane.trails(subscriber)
        except FilterError as error:
            return [*deliveries, *self.drop(feed, error)]
        return deliveries

    def begin(self, feed: Feed) -> None:
        """Have a snapshot made: at once where the table is small."""
        if feed.ended is not None:
            return
        deliveries: list[Delivery] = []
        try:
            feed.begin(self.now)
        except FilterError as error:
            deliveries = self.drop(feed, error)
        if len(feed.channel.state.rows) <= INLINE_ROWS and len(feed.waiting) <= 1:
            while feed.work is not None:
                deliveries = self._step(feed)
        if feed.ended is not None:
            self._owed += deliveries
            self._working()
        elif feed.work is not None and feed not in self._busy:
            self._busy.append(feed)
            self._working()

    def _step(self, feed: Feed) -> list[Delivery]:
        if feed.work is None:
            return []
        try:
            done = feed.worked()
        except FilterError as error:
            return self.drop(feed, error)
        if done:
            return self._snapshot_made(feed)
        return self.catch_up(feed) if feed.opened else []

    def _snapshot_made(self, feed: Feed) -> list[Delivery]:
        waiting = tuple(feed.waiting)
        feed.waiting.clear()
        for subscriber in waiting:
            self.give_snapshot(subscriber, feed, made=True)
        return [Delivery(waiting, wake=True)] if waiting else []

    def give_snapshot(self, subscriber: Subscriber, feed: Feed, *, made: bool = False) -> None:
        """The last snapshot, or the next one. One just made is taken whatever came meanwhile: the ring has that."""
        lane = subscriber.lane
        assert lane is not None
        snapshot = feed.usable(lane, made=made)
        if snapshot is None:
            feed.waiting.add(subscriber)
            self.begin(feed)
            return
        cursor = lane.ring.find(snapshot.position)
        assert cursor is not None, "a snapshot is of a position in the ring"
        self.counters.snapshots += 1
        subscriber.snapshot, subscriber.parts, subscriber.cursor = snapshot, 0, cursor
        subscriber.at = None

    def start_over(self, subscriber: Subscriber, reason: str, detail: str) -> None:
        feed, lane = subscriber.feed, subscriber.lane
        assert feed is not None and lane is not None
        self.counters.expired[reason] += 1
        log.info("%s: expired (%s): %s", subscriber.label, reason, detail)
        lane.trails(subscriber)
        subscriber.forget()
        feed.waiting.discard(subscriber)
        told = messages.expired(feed.channel.name, reason, detail)
        subscriber.backlog.append((subscriber.codec.frame(told), None))
        self.give_snapshot(subscriber, feed)

    def _counted(self, lane: Lane, data: bytes) -> Delivery:
        self.counters.messages += len(lane.live)
        self.counters.bytes += len(lane.live) * len(data)
        return Delivery(lane.listed(), data)
