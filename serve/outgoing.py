"""The next bytes of one subscriber: out of its backlog, a snapshot or the ring. No I/O; moves its cursor."""

from __future__ import annotations

from serve.delivery import Counters
from serve.lane import Lane
from serve.position import Position
from serve.subscriber import Subscriber

SLICE_BYTES = 131_072  # most that a trailing subscriber is handed at once


def from_backlog(subscriber: Subscriber, counters: Counters) -> bytes | None:
    """What it is to hear before anything else; None: its window is full."""
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


def from_snapshot(subscriber: Subscriber, lane: Lane, counters: Counters) -> bytes:
    """The next part of its snapshot."""
    snapshot = subscriber.snapshot
    assert snapshot is not None
    data = snapshot.frame(lane.codec, subscriber.parts)
    subscriber.parts += 1
    counters.messages += 1
    if subscriber.parts == len(snapshot.messages):
        subscriber.snapshot = None
        subscriber.at = snapshot.position
    return data


def from_ring(subscriber: Subscriber, lane: Lane, counters: Counters) -> bytes | None:
    """Frames from its cursor on, which the ring must hold; None: it has everything, or its window is full."""
    room = subscriber.room
    if room == 0:
        return None
    if subscriber.cursor == lane.ring.next:
        if not subscriber.paused and not subscriber.idle:
            lane.has_everything(subscriber)
        return None
    if subscriber.conflate and (both := lane.merge(subscriber.cursor)) is not None:
        data, subscriber.cursor = both
        counters.messages += 1
        counters.conflated += 1
        subscriber.sent([lane.ring.frame(subscriber.cursor - 1).position])
        return data
    frames = lane.ring.frames(subscriber.cursor, SLICE_BYTES, room)
    subscriber.cursor += len(frames)
    counters.messages += len(frames)
    subscriber.sent([frame.position for frame in frames if frame.data])
    return b"".join([frame.data for frame in frames])
