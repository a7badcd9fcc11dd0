"""What the hub does by the clock: heartbeats, notices to who is slow, the cut of who gives no sign of reading."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve import messages
from serve.channel import Channel, Feed
from serve.delivery import Delivery
from serve.lane import Lane
from serve.position import WHOLE
from serve.subscriber import Subscriber

if TYPE_CHECKING:
    from serve.hub import Hub

log = logging.getLogger(__name__)

TOO_SLOW = 4408
LINGER_MS = 30_000  # a view that nobody looks through any more is kept up to date for a while: they may come back
SNAPSHOT_MS = 30_000  # a snapshot of a filter, for others who ask the same
# As long as a ping may be on its way and back. Then nothing more is written to who has not answered: what a stopped
# reader's socket still takes would cost the others the time to write it.
SILENT_MS = 1_000
SLICE = 100  # heartbeats at a time, about 1 ms, and as much again for the pongs
SPREAD = 2  # all have theirs within this part of the pause between heartbeats: a half


@dataclass(frozen=True, slots=True)
class Slice:
    """Some of those who read from a lane, as they were when the heartbeat's round came to the lane."""

    feed: Feed
    lane: Lane
    members: Sequence[Subscriber]


def slices(channels: Mapping[str, Channel]) -> Iterator[Slice]:
    """Everybody, some at a time."""
    for channel in list(channels.values()):
        for feed in list(channel.feeds.values()):
            for lane in list(feed.lanes.values()):
                members = lane.members()
                for start in range(0, len(members), SLICE):
                    yield Slice(feed, lane, members[start : start + SLICE])


def suspects(lane: Lane) -> list[Subscriber]:
    """Those whom :func:`checked` could have something to tell: not who has everything and was not asked for a sign."""
    live = [each for each in lane.live if each.waiting_since is not None or each.acked is not None]
    return [*live, *lane.idle, *lane.trailing]


def heartbeats(some: Slice, now: float, at: int) -> Iterator[Delivery]:
    """To whoever has everything, or as much as its window takes, with how far it says it is. Begins the wait for a sign
    of reading."""
    feed, lane = some.feed, some.lane
    groups: dict[int, list[Subscriber]] = {}
    for subscriber in some.members:
        has_everything = subscriber.live or subscriber.idle
        held = (subscriber.room == 0 or subscriber.silent) and not subscriber.paused  # by its window, or by us
        if subscriber.lane is not lane or not (has_everything or held):
            continue
        if subscriber.waiting_since is None and lane.codec.answers:
            subscriber.waiting_since = now
            subscriber.asked_at = lane.ring.next
        unread = lane.ring.next if has_everything else subscriber.cursor
        behind = lane.ring.next - (unread if subscriber.acked is None else subscriber.acked)
        groups.setdefault(behind, []).append(subscriber)
    if groups:
        channel = feed.channel
        token = channel.seal.token(feed.head)
        for behind, group in groups.items():
            message = messages.heartbeat(channel.name, token, behind, channel.state.facts.newest_at, at)
            yield Delivery(tuple(group), lane.codec.heartbeat(message))


def checked(hub: Hub, subscriber: Subscriber, lane: Lane, now: float) -> Iterator[Delivery]:
    """What has to be told to one subscriber, if anything."""
    waited = 0.0 if subscriber.waiting_since is None else now - subscriber.waiting_since
    if waited >= hub.settings.cut_after_ms:
        hub.counters.cut += 1
        log.warning("%s: cut, it has read nothing for %.0f ms", subscriber.label, waited)
        yield Delivery((subscriber,), close=TOO_SLOW, reason=f"nothing read for {waited:.0f} ms")
        return
    if subscriber.live and waited >= SILENT_MS:
        lane.falls_behind(subscriber)
        subscriber.silent = True
    behind, behind_ms = _behind(subscriber, lane, now, waited)
    if behind_ms >= hub.settings.slow_after_ms and not subscriber.told_slow:
        subscriber.told_slow = True
        hub.counters.slow += 1
        log.info("%s: slow, %d messages and %.0f ms behind", subscriber.label, behind, behind_ms)
        cut_in = hub.settings.cut_after_ms - waited
        name = "" if subscriber.feed is None else subscriber.feed.channel.name
        message = messages.slow(name, behind, int(behind_ms), int(cut_in))
        yield Delivery((subscriber,), subscriber.codec.frame(message))


def tidy(channel: Channel, feed: Feed, now: float) -> None:
    """Drop a view that has been without subscribers for a while, and snapshots of filters that nobody asked for."""
    if feed.view.id == WHOLE:
        return
    if feed.snapshot is not None and now - feed.snapshot.at >= SNAPSHOT_MS:
        feed.snapshot = None
    if any(lane.live or lane.idle or lane.trailing for lane in feed.lanes.values()):
        return
    if feed.empty_since is None:
        feed.empty_since = now
    elif now - feed.empty_since >= LINGER_MS:
        feed.work = None
        channel.feeds.pop(feed.view.id, None)


def _behind(subscriber: Subscriber, lane: Lane, now: float, waited: float) -> tuple[int, float]:
    """Messages, and for how long the first of them has been there."""
    ring = lane.ring
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
