"""Data and files of the message log: lanes, commit groups, events with their place, and segment files."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingest.log.records import SEGMENT_MAGIC, Damage, LogFrame, scan
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.storage import sync_folder, try_lock

logger = logging.getLogger(__name__)

SUFFIX = ".seg"


@dataclass(slots=True, eq=False)
class LogSegment:
    """One file of the log.

    Attributes:
        size: bytes in the file once pending writes are done.
        durable: bytes on disk.
        unacked: events that Kafka has not acknowledged.
    """

    number: int
    path: Path
    size: int = 0
    durable: int = 0
    unacked: int = 0


NOWHERE = LogSegment(-1, Path())
"""Segment of events that are not in a log."""


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
        return {name: getattr(self, name) for name in _MARKED}


_MARKED = (
    "name", "source", "position", "received", "rejected", "failed", "gaps", "last_at", "suspect_left", "cursor", "shed"
)  # fmt: skip


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


def lock_folder(folder: Path) -> int:
    """Lock ``folder/lock`` and return its file descriptor. The lock ends with the process.

    Raises:
        EnvironmentProblem: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = try_lock(folder / "lock")
    if handle is None:
        owner = (folder / "lock").read_text(encoding="utf-8", errors="replace").strip()
        raise EnvironmentProblem(
            f"the message log {folder} is in use{f' by process {owner}' if owner else ''}",
            "Stop that collector, or give this one another node name",
        )
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Bytes to write at ``offset`` of a segment; ``chunks`` grows until the part is written."""

    segment: LogSegment
    offset: int
    chunks: list[bytes]


class SegmentWriter:
    """Writes parts and removes segments. Only one worker thread may call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}  # segment number to file descriptor
        self._created = False  # a file whose directory entry is not durable yet
        self._newest = 0  # newest segment whose first bytes, and so the earlier state, are durable
        self._kept: list[LogSegment] = []  # removed once a newer one is durable

    def write(self, parts: Sequence[SegmentPart], remove: Sequence[LogSegment]) -> list[int]:
        """Make the parts durable and remove segments. After an error the same parts may be written again.

        A segment is removed only when a newer one, which carries the earlier state, is on disk. So one always does.

        Each part has a fixed offset, so a repeated write makes the same bytes dirty again: after a failed fsync the
        kernel may have dropped them.

        Returns:
            The number of bytes of each part.
        """
        sizes = []
        self._kept += [segment for segment in remove if segment not in self._kept]  # a retried write repeats them
        self._remove_older()  # on a full disk, removing comes before writing
        for number, part in enumerate(parts):
            handle = self._open.get(part.segment.number)
            if handle is None:
                handle = os.open(part.segment.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._open[part.segment.number] = handle
                self._created = True
            sizes.append(_write_all(handle, b"".join(part.chunks), part.offset))
            os.fdatasync(handle)
            if number < len(parts) - 1 and parts[number + 1].segment is not part.segment:
                os.close(self._open.pop(part.segment.number))
        if self._created:
            sync_folder(self._folder)
            self._created = False
        self._newest = max(self._newest, *(part.segment.number for part in parts)) if parts else self._newest
        self._remove_older()
        return sizes

    def _remove_older(self) -> None:
        """Remove segments that are older than a durable one."""
        for segment in self._kept:
            if segment.number < self._newest:
                with suppress(KeyError):
                    os.close(self._open.pop(segment.number))
                segment.path.unlink(missing_ok=True)
        self._kept = [segment for segment in self._kept if segment.number >= self._newest]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def _write_all(handle: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
    return len(data)


def read_frames(segment: LogSegment, offset: int, max_bytes: int) -> Iterator[LogFrame | Damage]:
    """Yield frames of the durable part of a segment from ``offset``: about ``max_bytes``, at least one frame."""
    offset = max(offset, len(SEGMENT_MAGIC))
    end = segment.durable
    handle = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(handle, min(max_bytes, end - offset), offset)
        for item in scan(data, 0):
            if isinstance(item, Damage) and item.tail and offset + len(data) < end:
                if item.offset:
                    return  # the frame continues beyond the bytes read
                data = os.pread(handle, end - offset, offset)
                yield from _shift(scan(data, 0), offset)
                return
            yield from _shift((item,), offset)
    finally:
        os.close(handle)


def _shift(items: Iterable[LogFrame | Damage], by: int) -> Iterator[LogFrame | Damage]:
    return (replace(item, offset=item.offset + by, end=item.end + by) for item in items)
