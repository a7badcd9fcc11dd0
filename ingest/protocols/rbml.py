"""Receiver-based message logging (RBML): each event is on the disk before anything is done with it."""

from __future__ import annotations

import asyncio

from ingest.events import Group
from ingest.protocols.hml import HybridLogging, Job


class ReceiverLogging(HybridLogging):
    """Writes each event as it is received, in the caller's thread: it, and everybody else, waits for the disk.

    Where the disk refuses, the event stays pending and is written by the worker when the disk takes it again, as with
    the hybrid protocol; meanwhile the log takes no others.
    """

    alone = True

    def group(self, seq: int) -> Group:
        """A group of this event alone."""
        self._last_seq = seq
        group = Group()
        self._sealed.append(group)
        return group

    def is_open(self, group: Group) -> bool:
        """Never: each event has a group of its own."""
        return False

    def received(self) -> None:
        """Write it."""
        self._write_here()

    def flush_soon(self) -> None:
        """Write what is pending."""
        self._write_here()

    def _write_here(self) -> None:
        if self._writing is not None:  # the worker repeats a write that failed; what is pending comes after it
            return
        job = Job(self._parts, self._remove, self._sealed, self._last_seq)
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
