"""A view of one table in one wire form: the ring, and who reads from it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve.messages import PART_BYTES, Message, merged
from serve.position import Position, Seal
from serve.push.codec import Codec
from serve.ring import Frame, Ring
from serve.subscriber import Subscriber

_MERGES_KEPT = 4  # those who lag together share the merged change


@dataclass(slots=True)
class Snapshot:
    """A snapshot of a view, shared by whoever needs one, in whatever wire form.

    Attributes:
        messages: in order.
        position: the state that it is.
        size: bytes as JSON.
        total: bytes that the feed had made when it was made.
        at: ms on the hub's clock.
    """

    messages: Sequence[Message]
    position: Position
    size: int
    total: int
    at: float
    _frames: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def frame(self, codec: Codec, part: int) -> bytes:
        """A part's bytes, made once for each wire form and not before somebody takes them."""
        key = (codec.name, part)
        data = self._frames.get(key)
        if data is None:
            data = self._frames[key] = codec.frame(self.messages[part])
        return data


class Lane:
    """See the module.

    Args:
        codec: its wire form.
        ring: its frames.
        seal: writes positions of merged changes.
        conflates: whether messages are kept beside their bytes, for :meth:`merge`.
    """

    def __init__(self, codec: Codec, ring: Ring, seal: Seal, *, conflates: bool = False) -> None:
        self.codec = codec
        self.ring = ring
        self.live: set[Subscriber] = set()
        self.idle: set[Subscriber] = set()
        self.trailing: set[Subscriber] = set()
        self._conflates = conflates
        self._seal = seal
        self._listed: tuple[Subscriber, ...] | None = None  # those who are live, as long as they are the same
        self._merges: dict[tuple[int, int], tuple[bytes, int]] = {}

    def members(self) -> tuple[Subscriber, ...]:
        """All its subscribers."""
        return (*self.live, *self.idle, *self.trailing)

    def listed(self) -> tuple[Subscriber, ...]:
        """Who is live."""
        if self._listed is None:
            self._listed = tuple(self.live)
        return self._listed

    def append(self, messages: Sequence[Message], now: float) -> bytes:
        """Frame messages, once for all, and put them into the ring. Their bytes, joined."""
        parts = []
        for message in messages:
            assert message.position is not None
            data = self.codec.frame(message)
            self.ring.append(Frame(data, message.position, now, message if self._conflates else None))
            parts.append(data)
        self._merges.clear()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def prepend(self, start: Position, messages: Sequence[Message], now: float) -> list[Frame]:
        """Frame messages from before the ring, and put those into it that end where it starts and have room."""
        kept = messages if self._conflates else [None] * len(messages)
        frames = [
            Frame(self.codec.frame(m), m.position, now, k)
            for m, k in zip(messages, kept, strict=True)
            if m.position is not None
        ]
        self.ring.prepend(start, frames)
        return frames

    def merge(self, cursor: int) -> tuple[bytes, int] | None:
        """The changes from the cursor on as one, as many as make one message, and the cursor after them.

        Returns:
            None: there are not two that can be merged.
        """
        key = (cursor, self.ring.next)
        if (known := self._merges.get(key)) is not None:
            return known
        taken: list[Message] = []
        size = 0
        for frame in self.ring.frames(cursor, 4 * PART_BYTES):
            message = frame.message
            if message is None or (taken and message.table is not taken[0].table):
                break
            size += len(message.body)
            if taken and size > PART_BYTES and len({*taken[0].deletes, *message.deletes}) * 2 > len(taken):
                break
            taken.append(message)
        if len(taken) < 2:
            return None
        made = self.codec.frame(merged(taken, self._seal)), cursor + len(taken)
        while len(self._merges) >= _MERGES_KEPT:
            self._merges.pop(next(iter(self._merges)))
        self._merges[key] = made
        return made

    def join(self, subscriber: Subscriber) -> None:
        """It trails, for now."""
        subscriber.lane = self
        self.trailing.add(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        """It is gone."""
        self._listed = None
        for group in (self.live, self.idle, self.trailing):
            group.discard(subscriber)
        subscriber.lane = None

    def has_everything(self, subscriber: Subscriber) -> None:
        """It has read to the end: what comes goes straight to its socket, or wakes it where it has a window."""
        self.trailing.discard(subscriber)
        if subscriber.window:
            subscriber.idle = True
            self.idle.add(subscriber)
        else:
            subscriber.live = True
            self.live.add(subscriber)
            self._listed = None

    def falls_behind(self, subscriber: Subscriber) -> None:
        """It was live and has had everything until now; what comes next it reads from the ring, when it can."""
        subscriber.cursor = self.ring.next
        subscriber.at = self.ring.head
        self.trails(subscriber)

    def trails(self, subscriber: Subscriber) -> None:
        """It reads from the ring, from its cursor on."""
        subscriber.live = subscriber.idle = False
        self._listed = None
        self.live.discard(subscriber)
        self.idle.discard(subscriber)
        self.trailing.add(subscriber)
