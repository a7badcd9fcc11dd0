"""Sender-based message logging (SBML): each event is on the disk before it is sent, and deleted on Kafka's answer."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from ingest.events import Group, Segment
from ingest.protocols.rbml import ReceiverLogging
from ingest.segments import Part


class SenderLogging(ReceiverLogging):
    """Writes each event as it is sent, and a mark for each of Kafka's answers, in the caller's thread.

    Where the disk refuses, it goes on as the receiver-based protocol does.
    """

    def __init__(self, folder: Path, group_s: float, last_seq: int) -> None:
        super().__init__(folder, group_s, last_seq)
        self._unwritten: deque[tuple[Part, Group | None, int]] = deque()  # a mark has no group
        self._due = last_seq  # events up to here have been sent

    def add(self, segment: Segment, chunks: list[bytes], size: int) -> int:
        """Put bytes at the end of the segment."""
        offset = segment.size
        self._unwritten.append((Part(segment, offset, chunks), None, 0))
        segment.size = offset + size
        return offset

    def group(self, seq: int) -> Group:
        """A group of this event alone."""
        part, _, _ = self._unwritten.pop()
        group = Group()
        self._unwritten.append((part, group, seq))
        return group

    def received(self) -> None:
        """Nothing: it is written when it is sent."""

    def sending(self, seq: int) -> None:
        """Write the events up to this one, each by itself."""
        self._due = max(self._due, seq)
        while self._unwritten and self._writing is None and self._last_seq < self._due:
            self._next_write()

    def acked(self) -> bool:
        """The mark is written at once: it deletes what was acknowledged."""
        return True

    def flush_soon(self) -> None:
        """Write what is pending, event by event: the order of the log is that of the file."""
        while self._unwritten and self._writing is None:
            self._next_write()

    def write_now(self) -> None:
        """Write what is pending in this thread, at once."""
        while self._unwritten:
            self._stage()
        super().write_now()

    async def close(self) -> None:
        """Write what is pending and end the worker."""
        self.flush_soon()
        while self._unwritten:  # the disk refuses: what was not acknowledged may go
            self._stage()
        await super().close()

    def _next_write(self) -> None:
        self._stage()
        self._write_here()

    def _stage(self) -> None:
        """The next event with the marks before it, or the marks that are left, are to be written next."""
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
