"""Hybrid message logging (HML): group commit, asynchronously, while the events are on their way to Kafka already.

Chunks are gathered in groups; a worker thread makes them durable. A group is sealed when its time is up. The worker
takes everything that is pending at once, so that under load, or on a slow disk, one write carries many groups.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingest.events import Group, Segment
from ingest.segments import Part, SegmentWriter

logger = logging.getLogger(__name__)

_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """One write.

    Attributes:
        parts: bytes to make durable.
        remove: segments to remove after that.
        groups: become durable by it.
        last_seq: of the events in it.
    """

    parts: list[Part]
    remove: list[Segment]
    groups: list[Group]
    last_seq: int


class HybridLogging:
    """A :class:`ingest.protocols.LoggingProtocol`; lives on the event loop, only the writes run in the worker.

    Args:
        folder: of the segments.
        group_s: the longest that an event waits for its group to be sealed, seconds.
        last_seq: sequence number of the newest event that is durable already.

    Attributes:
        alone: events share groups.
        durable_seq: every event up to this sequence number is on the disk.
        problem: why the disk refuses writes, or empty.
        worker: the thread; others may use it for the same disk.
        on_durable: called after each write.
        observe: called with the seconds from a group's first event until it was durable.
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
        self._parts: list[Part] = []
        self._remove: list[Segment] = []
        self._sealed: list[Group] = []
        self._group: Group | None = None
        self._writing: asyncio.Future[list[int]] | None = None
        self._backoff_s = 0.0
        self._again: asyncio.TimerHandle | None = None
        self._closing = False

    def received(self) -> None:
        """Nothing: the group's time decides."""

    def sending(self, seq: int) -> None:
        """Nothing: the disk and Kafka race."""

    def acked(self) -> bool:
        """Whether a mark has to be on the disk now; here it may wait."""
        return False

    def add(self, segment: Segment, chunks: list[bytes], size: int) -> int:
        """Put bytes at the end of the segment; returns their offset."""
        offset = segment.size
        if not self._parts or self._parts[-1].segment is not segment:
            self._parts.append(Part(segment, offset, []))
        self._parts[-1].chunks.extend(chunks)
        segment.size = offset + size
        return offset

    def group(self, seq: int) -> Group:
        """The group that the event with this sequence number, just added, belongs to."""
        self._last_seq = seq
        group = self._group
        if group is None:
            group = self._group = Group()
            asyncio.get_running_loop().call_later(self._group_s, self._seal, group)
        return group

    def is_open(self, group: Group) -> bool:
        """Whether events may still be added to the group."""
        return group is self._group

    def remove(self, segments: list[Segment]) -> None:
        """Remove these files after the next write."""
        self._remove.extend(segments)

    def flush_soon(self) -> None:
        """Write what is pending, unless a write that will take it is due anyway."""
        if self._writing is None and self._group is None:
            self._write()

    def write_now(self) -> None:
        """Write what is pending in this thread; before the event loop runs.

        Raises:
            OSError: the disk refuses.
        """
        for part, size in zip(self._parts, self._files.write(self._parts, self._remove), strict=True):
            part.segment.durable = part.offset + size
        self._parts, self._remove = [], []

    async def close(self) -> None:
        """Write what is pending and end the worker."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        while (self._parts or self._writing is not None) and not self.problem:
            if self._writing is None:
                self._write()
            if self._writing is not None:
                with suppress(OSError):
                    await self._writing
            await asyncio.sleep(0)  # lets its callback run
        if self.problem:
            logger.error("the message log could not be closed properly: %s", self.problem)
        self.worker.shutdown(wait=True)
        self._files.close()

    def _seal(self, group: Group) -> None:
        """The group's time is up: no more events for it, and a write as soon as the worker is free."""
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
        job = Job(self._parts, self._remove, self._sealed, self._last_seq)
        self._parts, self._remove, self._sealed = [], [], []
        self._submit(job)

    def _submit(self, job: Job) -> None:
        job.remove.extend(self._remove)  # on a full disk a write that is repeated needs the room that has come up since
        self._remove = []
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self.worker, self._files.write, job.parts, job.remove)
        self._writing.add_done_callback(partial(self._written, job))

    def _written(self, job: Job, future: asyncio.Future[list[int]]) -> None:
        if (error := future.exception()) is not None:
            self._retry(job, error)
            return
        self._writing = None
        self._done(job, future.result())
        self._go_on()

    def _done(self, job: Job, sizes: list[int]) -> None:
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
        """Write what has come together during the last write."""
        if self._sealed or (self._group is None and (self._parts or self._remove)):
            self._write()

    def _retry(self, job: Job, error: BaseException) -> None:
        """Write the same bytes again after a pause; Kafka may acknowledge the groups meanwhile."""
        self.problem = str(error)
        self._backoff_s = min(_RETRY_MAX_S, max(_RETRY_FIRST_S, self._backoff_s * 2))
        logger.error("the message log cannot be written: %s; next attempt in %.2f s", error, self._backoff_s)
        if not self._closing:
            self._again = asyncio.get_running_loop().call_later(self._backoff_s, self._submit, job)
