"""The contract of collectors, and the one way from any of them into the log and on to Kafka.

A collector is two verbs: ``run`` (receive until cancelled) and ``status`` (what it can say of its upstream). A
*position* is the index of the next message to read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ingest.acks import RecentEvents
from ingest.border import Admitted, Border
from ingest.delivery import Delivery
from ingest.events import Lane, LoggedEvent
from ingest.log import MessageLog


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which an upstream that cannot resume was not heard.

    Attributes:
        since: last time before that something was received, microseconds since the epoch.
        until: when it was connected again.
        reason: why the connection ended.
    """

    since: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True)
class UpstreamStatus:
    """What is known of one upstream.

    Attributes:
        lane: name of its lane.
        url: where it is.
        connected: whether it is connected now.
        position: index of the next message to read, or None where it has none.
        gaps: the newest ones.
        gap_count: all there ever were.
    """

    lane: str
    url: str
    connected: bool
    position: int | None
    gaps: tuple[Gap, ...]
    gap_count: int


class Collector(Protocol):
    """Takes events from somewhere until it is cancelled."""

    async def run(self) -> None:
        """Receive until cancelled; survives every error of the upstream."""

    def status(self) -> UpstreamStatus:
        """The state of its upstream now."""


class Intake:
    """What one lane's events go through: border, log, delivery.

    Args:
        border: of the lane's source.
        lane: in the log.
        log: where the events become durable.
        delivery: how they reach Kafka.
        recent: remembers events whose senders may ask for them; None for one-way lanes.
    """

    def __init__(
        self, border: Border, lane: Lane, log: MessageLog, delivery: Delivery, recent: RecentEvents | None = None
    ) -> None:
        self.border = border
        self.lane = lane
        self.log = log
        self._delivery = delivery
        self._recent = recent

    def take(self, event: Admitted, position: int | None = None) -> LoggedEvent:
        """Append an event and send it on.

        Args:
            event: as the border let it in.
            position: where the upstream is to be read next.

        Raises:
            LogFull: the log has reached its bound; the event was not taken.
            LogUnavailable: the disk refuses writes; the event was not taken.
        """
        logged = self.log.append(self.lane, event.envelope, event.key, event.payload, position)
        if self._recent is not None:
            self._recent.logged(event.envelope)
        self._delivery.offer(logged)
        return logged
