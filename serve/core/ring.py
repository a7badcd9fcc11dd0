"""The ring: the last messages of one view in one wire form, framed once and read by any number of subscribers.

A subscriber is a cursor: the number of the message to be sent next. Numbers are never used twice, so a cursor whose
message has been dropped is recognised. A :class:`WireChannel` is a ring with its readers. No I/O, no clock.

A transport is three things: a :class:`~serve.core.messages.Codec`; a :class:`Link`, which takes bytes to one
subscriber; and code that reads the request and hands a :class:`Subscriber` with the link to
:meth:`serve.tables.tables.Tables.join`. The hub does the rest: what comes next, how far behind the subscriber is, when
it is told and cut. In return a transport tells the hub :meth:`~serve.core.hub.Hub.paused` and
:meth:`~serve.core.hub.Hub.drained` when its buffer fills and empties, :meth:`~serve.core.hub.Hub.acknowledged` when the
other side acknowledges, and :meth:`~serve.core.hub.Hub.unsubscribed` at the end.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from serve.core.messages import PART_BYTES, Codec, Message, merged
from serve.core.model import OPEN, Principal
from serve.core.position import Position, Seal
from serve.errors import RequestError

if TYPE_CHECKING:
    from serve.core.channel import ViewStream

log = logging.getLogger(__name__)

_MERGES_KEPT = 4  # subscribers that lag together share a merged change


@dataclass(frozen=True, slots=True)
class RingFrame:
    """One message in its wire form."""

    data: bytes  # bytes as they go on the wire
    position: Position  # where the message brings a subscriber
    at: float  # when it came, ms on the hub's clock
    message: Message | None = None  # kept if it may be merged with others


class Ring:
    """Frames ``first`` to ``next - 1``, within a bound. The newest frame is kept whatever its size."""

    def __init__(self, start: Position, *, max_frames: int, max_bytes: int) -> None:
        self._frames: deque[RingFrame] = deque()
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self.start = start  # oldest position that can be served from here
        self.bytes = 0
        self.first = 0

    @property
    def next(self) -> int:
        """Number of the next frame: the cursor of a subscriber that has everything."""
        return self.first + len(self._frames)

    @property
    def head(self) -> Position:
        """Position of a subscriber that has everything."""
        return self._frames[-1].position if self._frames else self.start

    @property
    def full(self) -> bool:
        """Whether :meth:`prepend` has no room."""
        return len(self._frames) >= self._max_frames or self.bytes >= self._max_bytes

    def append(self, frame: RingFrame) -> None:
        """Add the newest frame, and drop old ones beyond the bound."""
        self._frames.append(frame)
        self.bytes += len(frame.data)
        while len(self._frames) > 1 and (len(self._frames) > self._max_frames or self.bytes > self._max_bytes):
            dropped = self._frames.popleft()
            self.bytes -= len(dropped.data)
            self.start = dropped.position
            self.first += 1

    def prepend(self, start: Position, frames: Sequence[RingFrame]) -> int:
        """Extend the ring backwards, as far as the bound allows, by consecutive frames that end at :attr:`start`.

        ``start`` is the position before the first of them. Returns how many were taken, counted from the end.
        """
        if not frames or frames[-1].position != self.start:
            return 0
        taken = 0
        for frame in reversed(frames):
            if len(self._frames) >= self._max_frames or self.bytes + len(frame.data) > self._max_bytes:
                break
            self._frames.appendleft(frame)
            self.bytes += len(frame.data)
            self.first -= 1
            taken += 1
        if taken:
            self.start = frames[-taken - 1].position if taken < len(frames) else start
        return taken

    def find(self, position: Position) -> int | None:
        """Cursor of a subscriber at this position; None if the position is older than the ring or ahead of it."""
        if not self.start <= position <= self.head:
            return None
        return self.first + bisect_right(self._frames, position, key=lambda frame: frame.position)

    def frame(self, cursor: int) -> RingFrame:
        """The frame with this number, which must be held."""
        return self._frames[cursor - self.first]

    def frames(self, cursor: int, max_bytes: int, max_frames: int | None = None) -> list[RingFrame]:
        """Frames from the cursor on; at least one if there is one."""
        found: list[RingFrame] = []
        size = 0
        start = cursor - self.first
        for frame in islice(self._frames, start, None if max_frames is None else start + max_frames):
            if found and size + len(frame.data) > max_bytes:
                break
            found.append(frame)
            size += len(frame.data)
        return found


@dataclass(slots=True)
class SharedSnapshot:
    """A snapshot of a view, shared by all who need one, in any wire form."""

    messages: Sequence[Message]
    position: Position
    size: int  # bytes as JSON
    total: int  # bytes that the stream had made at that moment
    at: float  # ms on the hub's clock
    _frames: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def frame(self, codec: Codec, part: int) -> bytes:
        """A part's bytes, made once for each wire form, when first needed."""
        key = (codec.name, part)
        data = self._frames.get(key)
        if data is None:
            data = self._frames[key] = codec.frame(self.messages[part])
        return data


class Link(Protocol):
    """One connection. Only :meth:`drained` waits."""

    def write(self, data: bytes) -> None:
        """Take bytes of whole messages, now: of live subscribers, or out of turn (heartbeats, ``slow``)."""

    def pump(self) -> None:
        """Write what :meth:`serve.core.hub.Hub.data_to_send` gives, until it gives nothing or the socket is full."""

    def close(self, code: int, reason: str) -> None:
        """Send the reason, then close; abort if the other side does not take it. Codes: docs/reference/protocol.md."""

    def buffered(self) -> int:
        """Bytes that the socket has not taken yet. When they shrink, the other side reads."""

    async def drained(self) -> None:
        """Return when the socket takes more or is gone. For replays, which make data at its pace."""


@dataclass(eq=False, repr=False, slots=True)
class Subscriber:
    """A cursor into the ring of a wire channel.

    It is *live* when everything has been written to it: a new frame goes straight to its socket. Otherwise it
    *trails*: its backlog is sent first, then the ring from its cursor on, as its socket drains. A subscriber with a
    window is never live: when it has everything it is *idle*, and is woken. One that leaves a ping unanswered is
    *silent*: it trails and is handed nothing until it shows a sign of reading.
    """

    link: Link
    codec: Codec
    label: str = ""
    principal: Principal = OPEN
    stream: ViewStream | None = None
    wire_channel: WireChannel | None = None
    cursor: int = 0
    at: Position | None = None  # position after the bytes handed out so far, while it is not live
    backlog: list[tuple[bytes, Position | None]] = field(default_factory=list)  # goes out before anything else
    snapshot: SharedSnapshot | None = None  # goes out after the backlog
    parts: int = 0  # of the snapshot, sent so far
    live: bool = False
    idle: bool = False
    paused: bool = False
    silent: bool = False
    replaying: bool = False
    told_slow: bool = False
    conflate: bool = False
    window: int = 0
    unacked: list[Position] = field(default_factory=list)  # changes sent and not acknowledged, if it has a window
    waiting_since: float | None = None  # no sign of reading since then, ms
    asked_at: int = 0  # the ring's next number when it was pinged
    acked: int | None = None  # cursor after the last acknowledged message

    @property
    def room(self) -> int | None:
        """How many more changes its window takes; None if it has no window."""
        return max(0, self.window - len(self.unacked)) if self.window else None

    def sent(self, positions: Sequence[Position]) -> None:
        """Changes were handed to its socket."""
        if positions:
            self.at = positions[-1]
            if self.window:
                self.unacked.extend(positions)

    def forget(self) -> None:
        """Forget whatever was on its way to it."""
        self.backlog.clear()
        self.unacked.clear()
        self.snapshot = None
        self.parts = 0
        self.acked = None
        self.replaying = self.live = self.idle = self.silent = False


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a transport has to do."""

    to: tuple[Subscriber, ...]
    data: bytes = b""  # bytes to write now, whatever the transport's buffer holds
    wake: bool = False  # ask `Hub.data_to_send` for each of them
    close: int = 0  # close code; 0: stay connected
    reason: str = ""


@dataclass(slots=True)
class HubCounters:
    """Events since the start, for metrics."""

    subscribed: int = 0
    messages: int = 0
    bytes: int = 0
    snapshots: int = 0
    resumed: int = 0
    conflated: int = 0
    slow: int = 0
    cut: int = 0
    refused: int = 0
    expired: dict[str, int] = field(default_factory=lambda: {"log": 0, "lagged": 0, "filter": 0})


def deliver(deliveries: Iterable[Outgoing]) -> None:
    for delivery in deliveries:
        if delivery.data:
            for subscriber in delivery.to:
                subscriber.link.write(delivery.data)
        if delivery.wake:
            for subscriber in delivery.to:
                try:
                    subscriber.link.pump()
                except Exception:  # it does not affect the others
                    log.exception("%s: the subscription failed", subscriber.label)
                    subscriber.link.close(RequestError.FAILED, "the server failed; its log says how")
        if delivery.close:
            for subscriber in delivery.to:
                subscriber.link.close(delivery.close, delivery.reason)


class WireChannel:
    """A ring in one wire form, and its readers. If it conflates, messages are kept with their bytes."""

    def __init__(self, codec: Codec, ring: Ring, seal: Seal, *, conflates: bool = False) -> None:
        self.codec = codec
        self.ring = ring
        self.live: set[Subscriber] = set()
        self.idle: set[Subscriber] = set()
        self.trailing: set[Subscriber] = set()
        self._conflates = conflates
        self._seal = seal
        self._listed: tuple[Subscriber, ...] | None = None  # cached tuple of ``live``
        self._merges: dict[tuple[int, int], tuple[bytes, int]] = {}

    def members(self) -> tuple[Subscriber, ...]:
        return (*self.live, *self.idle, *self.trailing)

    def listed(self) -> tuple[Subscriber, ...]:
        """Live subscribers; the same tuple as long as they are the same."""
        if self._listed is None:
            self._listed = tuple(self.live)
        return self._listed

    def append(self, messages: Sequence[Message], now: float) -> bytes:
        """Frame messages, once for all, and append them to the ring. Returns their bytes, joined."""
        parts = []
        for message in messages:
            assert message.position is not None
            data = self.codec.frame(message)
            self.ring.append(RingFrame(data, message.position, now, message if self._conflates else None))
            parts.append(data)
        self._merges.clear()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def prepend(self, start: Position, messages: Sequence[Message], now: float) -> list[RingFrame]:
        """Frame messages from before the ring; those that end where it starts go into it as far as there is room."""
        kept = messages if self._conflates else [None] * len(messages)
        frames = [
            RingFrame(self.codec.frame(m), m.position, now, k)
            for m, k in zip(messages, kept, strict=True)
            if m.position is not None
        ]
        self.ring.prepend(start, frames)
        return frames

    def merge(self, cursor: int) -> tuple[bytes, int] | None:
        """As many changes from the cursor on as fit one message, merged; and the cursor after them.

        None if fewer than two.
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
        """It trails at first."""
        subscriber.wire_channel = self
        self.trailing.add(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        self._listed = None
        for group in (self.live, self.idle, self.trailing):
            group.discard(subscriber)
        subscriber.wire_channel = None

    def has_everything(self, subscriber: Subscriber) -> None:
        """It has read to the end: new frames go straight to its socket, or wake it if it has a window."""
        self.trailing.discard(subscriber)
        if subscriber.window:
            subscriber.idle = True
            self.idle.add(subscriber)
        else:
            subscriber.live = True
            self.live.add(subscriber)
            self._listed = None

    def falls_behind(self, subscriber: Subscriber) -> None:
        """It was live and cannot take more: it will read from the ring, from the next frame on."""
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
