"""The view streams of one process: which views are kept, and the snapshots made for them.

The other half of the hub; :mod:`serve.core.hub` has the subscribers' side. No I/O, no clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from lakehouse.contract.channel import EVERYTHING, ChannelSpec
from lakehouse.contract.settings import ServeSettings
from serve.core import messages
from serve.core.channel import INLINE_ROWS, Channel, ViewStream
from serve.core.codec import Codec
from serve.core.model import SubscribeRequest
from serve.core.position import WHOLE, Seal
from serve.core.ring import WireChannel
from serve.core.subscriber import HubCounters, Outgoing, Subscriber
from serve.errors import FilterError, RequestError
from serve.security.access import Principal, no_such_table
from serve.tables.state import TableState
from serve.views.view import SubscriberView

log = logging.getLogger(__name__)


class ViewStreams:
    """See the module; arguments as of :class:`serve.core.hub.Hub`."""

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
        self.counters = HubCounters()
        self.now = 0.0  # of the current event
        self._codecs = tuple(codecs)
        self._busy: deque[ViewStream] = deque()
        self._owed: list[Outgoing] = []  # made where they could not be returned
        self._working = working

    @property
    def busy(self) -> bool:
        """Whether :meth:`work` has something to do."""
        return bool(self._busy or self._owed)

    def open(self, state: TableState) -> None:
        spec = self.specs.get(state.table.name, EVERYTHING)
        self.channels[state.table.name] = Channel(state, self._codecs, self.settings, self.seal, spec)

    def close(self, table: str, problem: str) -> list[Outgoing]:
        """A table cannot be served any more: tell and close its subscribers."""
        channel = self.channels.pop(table, None)
        why = RequestError(RequestError.BAD_REQUEST, "not_served", problem)
        streams = [] if channel is None else list(channel.streams.values())
        return [delivery for stream in streams for delivery in self._ended(stream, why)]

    def work(self) -> list[Outgoing]:
        """Return deliveries that are owed, or do a slice of long work."""
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

    def filters(self) -> int:
        """Number of distinct views, whole tables not counted."""
        return sum(len(channel.streams) - 1 for channel in self.channels.values())

    def stream(self, table: str, view: SubscriberView) -> ViewStream:
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

    def drop(self, stream: ViewStream, error: FilterError) -> list[Outgoing]:
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

    def catch_up(self, stream: ViewStream) -> list[Outgoing]:
        """Apply every change that the stream has not taken yet, ordinarily one."""
        missed = stream.channel.since(stream.version)
        deliveries: list[Outgoing] = []
        try:
            if missed is None:  # it missed more changes than are kept: start over
                stream.restarted()
                for subscriber in stream.members():
                    self.start_over(subscriber, "lagged", "the table changed faster than the view of it was made")
            for change in missed or ():
                for name, data in stream.apply_change(change, self.now).items():
                    wire_channel = stream.wire_channels[name]
                    if wire_channel.live and data:
                        deliveries.append(self._counted(wire_channel, data))
                    if wire_channel.idle:
                        deliveries.append(Outgoing(tuple(wire_channel.idle), wake=True))
                        for subscriber in tuple(wire_channel.idle):
                            wire_channel.trails(subscriber)
        except FilterError as error:
            return [*deliveries, *self.drop(stream, error)]
        return deliveries

    def begin(self, stream: ViewStream) -> None:
        """Start a snapshot; that of a small table is finished at once."""
        if stream.ended is not None:
            return
        deliveries: list[Outgoing] = []
        try:
            stream.begin(self.now)
        except FilterError as error:
            deliveries = self.drop(stream, error)
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
            return self.drop(stream, error)
        if done:
            return self._snapshot_made(stream)
        return self.catch_up(stream) if stream.opened else []

    def _snapshot_made(self, stream: ViewStream) -> list[Outgoing]:
        waiting = tuple(stream.waiting)
        stream.waiting.clear()
        for subscriber in waiting:
            self.give_snapshot(subscriber, stream, made=True)
        return [Outgoing(waiting, wake=True)] if waiting else []

    def give_snapshot(self, subscriber: Subscriber, stream: ViewStream, *, made: bool = False) -> None:
        """Give it the last snapshot, or the next. A snapshot just made is used even if changes came meanwhile."""
        wire_channel = subscriber.wire_channel
        assert wire_channel is not None
        snapshot = stream.usable_snapshot(wire_channel, made=made)
        if snapshot is None:
            stream.waiting.add(subscriber)
            self.begin(stream)
            return
        cursor = wire_channel.ring.find(snapshot.position)
        assert cursor is not None, "a snapshot is of a position in the ring"
        self.counters.snapshots += 1
        subscriber.snapshot, subscriber.parts, subscriber.cursor = snapshot, 0, cursor
        subscriber.at = None

    def start_over(self, subscriber: Subscriber, reason: str, detail: str) -> None:
        stream, wire_channel = subscriber.stream, subscriber.wire_channel
        assert stream is not None and wire_channel is not None
        self.counters.expired[reason] += 1
        log.info("%s: expired (%s): %s", subscriber.label, reason, detail)
        wire_channel.trails(subscriber)
        subscriber.forget()
        stream.waiting.discard(subscriber)
        told = messages.expired(stream.channel.name, reason, detail)
        subscriber.backlog.append((subscriber.codec.frame(told), None))
        self.give_snapshot(subscriber, stream)

    def _counted(self, wire_channel: WireChannel, data: bytes) -> Outgoing:
        self.counters.messages += len(wire_channel.live)
        self.counters.bytes += len(wire_channel.live) * len(data)
        return Outgoing(wire_channel.listed(), data)
