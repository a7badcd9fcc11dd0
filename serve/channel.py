"""What the hub keeps for one table and for one subscriber. Data with small invariants; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lakehouse.contract.settings import ServeSettings
from serve.messages import Message, change_messages, snapshot_messages
from serve.model import Change, in_order
from serve.position import Position
from serve.push.codec import Codec
from serve.push.link import Link
from serve.ring import Frame, Ring
from serve.rows import encode_rows
from serve.state import TableState


class Subscriber:
    """One connection: a cursor into a ring.

    It is *live* when everything has been written to it: then a new frame goes straight to its socket. Otherwise it
    *trails*: first its backlog is sent, then the ring from its cursor on, as its socket drains.

    Args:
        link: its transport; the hub only hands it back.
        codec: its wire form.
        label: who it is, for logs.
    """

    __slots__ = (
        "acked",
        "asked_at",
        "backlog",
        "channel",
        "codec",
        "cursor",
        "label",
        "link",
        "live",
        "paused",
        "replaying",
        "told_slow",
        "waiting_since",
    )

    def __init__(self, link: Link, codec: Codec, label: str = "") -> None:
        self.link = link
        self.codec = codec
        self.label = label
        self.channel: Channel | None = None
        self.cursor = 0
        self.backlog: tuple[bytes, ...] = ()
        self.live = False
        self.paused = False
        self.replaying = False
        self.told_slow = False
        self.waiting_since: float | None = None  # since when it has given no sign of reading, ms
        self.asked_at = 0  # the ring's next number when it was pinged
        self.acked: int | None = None  # the message after the last one that it says it has processed


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in one codec, shared by whoever needs one.

    Attributes:
        frames: its messages, framed.
        position: the state that it is.
        size: bytes.
        total: bytes that the ring had taken when it was made.
    """

    frames: tuple[bytes, ...]
    position: Position
    size: int
    total: int


@dataclass(slots=True)
class Lane:
    """A channel in one codec.

    Attributes:
        ring: its frames.
        live: subscribers who have everything.
        trailing: the others.
        total: bytes that went into the ring, ever.
        snapshot: the newest one made.
    """

    codec: Codec
    ring: Ring
    live: set[Subscriber] = field(default_factory=set)
    trailing: set[Subscriber] = field(default_factory=set)
    total: int = 0
    snapshot: Snapshot | None = None

    def members(self) -> tuple[Subscriber, ...]:
        """All its subscribers."""
        return (*self.live, *self.trailing)


class Channel:
    """One table and its subscribers.

    Args:
        state: the table's rows, changed by its tail in the same thread.
        codecs: wire forms that are kept.
        settings: bounds of the rings.
    """

    def __init__(self, state: TableState, codecs: Iterable[Codec], settings: ServeSettings) -> None:
        self.state = state
        self._settings = settings
        self.lanes = {codec.name: Lane(codec, self._new_ring()) for codec in codecs}

    @property
    def name(self) -> str:
        """The table's name."""
        return self.state.table.name

    @property
    def head(self) -> Position:
        """The position of one who has everything."""
        return Position(self.state.table.table_id, self.state.version)

    def taken(self, change: Change, now: float) -> dict[str, bytes]:
        """Put a change into the rings; its bytes by codec."""
        messages = change_messages(change)
        return {name: b"".join(self._framed(lane, messages, now)) for name, lane in self.lanes.items()}

    def restarted(self, state: TableState) -> None:
        """The table is another one now: the rings are empty, what subscribers had is void."""
        self.state = state
        for lane in self.lanes.values():
            lane.ring = self._new_ring()
            lane.snapshot = None

    def snapshot(self, codec: Codec) -> Snapshot:
        """A snapshot from which the ring goes on: the last one made, as long as little has happened since."""
        lane = self.lanes[codec.name]
        last = lane.snapshot
        if last is None or lane.ring.find(last.position) is None or (lane.total - last.total) * 4 > last.size:
            frames = tuple(codec.frame(message) for message in snapshot_messages(self.state, self.rows()))
            last = Snapshot(frames, self.head, sum(map(len, frames)), lane.total)
            lane.snapshot = last
        return last

    def rows(self, limit: int | None = None) -> list[bytes]:
        """Current rows as JSON objects, in the order of their keys."""
        keys: Sequence[tuple[object, ...]] = sorted(self.state.rows, key=in_order)[:limit]
        return encode_rows(self.state.table.columns, (self.state.rows[key] for key in keys))

    def _framed(self, lane: Lane, messages: Sequence[Message], now: float) -> list[bytes]:
        frames = []
        for message in messages:
            assert message.position is not None
            frame = Frame(lane.codec.frame(message), message.position, now)
            lane.ring.append(frame)
            lane.total += len(frame.data)
            frames.append(frame.data)
        return frames

    def _new_ring(self) -> Ring:
        return Ring(self.head, max_frames=self._settings.ring_frames, max_bytes=self._settings.ring_bytes)
