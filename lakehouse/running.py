"""A streaming query that runs, with the writer of ours that it hands its batches to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pyspark.sql.streaming.query import StreamingQuery


class Closes(Protocol):
    """What a writer must have: an end."""

    def close(self) -> None:
        """Wait for the batch in hand, and close the files."""


Writer = TypeVar("Writer", bound=Closes)


@dataclass(frozen=True, slots=True)
class RunningQuery(Generic[Writer]):
    """A running query.

    Attributes:
        query: Spark's handle.
        writer: what it hands its batches to.
    """

    query: StreamingQuery
    writer: Writer

    def stop(self) -> None:
        """Stop it; when this returns, nothing is written any more and all files are closed."""
        self.query.stop()
        self.writer.close()
