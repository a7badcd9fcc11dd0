"""The hub: who gets which bytes, without I/O. Events go in, deliveries come out; the clock is an argument.

Times called ``now`` are milliseconds of a clock that never goes back; ``at`` is milliseconds since the epoch.

Nothing is queued per subscriber. A live one gets a frame's bytes as they are; one that trails reads the shared ring as
its socket drains; one that falls off the ring is told and gets a snapshot; one that gives no sign of reading is told,
then cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lakehouse.contract.settings import ServeSettings
from serve import messages
from serve.channel import Channel, Lane, Subscriber
from serve.errors import RequestError
from serve.messages import Message
from serve.model import Change
from serve.position import Position
from serve.push.codec import Codec
from serve.ring import Frame
from serve.state import TableState

log = logging.getLogger(__name__)

SLICE_BYTES = 131_072  # most that a trailing subscriber is handed at once
FULL, NOT_FOUND, TOO_SLOW = 1013, 4404, 4408  # close codes


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a transport has to do.

    Attributes:
        to: for whom.
        data: bytes to write, now, whatever the transport's buffer holds.
        wake: ask :meth:`Hub.data_to_send` for each of them.
        close: close code; 0: stay connected.
        reason: of the close.
    """

    to: tuple[Subscriber, ...]
    data: bytes = b""
    wake: bool = False
    close: int = 0
    reason: str = ""


@dataclass(slots=True)
class Counters:
    """What has happened since the start, for metrics."""

    subscribed: int = 0
    messages: int = 0
    bytes: int = 0
    snapshots: int = 0
    resumed: int = 0
    slow: int = 0
    cut: int = 0
    refused: int = 0
    expired: dict[str, int] = field(default_factory=lambda: {"log": 0, "lagged": 0})


class Hub:
    """All channels of one process.

    Args:
        settings: bounds and times.
        codecs: wire forms that channels are kept in.
    """

    def __init__(self, settings: ServeSettings, codecs: Iterable[Codec]) -> None:
        self._settings = settings
        self._codecs = tuple(codecs)
        self._beat_at = float("-inf")
        self.channels: dict[str, Channel] = {}
        self.counters = Counters()
        self.size = 0

    # Events from tables

    def table_opened(self, state: TableState, detail: str) -> list[Delivery]:
        """A table is there, or has been replaced (then its subscribers hear ``detail`` and get a snapshot)."""
        channel = self.channels.get(state.table.name)
        if channel is None:
            self.channels[state.table.name] = Channel(state, self._codecs, self._settings)
            return []
        channel.restarted(state)
        members = [subscriber for lane in channel.lanes.values() for subscriber in lane.members()]
        for subscriber in members:
            self._start_over(subscriber, channel, "log", detail or "the table was replaced")
        return [Delivery(tuple(members), wake=True)] if members else []

    def change_received(self, change: Change, now: float) -> list[Delivery]:
        """A commit: its bytes go to whoever is live."""
        channel = self.channels[change.table.name]
        deliveries = []
        for name, data in channel.taken(change, now).items():
            live = tuple(channel.lanes[name].live)
            if live:
                deliveries.append(self._counted(Delivery(live, data)))
        return deliveries

    # Events from subscribers

    def subscribed(self, subscriber: Subscriber, table: str, position: Position | None) -> Position | None:
        """A subscriber asks for a table, from a position or with a snapshot first.

        Returns:
            None: it can be sent to. A position: the ring does not reach it; replay the changes after it from the log,
            then call :meth:`replay_received`.

        Raises:
            RequestError: no such table, or too many subscribers.
        """
        channel = self.channels.get(table)
        if channel is None:
            raise RequestError(NOT_FOUND, "no_such_table", f"no table {table!r} is served here")
        if self.size >= self._settings.max_subscribers:
            self.counters.refused += 1
            raise RequestError(FULL, "full", f"{self.size} subscribers are connected, which is the bound")
        self.size += 1
        self.counters.subscribed += 1
        subscriber.channel = channel
        self._lane(subscriber).trailing.add(subscriber)
        if position is None:
            self._give_snapshot(subscriber, channel, ())
        elif position.table_id != channel.state.table.table_id:
            self._start_over(subscriber, channel, "log", "the position is of another table of this name")
        else:
            self.counters.resumed += 1
            subscriber.backlog = (subscriber.codec.frame(messages.resumed(channel.state, position)),)
            return None if self._joins(subscriber, position) else position
        return None

    def unsubscribed(self, subscriber: Subscriber) -> None:
        """The connection is gone."""
        if subscriber.channel is not None:
            lane = self._lane(subscriber)
            lane.live.discard(subscriber)
            lane.trailing.discard(subscriber)
            subscriber.channel = None
            subscriber.replaying = False
            self.size -= 1

    def replay_received(self, subscriber: Subscriber, start: Position, rebuilt: Sequence[Message], now: float) -> bytes:
        """Messages after ``start``, rebuilt from the log. Where the ring has room before its first frame it keeps them.

        Returns:
            The bytes to write. ``subscriber.replaying`` is False when the ring takes it on from there.
        """
        lane = self._lane(subscriber)
        frames = [Frame(lane.codec.frame(m), m.position, now) for m in rebuilt if m.position is not None]
        lane.ring.prepend(start, frames)
        data = b"".join(frame.data for frame in frames)
        self.counters.messages += len(frames)
        self.counters.bytes += len(data)
        self._joins(subscriber, frames[-1].position if frames else start)
        return data

    def replay_failed(self, subscriber: Subscriber, detail: str) -> None:
        """The log does not reach back to the position: a snapshot, then."""
        assert subscriber.channel is not None
        self._start_over(subscriber, subscriber.channel, "log", detail)

    def paused(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes no more for now."""
        if subscriber.channel is None:
            return
        subscriber.paused = True
        if subscriber.waiting_since is None:
            subscriber.waiting_since = now
        if subscriber.live:
            lane = self._lane(subscriber)
            subscriber.live = False
            subscriber.cursor = lane.ring.next
            lane.live.discard(subscriber)
            lane.trailing.add(subscriber)

    def drained(self, subscriber: Subscriber, now: float) -> None:
        """Its socket takes more: ask :meth:`data_to_send`."""
        subscriber.paused = False
        self.heard_from(subscriber, now)

    def heard_from(self, subscriber: Subscriber, now: float) -> None:
        """A sign that it reads: a pong, or its buffer has shrunk."""
        subscriber.waiting_since = now if subscriber.paused else None
        if subscriber.live and subscriber.acked is None:
            subscriber.told_slow = False

    def acknowledged(self, subscriber: Subscriber, position: Position) -> None:
        """It says it has processed everything up to ``position``; one that the ring does not hold is passed over."""
        cursor = self._lane(subscriber).ring.find(position)
        if cursor is not None:
            subscriber.acked = max(cursor, subscriber.acked or cursor)
            if cursor == self._lane(subscriber).ring.next:
                subscriber.told_slow = False

    def data_to_send(self, subscriber: Subscriber) -> bytes:
        """The next bytes for a subscriber whose socket takes some; empty: it is live now, or its replay goes on."""
        channel = subscriber.channel
        if channel is None or subscriber.live:
            return b""
        if subscriber.backlog:
            return self._from_backlog(subscriber)
        if subscriber.replaying:
            return b""
        lane = self._lane(subscriber)
        if not lane.ring.holds(subscriber.cursor):
            lost = lane.ring.first - subscriber.cursor
            self._start_over(subscriber, channel, "lagged", f"{lost} messages behind what the server keeps")
            return self._from_backlog(subscriber)
        data, cursor = lane.ring.slice(subscriber.cursor, SLICE_BYTES)
        if data:
            self.counters.messages += cursor - subscriber.cursor
            self.counters.bytes += len(data)
            subscriber.cursor = cursor
        elif not subscriber.paused:
            subscriber.live = True
            lane.trailing.discard(subscriber)
            lane.live.add(subscriber)
        return data

    # The clock

    def tick(self, now: float, at: int) -> list[Delivery]:
        """Heartbeats when they are due; who is slow is told, who gives no sign is cut."""
        deliveries: list[Delivery] = []
        beat = now - self._beat_at >= self._settings.heartbeat_ms
        if beat:
            self._beat_at = now
        for channel in self.channels.values():
            for lane in channel.lanes.values():
                for subscriber in lane.members():
                    deliveries.extend(self._checked(subscriber, lane, now))
                if beat:
                    deliveries.extend(self._heartbeats(channel, lane, now, at))
        return deliveries

    def waiting(self) -> Iterator[Subscriber]:
        """Subscribers whose socket takes no more: report those whose buffer has shrunk by :meth:`heard_from`."""
        for channel in self.channels.values():
            for lane in channel.lanes.values():
                yield from [subscriber for subscriber in lane.trailing if subscriber.paused]

    def _heartbeats(self, channel: Channel, lane: Lane, now: float, at: int) -> Iterator[Delivery]:
        def frame(behind: int) -> bytes:
            message = messages.heartbeat(channel.head, behind, channel.state.facts.newest_at, at)
            return lane.codec.heartbeat(message)

        groups: dict[int, list[Subscriber]] = {}
        for subscriber in lane.live:
            if subscriber.waiting_since is None and lane.codec.answers:
                subscriber.waiting_since = now
                subscriber.asked_at = lane.ring.next
            behind = 0 if subscriber.acked is None else lane.ring.next - subscriber.acked
            groups.setdefault(behind, []).append(subscriber)
        for behind, members in groups.items():
            yield Delivery(tuple(members), frame(behind))

    def _checked(self, subscriber: Subscriber, lane: Lane, now: float) -> Iterator[Delivery]:
        waited = 0.0 if subscriber.waiting_since is None else now - subscriber.waiting_since
        if waited >= self._settings.cut_after_ms:
            self.counters.cut += 1
            log.warning("%s: cut, it has read nothing for %.0f ms", subscriber.label, waited)
            yield Delivery((subscriber,), close=TOO_SLOW, reason=f"nothing read for {waited:.0f} ms")
            return
        behind, behind_ms = self._behind(subscriber, lane, now, waited)
        if behind_ms >= self._settings.slow_after_ms and not subscriber.told_slow:
            subscriber.told_slow = True
            self.counters.slow += 1
            log.info("%s: slow, %d messages and %.0f ms behind", subscriber.label, behind, behind_ms)
            cut_in = self._settings.cut_after_ms - waited
            message = messages.slow(behind, int(behind_ms), int(cut_in))
            yield Delivery((subscriber,), subscriber.codec.frame(message))

    def _behind(self, subscriber: Subscriber, lane: Lane, now: float, waited: float) -> tuple[int, float]:
        ring = lane.ring
        cursor = subscriber.asked_at if subscriber.live else subscriber.cursor
        if subscriber.acked is not None and subscriber.live:
            cursor = subscriber.acked
            if ring.holds(cursor) and cursor < ring.next:
                waited = max(waited, now - ring.frame(cursor).at)
        elif not subscriber.live and not subscriber.replaying and ring.holds(cursor) and cursor < ring.next:
            waited = max(waited, now - ring.frame(cursor).at)
        return max(0, ring.next - cursor), waited

    # Snapshots

    def _start_over(self, subscriber: Subscriber, channel: Channel, reason: str, detail: str) -> None:
        self.counters.expired[reason] += 1
        log.info("%s: expired (%s): %s", subscriber.label, reason, detail)
        lane = self._lane(subscriber)
        lane.live.discard(subscriber)
        lane.trailing.add(subscriber)
        subscriber.live = False
        subscriber.acked = None
        self._give_snapshot(subscriber, channel, (messages.expired(reason, detail),))

    def _give_snapshot(self, subscriber: Subscriber, channel: Channel, before: tuple[Message, ...]) -> None:
        self.counters.snapshots += 1
        snapshot = channel.snapshot(subscriber.codec)
        subscriber.backlog = (*map(subscriber.codec.frame, before), *snapshot.frames)
        cursor = self._lane(subscriber).ring.find(snapshot.position)
        assert cursor is not None, "a snapshot is of a position in the ring"
        subscriber.cursor = cursor
        subscriber.replaying = False

    def _from_backlog(self, subscriber: Subscriber) -> bytes:
        size, count = 0, 0
        for frame in subscriber.backlog:
            if count and size + len(frame) > SLICE_BYTES:
                break
            size += len(frame)
            count += 1
        data = b"".join(subscriber.backlog[:count])
        subscriber.backlog = subscriber.backlog[count:]
        self.counters.messages += count
        self.counters.bytes += size
        return data

    def _joins(self, subscriber: Subscriber, position: Position) -> bool:
        cursor = self._lane(subscriber).ring.find(position)
        subscriber.replaying = cursor is None
        if cursor is not None:
            subscriber.cursor = cursor
        return cursor is not None

    def _lane(self, subscriber: Subscriber) -> Lane:
        assert subscriber.channel is not None
        return subscriber.channel.lanes[subscriber.codec.name]

    def _counted(self, delivery: Delivery) -> Delivery:
        self.counters.messages += len(delivery.to)
        self.counters.bytes += len(delivery.to) * len(delivery.data)
        return delivery
