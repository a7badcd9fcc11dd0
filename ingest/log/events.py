"""The data of the message log: lanes, commit groups, and events with their place in the log."""

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
class LogSegment:
    """One file of the log.

    Attributes:
        number: rising; part of the file's name.
        size: bytes in the file once pending writes are done.
        durable: bytes on disk.
        unacked: events that Kafka has not acknowledged.
    """

    number: int
    path: Path
    size: int = 0
    durable: int = 0
    unacked: int = 0


@dataclass(slots=True, eq=False)
class SourceLane:
    """The events of one collector of a source, with cumulative counts.

    Attributes:
        name: ``SOURCE/KIND/ORDINAL``.
        position: index of the upstream's next message, or None.
        cursor: the upstream's id of the last message (Last-Event-ID), or None.
        received: events appended.
        shed: events dropped by load shedding before they were appended.
        durable: events on disk.
        rejected: received events that the border refused.
        failed: events that Kafka refused for good, now in the failed store.
        in_log: events that Kafka has not acknowledged.
        gaps: reconnects to an upstream that could not resume.
        last_at: ``received_at`` of the newest event, microseconds since the epoch; 0 if none.
        suspect_left: next events of a resumed upstream that a crashed run may already have sent to Kafka.
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
        return self.received - self.failed - self.in_log

    def state(self) -> dict[str, Any]:
        """The fields that a mark stores. The others follow from the events."""
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


class CommitGroup:
    """Events that become durable together."""

    __slots__ = ("_closed", "_future", "_then", "counts", "opened", "unacked")

    def __init__(self) -> None:
        self.opened = time.perf_counter()
        self.counts: dict[SourceLane, int] = {}
        self.unacked = 0
        self._closed = False
        self._future: asyncio.Future[None] | None = None
        self._then: list[Callable[[], None]] = []

    @property
    def acknowledgeable(self) -> bool:
        """Whether its events may be acknowledged to their senders: they are durable, or Kafka has all of them."""
        return self._closed

    async def wait(self) -> None:
        """Return when the group is acknowledgeable."""
        if self._closed:
            return
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._future)  # a cancelled waiter must not cancel the future of others

    def then(self, call: Callable[[], None]) -> None:
        """Call back when the group becomes acknowledgeable, which it must not be yet. Exceptions are logged."""
        self._then.append(call)

    def close(self) -> None:
        """Mark the group as acknowledgeable and wake everyone who waits."""
        if not self._closed:
            self._closed = True
            waiting, self._then = self._then, []
            for call in waiting:
                try:
                    call()
                except Exception:  # the other callbacks still run
                    logger.exception("a callback for durable events failed")
            if self._future is not None and not self._future.done():
                self._future.set_result(None)


@dataclass(slots=True)
class Fate:
    """What became of an event, for its sender's questions.

    Attributes:
        reject: why the border refused it, or None.
        topic, partition, offset: its place in Kafka; the topic is empty until Kafka has it.
        failed: why Kafka refused it for good; empty if it did not.
    """

    reject: str | None
    topic: str = ""
    partition: int = -1
    offset: int = -1
    failed: str = ""


@dataclass(slots=True, eq=False)
class LoggedEvent:
    """An event in the log. Not frozen: freezing would triple the cost of making one.

    Attributes:
        envelope: its metadata; ``suspect`` is set when it is sent again.
        key: Kafka key.
        payload: untouched bytes.
        offset: of its frame in the segment.
        group: its commit group; None if it was read back from disk.
        fate: what its sender is told; None for one-way sources.
    """

    seq: int
    lane: SourceLane
    envelope: Envelope
    key: bytes
    payload: bytes
    segment: LogSegment
    offset: int
    group: CommitGroup | None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the log to read on from: segment number and offset of the next frame."""

    segment: int
    offset: int
