"""What the hub does by the clock: heartbeats, warnings to slow subscribers, the cut of those that do not read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from serve.core import messages
from serve.core.channel import Channel, ViewStream
from serve.core.position import WHOLE
from serve.core.ring import WireChannel
from serve.core.streams import ViewStreams
from serve.core.subscriber import Outgoing, Subscriber

log = logging.getLogger(__name__)

TOO_SLOW = 4408
LINGER_MS = 30_000  # an unused view is kept up to date for a while: its subscribers may come back
SNAPSHOT_MS = 30_000  # life of a filter's snapshot, for others that ask alike
# How long a ping and its pong may take. Then nothing more is written to a subscriber that has not answered: filling a
# stopped reader's socket would cost the others the time to write.
SILENT_MS = 1_000
SLICE = 100  # heartbeats at a time: about 1 ms, and as much again for the pongs
SPREAD = 2  # all are sent within this fraction (1/2) of the pause between heartbeats


@dataclass(frozen=True, slots=True)
class HeartbeatSlice:
    """Some readers of a wire channel, as they were when the heartbeat reached it."""

    stream: ViewStream
    wire_channel: WireChannel
    members: Sequence[Subscriber]


def slices(channels: Mapping[str, Channel]) -> Iterator[HeartbeatSlice]:
    """All subscribers, some at a time."""
    for channel in list(channels.values()):
        for stream in list(channel.streams.values()):
            for wire_channel in list(stream.wire_channels.values()):
                members = wire_channel.members()
                for start in range(0, len(members), SLICE):
                    yield HeartbeatSlice(stream, wire_channel, members[start : start + SLICE])


def suspects(wire_channel: WireChannel) -> list[Subscriber]:
    """Subscribers that :func:`checked` may have something to tell: not those that have everything and owe no answer."""
    live = [each for each in wire_channel.live if each.waiting_since is not None or each.acked is not None]
    return [*live, *wire_channel.idle, *wire_channel.trailing]


def beats(some: HeartbeatSlice, now: float, at: int) -> Iterator[Outgoing]:
    """Heartbeats to subscribers that have everything, or as much as their window takes; the wait for an answer
    begins."""
    stream, wire_channel = some.stream, some.wire_channel
    groups: dict[int, list[Subscriber]] = {}
    for subscriber in some.members:
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


def checked(streams: ViewStreams, subscriber: Subscriber, wire_channel: WireChannel, now: float) -> Iterator[Outgoing]:
    """The messages or the close that are due to one subscriber."""
    waited = 0.0 if subscriber.waiting_since is None else now - subscriber.waiting_since
    if waited >= streams.settings.cut_after_ms:
        streams.counters.cut += 1
        log.warning("%s: cut, it has read nothing for %.0f ms", subscriber.label, waited)
        yield Outgoing((subscriber,), close=TOO_SLOW, reason=f"nothing read for {waited:.0f} ms")
        return
    if subscriber.live and waited >= SILENT_MS:
        wire_channel.falls_behind(subscriber)
        subscriber.silent = True
    behind, behind_ms = _behind(subscriber, wire_channel, now, waited)
    if behind_ms >= streams.settings.slow_after_ms and not subscriber.told_slow:
        subscriber.told_slow = True
        streams.counters.slow += 1
        log.info("%s: slow, %d messages and %.0f ms behind", subscriber.label, behind, behind_ms)
        cut_in = streams.settings.cut_after_ms - waited
        name = "" if subscriber.stream is None else subscriber.stream.channel.name
        message = messages.slow(name, behind, int(behind_ms), int(cut_in))
        yield Outgoing((subscriber,), subscriber.codec.frame(message))


def tidy(channel: Channel, stream: ViewStream, now: float) -> None:
    """Drop a view that had no subscribers for a while, and filters' snapshots that nobody asked for."""
    if stream.view.id == WHOLE:
        return
    if stream.snapshot is not None and now - stream.snapshot.at >= SNAPSHOT_MS:
        stream.snapshot = None
    if any(
        wire_channel.live or wire_channel.idle or wire_channel.trailing
        for wire_channel in stream.wire_channels.values()
    ):
        return
    if stream.empty_since is None:
        stream.empty_since = now
    elif now - stream.empty_since >= LINGER_MS:
        stream.work = None
        channel.streams.pop(stream.view.id, None)


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
