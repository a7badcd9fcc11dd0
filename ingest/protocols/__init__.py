"""Logging protocols: when an event's record reaches the disk, and who waits for it.

All three give the same guarantee: **an event is acknowledged only when its record is on the disk or Kafka has it**;
what was acknowledged and is not in Kafka is sent again after a crash. They write the same bytes to the same files, so
that recovery is one, and a log that was written by one is read by the others. They differ in when they write:

=====  =====================================================================================================
RBML   *receiver-based*: one write and one ``fdatasync`` for each event as it is received, before anything is done
       with it. Nobody goes on meanwhile.
SBML   *sender-based*: one write and one ``fdatasync`` for each event as it is handed to Kafka's client, or put aside
       because Kafka is away; and one for each of Kafka's answers, which deletes what it acknowledges.
HML    *hybrid*: events are handed to Kafka at once; a worker makes groups of them durable beside that, one write a
       group. An event may be acknowledged when its group is durable or Kafka has all of it, whichever is first. What
       Kafka acknowledges is deleted by the way, with the next mark.
=====  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from ingest.events import Group, Segment
from ingest.protocols.hml import HybridLogging
from ingest.protocols.rbml import ReceiverLogging
from ingest.protocols.sbml import SenderLogging

__all__ = ["PROTOCOLS", "HybridLogging", "LoggingProtocol", "MakeProtocol", "ReceiverLogging", "SenderLogging"]


class LoggingProtocol(Protocol):
    """Makes the bytes of a message log durable. All of it is called on the event loop.

    Attributes:
        alone: each event is a group of its own.
        problem: why the disk refuses writes, or empty; then the same bytes are tried again until they are written.
        worker: a thread for the disk; others may use it.
        on_durable: called after each write.
        observe: called with the seconds from a group's first event until it was durable.
    """

    alone: bool
    problem: str
    worker: ThreadPoolExecutor
    on_durable: Callable[[], None]
    observe: Callable[[float], None]

    @property
    def durable_seq(self) -> int:
        """Every event up to this sequence number is on the disk."""

    def add(self, segment: Segment, chunks: list[bytes], size: int) -> int:
        """Put bytes at the end of the segment; returns their offset."""

    def group(self, seq: int) -> Group:
        """The group that the event with this sequence number, just added, belongs to.

        Where events need not be ``alone``, those before it that were added with it belong to that group too.
        """

    def is_open(self, group: Group) -> bool:
        """Whether events may still be added to the group."""

    def received(self) -> None:
        """The event that was just added has joined its group, and nothing has been done with it yet."""

    def sending(self, seq: int) -> None:
        """The events up to this one are handed to Kafka's client now, or put aside."""

    def acked(self) -> bool:
        """Kafka has acknowledged events; whether the mark that says so has to be written at once."""

    def remove(self, segments: list[Segment]) -> None:
        """Remove these files after the next write."""

    def flush_soon(self) -> None:
        """Write what is pending, unless a write that will take it is due anyway."""

    def write_now(self) -> None:
        """Write what is pending in this thread; before the event loop runs.

        Raises:
            OSError: the disk refuses.
        """

    async def close(self) -> None:
        """Write what is pending and end the worker."""


MakeProtocol = Callable[[Path, float, int], LoggingProtocol]
"""Of the folder, the longest time of a group in seconds, and the newest sequence number that is durable already."""

PROTOCOLS: Mapping[str, MakeProtocol] = {"hml": HybridLogging, "rbml": ReceiverLogging, "sbml": SenderLogging}
