"""A subscriber as the hub sees it: its link, its place in a ring, and what the hub wants done for it.

A transport is three things: a :class:`~serve.core.codec.Codec`, which makes a message's bytes once for everybody; a
:class:`Link`, which takes them to one subscriber; and code that reads the request and hands a :class:`Subscriber` with
the link to :meth:`serve.tables.tables.Tables.join`. The hub does the rest: what comes next, how far behind the
subscriber is, when it is told and cut. In return a transport tells the hub :meth:`~serve.core.hub.Hub.paused` and
:meth:`~serve.core.hub.Hub.drained` when its buffer fills and empties, :meth:`~serve.core.hub.Hub.acknowledged` when the
other side acknowledges, and :meth:`~serve.core.hub.Hub.unsubscribed` at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from serve.core.codec import Codec
from serve.core.position import Position
from serve.errors import RequestError
from serve.security.access import OPEN, Principal

if TYPE_CHECKING:
    from serve.core.channel import ViewStream
    from serve.core.ring import SharedSnapshot, WireChannel

log = logging.getLogger(__name__)


class Link(Protocol):
    """One connection. Only :meth:`drained` waits."""

    def write(self, data: bytes) -> None:
        """Take bytes of whole messages, now.

        Only for live subscribers, and for messages out of turn (heartbeats, ``slow``).
        """

    def pump(self) -> None:
        """Write what :meth:`serve.core.hub.Hub.data_to_send` gives, until it gives nothing or the socket is full."""

    def close(self, code: int, reason: str) -> None:
        """Send the reason, then close; abort if the other side does not take it. docs/protocol.md has the codes."""

    def buffered(self) -> int:
        """Bytes that the socket has not taken yet. When they shrink, the other side reads."""

    async def drained(self) -> None:
        """Return when the socket takes more or is gone. For replays, which make data at its pace."""


class Subscriber:
    """A cursor into the ring of a wire channel.

    It is *live* when everything has been written to it: a new frame goes straight to its socket. Otherwise it
    *trails*: its backlog is sent first, then the ring from its cursor on, as its socket drains. A subscriber with a
    window is never
    live: when it has everything it is *idle*, and is woken. One that leaves a ping unanswered is *silent*: it trails
    and is handed nothing.

    Args:
        link: its transport; the hub only hands it back.
        codec: its wire form.
        label: for logs.
        principal: its rights.
    """

    __slots__ = (
        "acked",
        "asked_at",
        "at",
        "backlog",
        "codec",
        "conflate",
        "cursor",
        "idle",
        "label",
        "link",
        "live",
        "parts",
        "paused",
        "principal",
        "replaying",
        "silent",
        "snapshot",
        "stream",
        "told_slow",
        "unacked",
        "waiting_since",
        "window",
        "wire_channel",
    )

    def __init__(self, link: Link, codec: Codec, label: str = "", principal: Principal = OPEN) -> None:
        self.link = link
        self.codec = codec
        self.label = label
        self.principal = principal
        self.stream: ViewStream | None = None
        self.wire_channel: WireChannel | None = None
        self.cursor = 0
        self.at: Position | None = None  # position after the bytes handed out so far, while it is not live
        self.backlog: list[tuple[bytes, Position | None]] = []  # goes out before anything else
        self.snapshot: SharedSnapshot | None = None  # goes out after the backlog
        self.parts = 0  # of the snapshot, sent so far
        self.live = False
        self.idle = False  # has everything, and a window
        self.paused = False
        self.silent = False  # it left a ping unanswered: it gets nothing until it shows a sign of reading
        self.replaying = False
        self.told_slow = False
        self.conflate = False
        self.window = 0
        self.unacked: list[Position] = []  # changes sent and not acknowledged, if it has a window
        self.waiting_since: float | None = None  # no sign of reading since then, ms
        self.asked_at = 0  # the ring's next number when it was pinged
        self.acked: int | None = None  # cursor after the last acknowledged message

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
    """What a transport has to do.

    Attributes:
        to: for whom.
        data: bytes to write now, whatever the transport's buffer holds.
        wake: ask :meth:`serve.core.hub.Hub.data_to_send` for each of them.
        close: close code; 0: stay connected.
        reason: of the close.
    """

    to: tuple[Subscriber, ...]
    data: bytes = b""
    wake: bool = False
    close: int = 0
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
                _woken(subscriber)
        if delivery.close:
            for subscriber in delivery.to:
                subscriber.link.close(delivery.close, delivery.reason)


def _woken(subscriber: Subscriber) -> None:
    """Pump one subscriber. Its failure does not affect the others."""
    try:
        subscriber.link.pump()
    except Exception:
        log.exception("%s: the subscription failed", subscriber.label)
        subscriber.link.close(RequestError.FAILED, "the server failed; its log says how")
