"""What the message log deals in: lanes, groups, and events with their place in it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakehouse.contract.envelope import Envelope

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the log.

    Attributes:
        number: rising; part of the file's name.
        path: of the file.
        size: bytes it has or will have when what is pending is written.
        durable: bytes that are on the disk.
        unacked: events in it that Kafka has not acknowledged.
    """

    number: int
    path: Path
    size: int = 0
    durable: int = 0
    unacked: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """One way events come in (a source's collector), with its cumulative state.

    Attributes:
        index: in the log.
        name: ``SOURCE/KIND/ORDINAL``.
        source: name of the source.
        position: where the upstream is to be read next (index of the next message), or None.
        cursor: the upstream's own name of the place after which to read on (Last-Event-ID), or None.
        received: events appended.
        shed: events that were left out because there were too many; they were never appended.
        durable: events that are on the disk.
        rejected: of those received, the ones the border refused.
        failed: events that Kafka will never take, now in the failed store.
        in_log: events that Kafka has not acknowledged yet.
        gaps: times that an upstream came back without being able to resume.
        last_at: received_at of the newest event, microseconds since the epoch; 0: none yet.
        suspect_left: events of a resumed upstream that a crashed run may have sent to Kafka already.
    """

    index: int
    name: str
    source: str
    position: int | None = None
    received: int = 0
    durable: int = 0
    rejected: int = 0
    failed: int = 0
    in_log: int = 0
    gaps: int = 0
    last_at: int = 0
    suspect_left: int = 0
    cursor: str | None = None
    shed: int = 0

    @property
    def published(self) -> int:
        """Events that Kafka has acknowledged."""
        return self.received - self.failed - self.in_log

    def state(self) -> dict[str, Any]:
        """What a mark keeps of it; the rest follows from the events."""
        return {
            "name": self.name,
            "source": self.source,
            "position": self.position,
            "received": self.received,
            "rejected": self.rejected,
            "failed": self.failed,
            "gaps": self.gaps,
            "last_at": self.last_at,
            "suspect_left": self.suspect_left,
            "cursor": self.cursor,
            "shed": self.shed,
        }


class Group:
    """Events that become durable together."""

    __slots__ = ("_closed", "_future", "_then", "counts", "opened", "unacked")

    def __init__(self) -> None:
        self.opened = time.perf_counter()
        self.counts: dict[Lane, int] = {}
        self.unacked = 0
        self._closed = False
        self._future: asyncio.Future[None] | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def acknowledgeable(self) -> bool:
        """Whether its events may be acknowledged to their senders: they are durable, or Kafka has all of them."""
        return self._closed

    async def wait(self) -> None:
        """Return when its events may be acknowledged."""
        if self._closed:
            return
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._future)  # one waiter that is cancelled must not cancel it for the others

    def then(self, call: Callable[[], None]) -> None:
        """Call this when its events may be acknowledged, which is not yet so; what it raises is logged."""
        self._then.append(call)

    def close(self) -> None:
        """The group is durable, or Kafka has all of it."""
        if not self._closed:
            self._closed = True
            waiting, self._then = self._then, []
            for call in waiting:
                try:
                    call()
                except Exception:  # whatever it is, the others are told
                    logger.exception("somebody could not be told that events are safe")
            if self._future is not None and not self._future.done():
                self._future.set_result(None)


@dataclass(slots=True)
class Fate:
    """What has become of an event that its sender may ask for.

    Attributes:
        reject: why the border refused it, or None.
        topic: where Kafka has it; empty: it has not yet.
        partition: the same.
        offset: the same.
        failed: why Kafka will never take it; empty: it may.
    """

    reject: str | None
    topic: str = ""
    partition: int = -1
    offset: int = -1
    failed: str = ""


@dataclass(slots=True, eq=False)
class LoggedEvent:
    """An event in the log. (Not frozen: one is made for each event, and freezing triples what that costs.)

    Attributes:
        seq: its place in the order of the log.
        lane: the way it came.
        envelope: its metadata; with ``suspect`` once it is sent again.
        key: Kafka key.
        payload: untouched bytes.
        segment: the file it is in.
        offset: of its frame there.
        group: when it may be acknowledged; None when it was read back from the disk.
        fate: what its sender is told when it asks; None where nobody may ask.
    """

    seq: int
    lane: Lane
    envelope: Envelope
    key: bytes
    payload: bytes
    segment: Segment
    offset: int
    group: Group | None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the log from which to read on.

    Attributes:
        segment: number of the segment.
        offset: of the next frame in it.
    """

    segment: int
    offset: int
