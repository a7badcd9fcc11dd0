"""Logging protocols: when an event's record is written to disk, and who waits for the write.

All three give the same guarantee: **an event is acknowledged only when its record is on disk or Kafka has it**. Events
that were acknowledged and are not in Kafka are sent again after a crash. All write the same bytes to the same files, so
there is one recovery, and each reads the logs of the others. They differ in when they write:

=====  =====================================================================================================
RBML   *receiver-based*: one write and one ``fdatasync`` per received event, before anything else happens. Everyone
       waits for it.
SBML   *sender-based*: one write and one ``fdatasync`` per event when it is handed to Kafka's client, or set aside
       while Kafka is away; and one per answer from Kafka, which deletes what it acknowledges.
HML    *hybrid*: events go to Kafka at once, while a worker thread commits them in groups, one write a group. An
       event may be acknowledged when its group is durable or Kafka has all of the group, whichever is first.
       Acknowledged events are deleted by the next mark.
=====  =====================================================================================================
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingest.log.segments import CommitGroup, LogSegment
from lakehouse.contract.storage import sync_folder

logger = logging.getLogger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 5.0


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
        """Make the parts durable and remove segments; returns the number of bytes of each part.

        A segment is removed only when a newer one, which carries the earlier state, is on disk. So one always does.

        After an error the same parts may be written again. Each has a fixed offset, so that makes the same bytes dirty
        again: after a failed fsync the kernel may have dropped them.
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
            data, written = memoryview(b"".join(part.chunks)), 0
            while written < len(data):
                written += os.pwrite(handle, data[written:], part.offset + written)
            os.fdatasync(handle)
            sizes.append(len(data))
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


@dataclass(frozen=True, slots=True)
class LogWrite:
    """One write: parts to make durable, segments to remove after it, groups that become durable, and the last event."""

    parts: list[SegmentPart]
    remove: list[LogSegment]
    groups: list[CommitGroup]
    last_seq: int


class HybridLogging:
    """Group commit in a worker thread, while the events are already on their way to Kafka.

    A group is sealed when its time is up. The worker takes everything that is pending at once, so under load, or on a
    slow disk, one write carries many groups. All methods are called on the event loop; only writes run in the worker.

    Args:
        group_s: longest time before a group is sealed, seconds.
        last_seq: newest event that is already durable.

    Attributes:
        alone: every event is a group of its own.
        durable_seq: every event up to this sequence number is on disk.
        problem: why the disk refuses writes, or empty. The same bytes are then retried until they are written.
        worker: a thread for disk access, which others may share.
        on_durable: called after each write.
        observe: called with the seconds from a group's first event until it is durable.
    """

    alone = False

    def __init__(self, folder: Path, group_s: float, last_seq: int) -> None:
        self.durable_seq = last_seq
        self.problem = ""
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="message-log")
        self.on_durable: Callable[[], None] = lambda: None
        self.observe: Callable[[float], None] = lambda _: None
        self._group_s = group_s
        self._last_seq = last_seq
        self._files = SegmentWriter(folder)
        self._parts: list[SegmentPart] = []
        self._remove: list[LogSegment] = []
        self._sealed: list[CommitGroup] = []
        self._group: CommitGroup | None = None
        self._writing: asyncio.Future[list[int]] | None = None
        self._backoff_s = 0.0
        self._again: asyncio.TimerHandle | None = None
        self._closing = False

    def received(self) -> None:
        """The event that was just added has joined its group; nothing else has been done with it."""

    def sending(self, seq: int) -> None:
        """The events up to this one are now handed to Kafka's client, or set aside."""

    def acked(self) -> bool:
        """Kafka has acknowledged events; returns whether the mark that says so must be written at once."""
        return False

    def add(self, segment: LogSegment, chunks: list[bytes], size: int) -> int:
        """Put bytes at the end of the segment; returns their offset."""
        offset = segment.size
        if not self._parts or self._parts[-1].segment is not segment:
            self._parts.append(SegmentPart(segment, offset, []))
        self._parts[-1].chunks.extend(chunks)
        segment.size = offset + size
        return offset

    def group(self, seq: int) -> CommitGroup:
        """The group of the event that was just added. Unless ``alone``, events added with it share the group."""
        self._last_seq = seq
        group = self._group
        if group is None:
            group = self._group = CommitGroup()
            asyncio.get_running_loop().call_later(self._group_s, self._seal, group)
        return group

    def is_open(self, group: CommitGroup) -> bool:
        """Whether events may still be added to the group."""
        return group is self._group

    def remove(self, segments: list[LogSegment]) -> None:
        """Remove these files after the next write."""
        self._remove.extend(segments)

    def flush_soon(self) -> None:
        """Write pending bytes, unless a write that takes them is due anyway."""
        if self._writing is None and self._group is None:
            self._write()

    def write_now(self) -> None:
        """Write pending bytes in this thread, before the event loop runs. Raises OSError."""
        for part, size in zip(self._parts, self._files.write(self._parts, self._remove), strict=True):
            part.segment.durable = part.offset + size
        self._parts, self._remove = [], []

    async def close(self) -> None:
        """Write pending bytes and end the worker."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        while (self._parts or self._writing is not None) and not self.problem:
            if self._writing is None:
                self._write()
            if self._writing is not None:
                with suppress(OSError):
                    await self._writing
            await asyncio.sleep(0)  # let its callback run
        if self.problem:
            logger.error("the message log could not be closed properly: %s", self.problem)
        self.worker.shutdown(wait=True)
        self._files.close()

    def _seal(self, group: CommitGroup) -> None:
        """Take no more events into the group, and write as soon as the worker is free."""
        if group is not self._group:
            return
        self._sealed.append(group)
        self._group = None
        if group.unacked == 0:
            group.close()
        if self._writing is None:
            self._write()

    def _write(self) -> None:
        if self._group is not None:
            self._sealed.append(self._group)
            self._group = None
        job = LogWrite(self._parts, self._remove, self._sealed, self._last_seq)
        self._parts, self._remove, self._sealed = [], [], []
        self._submit(job)

    def _submit(self, job: LogWrite) -> None:
        job.remove.extend(self._remove)  # on a full disk the retry needs space that was freed since
        self._remove = []
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self.worker, self._files.write, job.parts, job.remove)
        self._writing.add_done_callback(partial(self._written, job))

    def _written(self, job: LogWrite, future: asyncio.Future[list[int]]) -> None:
        if (error := future.exception()) is not None:
            self._retry(job, error)
            return
        self._writing = None
        self._done(job, future.result())
        self._go_on()

    def _done(self, job: LogWrite, sizes: list[int]) -> None:
        self._backoff_s = 0.0
        for part, size in zip(job.parts, sizes, strict=True):
            part.segment.durable = part.offset + size
        self.durable_seq = job.last_seq
        now = time.perf_counter()
        for group in job.groups:
            for lane, count in group.counts.items():
                lane.durable += count
            self.observe(now - group.opened)
            group.close()
        if self.problem:
            logger.warning("the message log can be written again")
            self.problem = ""
        self.on_durable()

    def _go_on(self) -> None:
        """Write what was added during the last write."""
        if self._sealed or (self._group is None and (self._parts or self._remove)):
            self._write()

    def _retry(self, job: LogWrite, error: BaseException) -> None:
        """Write the same bytes again after a pause. Meanwhile Kafka may acknowledge the groups."""
        self.problem = str(error)
        self._backoff_s = min(_RETRY_MAX_S, max(_RETRY_FIRST_S, self._backoff_s * 2))
        logger.error("the message log cannot be written: %s; next attempt in %.2f s", error, self._backoff_s)
        if not self._closing:
            self._again = asyncio.get_running_loop().call_later(self._backoff_s, self._submit, job)


class ReceiverLogging(HybridLogging):
    """Writes each event when it is received, in the caller's thread, before anything else is done with it.

    If the disk refuses, the event stays pending, the worker retries the write, and the log takes no further events.
    """

    alone = True

    def group(self, seq: int) -> CommitGroup:
        self._last_seq = seq
        group = CommitGroup()
        self._sealed.append(group)
        return group

    def is_open(self, group: CommitGroup) -> bool:
        return False

    def received(self) -> None:
        self._write_here()

    def flush_soon(self) -> None:
        self._write_here()

    def _write_here(self) -> None:
        if self._writing is not None:  # the worker retries a failed write; pending bytes follow it
            return
        job = LogWrite(self._parts, self._remove, self._sealed, self._last_seq)
        self._parts, self._remove, self._sealed = [], [], []
        try:
            sizes = self._files.write(job.parts, job.remove)
        except OSError as error:
            self._writing = asyncio.get_running_loop().create_future()
            self._retry(job, error)
        else:
            self._done(job, sizes)

    def _go_on(self) -> None:
        if self._parts or self._sealed:
            self._write_here()


class SenderLogging(ReceiverLogging):
    """Writes each event when it is sent, and a mark for each answer from Kafka, in the caller's thread."""

    def __init__(self, folder: Path, group_s: float, last_seq: int) -> None:
        super().__init__(folder, group_s, last_seq)
        self._unwritten: deque[tuple[SegmentPart, CommitGroup | None, int]] = deque()  # a mark has no group
        self._due = last_seq  # events up to here have been sent

    def add(self, segment: LogSegment, chunks: list[bytes], size: int) -> int:
        offset = segment.size
        self._unwritten.append((SegmentPart(segment, offset, chunks), None, 0))
        segment.size = offset + size
        return offset

    def group(self, seq: int) -> CommitGroup:
        part, _, _ = self._unwritten.pop()
        group = CommitGroup()
        self._unwritten.append((part, group, seq))
        return group

    def received(self) -> None: ...

    def sending(self, seq: int) -> None:
        self._due = max(self._due, seq)
        while self._unwritten and self._writing is None and self._last_seq < self._due:
            self._next_write()

    def acked(self) -> bool:
        return True

    def flush_soon(self) -> None:
        """Write event by event, to keep the order of the log."""
        while self._unwritten and self._writing is None:
            self._next_write()

    def write_now(self) -> None:
        while self._unwritten:
            self._stage()
        super().write_now()

    async def close(self) -> None:
        self.flush_soon()
        while self._unwritten:  # the disk refuses: unacknowledged events may be lost
            self._stage()
        await super().close()

    def _next_write(self) -> None:
        self._stage()
        self._write_here()

    def _stage(self) -> None:
        """Stage the next event with the marks before it, or the marks that are left."""
        while self._unwritten:
            part, group, seq = self._unwritten.popleft()
            self._parts.append(part)
            if group is not None:
                self._sealed.append(group)
                self._last_seq = seq
                return

    def _go_on(self) -> None:
        super()._go_on()
        self.sending(self._due)


PROTOCOLS: dict[str, type[HybridLogging]] = {"hml": HybridLogging, "rbml": ReceiverLogging, "sbml": SenderLogging}
