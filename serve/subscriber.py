"""One subscription, as the hub sees it: a cursor into a ring. Data with small invariants; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.position import Position
from serve.principal import OPEN, Principal
from serve.push.codec import Codec
from serve.push.link import Link

if TYPE_CHECKING:
    from serve.channel import Feed
    from serve.lane import Lane, Snapshot


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """What a subscriber asks for, the same over every transport.

    Attributes:
        table: name of the table.
        position: where it goes on; None: a snapshot first.
        where: SQL condition on rows; empty: all of them.
        columns: names of the columns wanted, the key's are sent in any case; empty: all of them.
        select: a live aggregate, ``SELECT … GROUP BY …``, instead of rows.
        conflate: when it lags, it gets the latest of each key instead of every change.
        window: how many changes it may be sent that it has not acknowledged; 0: any number.
    """

    table: str
    position: Position | None = None
    where: str = ""
    columns: tuple[str, ...] = ()
    select: str = ""
    conflate: bool = False
    window: int = 0


class Subscriber:
    """A cursor into a lane's ring.

    It is *live* when everything has been written to it: then a new frame goes straight to its socket. Otherwise it
    *trails*: first its backlog is sent, then the ring from its cursor on, as its socket drains. One with a window is
    never live: when it has everything it is *idle*, and woken. One that leaves a ping unanswered is *silent*: it trails
    and is handed nothing.

    Args:
        link: its transport; the hub only hands it back.
        codec: its wire form.
        label: who it is, for logs.
        principal: what it may see.
    """

    __slots__ = (
        "acked",
        "asked_at",
        "at",
        "backlog",
        "codec",
        "conflate",
        "cursor",
        "feed",
        "idle",
        "label",
        "lane",
        "link",
        "live",
        "parts",
        "paused",
        "principal",
        "replaying",
        "silent",
        "snapshot",
        "told_slow",
        "unacked",
        "waiting_since",
        "window",
    )

    def __init__(self, link: Link, codec: Codec, label: str = "", principal: Principal = OPEN) -> None:
        self.link = link
        self.codec = codec
        self.label = label
        self.principal = principal
        self.feed: Feed | None = None
        self.lane: Lane | None = None
        self.cursor = 0
        self.at: Position | None = None  # where the bytes handed out so far bring it, while it is not live
        self.backlog: list[tuple[bytes, Position | None]] = []  # goes out before anything else
        self.snapshot: Snapshot | None = None  # goes out after the backlog
        self.parts = 0  # of the snapshot, sent so far
        self.live = False
        self.idle = False  # has everything, and a window
        self.paused = False
        self.silent = False  # a ping of it is unanswered: it is handed nothing until it gives a sign
        self.replaying = False
        self.told_slow = False
        self.conflate = False
        self.window = 0
        self.unacked: list[Position] = []  # of changes sent, where there is a window; never longer than it
        self.waiting_since: float | None = None  # since when it has given no sign of reading, ms
        self.asked_at = 0  # the ring's next number when it was pinged
        self.acked: int | None = None  # the message after the last one that it says it has processed

    @property
    def room(self) -> int | None:
        """How many more changes its window takes; None: it has none."""
        return max(0, self.window - len(self.unacked)) if self.window else None

    def sent(self, positions: Sequence[Position]) -> None:
        """Changes that were handed to its socket."""
        if positions:
            self.at = positions[-1]
            if self.window:
                self.unacked.extend(positions)

    def forget(self) -> None:
        """Nothing that was on its way to it counts any more."""
        self.backlog.clear()
        self.unacked.clear()
        self.snapshot = None
        self.parts = 0
        self.acked = None
        self.replaying = self.live = self.idle = self.silent = False
