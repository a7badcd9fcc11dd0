"""The contract of collectors, and the one way from any of them into the log and on to Kafka.

A collector is two verbs: ``run`` (receive until cancelled) and ``status`` (what it can say of its upstream). A
*position* is the index of the next message to read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ingest.acks import RecentEvents
from ingest.border import Admitted, Border
from ingest.delivery import Delivery
from ingest.enrich import Enricher
from ingest.events import Lane, LoggedEvent, Segment
from ingest.log import MessageLog
from lakehouse.contract.envelope import UPSTREAM_ID
from lakehouse.contract.trace import EventLines

Extra = tuple[tuple[str, str], ...]
_NOWHERE = Segment(-1, Path())  # of events that are shed
_lines = EventLines(logging.getLogger(__name__))


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
        cursor: the upstream's own name of the last message's place (Last-Event-ID), or None.
        counts: what else this kind counts, e.g. datagrams lost.
        ended: why it is not connected; empty while it is.
    """

    lane: str
    url: str
    connected: bool
    position: int | None
    gaps: tuple[Gap, ...]
    gap_count: int
    cursor: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""


class Collector(Protocol):
    """Takes events from somewhere until it is cancelled."""

    async def run(self) -> None:
        """Receive until cancelled; survives every error of the upstream."""

    def status(self) -> UpstreamStatus:
        """The state of its upstream now."""

    def close(self) -> None:
        """Let go of what it bound when it was made; it does not run any more, or never did."""


class Intake:
    """What one lane's events go through: border, log, delivery.

    Args:
        border: of the lane's source.
        lane: in the log.
        log: where the events become durable.
        delivery: how they reach Kafka.
        recent: remembers events whose senders may ask for them; None for one-way lanes.
        enricher: adds reference data to the event's headers.
    """

    def __init__(
        self,
        border: Border,
        lane: Lane,
        log: MessageLog,
        delivery: Delivery,
        recent: RecentEvents | None = None,
        enricher: Enricher | None = None,
    ) -> None:
        self.border = border
        self.lane = lane
        self.log = log
        self._delivery = delivery
        self._recent = recent
        self._enricher = enricher

    def not_ready(self) -> str:
        """Why no events are to be taken now; empty: they are."""
        missing = self._enricher.missing if self._enricher is not None else ""
        return f"the reference data of source {self.border.source.name!r} is being read: {missing}" if missing else ""

    async def until_ready(self) -> None:
        """Return when its reference data is there."""
        if self._enricher is not None:
            await self._enricher.complete()

    def take(self, event: Admitted, position: int | None = None, extra: Extra = ()) -> LoggedEvent:
        """Append an event and send it on.

        Args:
            event: as the border let it in.
            position: where the upstream is to be read next.
            extra: further headers.

        Raises:
            LogFull: the log has reached its bound; the event was not taken.
            LogUnavailable: the disk refuses writes; the event was not taken.

        Returns:
            the event in the log; one that is shed is in none, has the sequence number -1 and no group.
        """
        envelope = event.envelope
        if event.shed:
            return self._leave_out(event, position, extra)
        if event.refusal is not None:
            self._tell(event)
        if self._enricher is not None and event.refusal is None:
            extra += self._enricher(event)
        if extra:
            envelope = dataclasses.replace(envelope, extra=envelope.extra + extra)
        logged = self.log.append(self.lane, envelope, event.key, event.payload, position)
        if self._recent is not None:
            logged.fate = self._recent.logged(envelope)
        self._delivery.offer(logged)
        return logged

    def _tell(self, event: Admitted) -> None:
        envelope = event.envelope
        _lines.say(
            logging.INFO,
            "is refused",
            envelope.reject or "",
            event_id=envelope.event_id,
            source=envelope.source,
            tenant=envelope.tenant,
        )

    def take_all(self, events: Sequence[Admitted]) -> list[LoggedEvent]:
        """Append events that came together and send them on; as :meth:`take` of each.

        All are taken or none, unless the source enriches or sheds.

        Raises:
            LogFull: the log has reached its bound.
            LogUnavailable: the disk refuses writes.
        """
        if self._enricher is not None or [event for event in events if event.shed]:
            return [self.take(event) for event in events]
        rejected = self.lane.rejected
        logged = self.log.append_all(self.lane, events)
        if self.lane.rejected > rejected:
            for event in events:
                if event.refusal is not None:
                    self._tell(event)
        if self._recent is not None:
            self._recent.logged_all(logged)
        self._delivery.offer_all(logged)
        return logged

    def _leave_out(self, event: Admitted, position: int | None, extra: Extra) -> LoggedEvent:
        lane = self.lane
        lane.shed += 1
        if position is not None:
            lane.position = position
        lane.cursor = dict(extra).get(UPSTREAM_ID, lane.cursor)
        return LoggedEvent(-1, lane, event.envelope, event.key, event.payload, _NOWHERE, 0, None)
