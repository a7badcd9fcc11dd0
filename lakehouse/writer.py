"""What the writers of streaming queries share: one batch at a time, the marks of commits, and how a query runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import InheritableThread
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.contract.lake import FILE_TOPIC
from lakehouse.gold.store import BatchMark, later


class BatchWriter(ABC):
    """Takes one micro-batch after another; what Spark is given as ``foreachBatch``."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def __call__(self, events: DataFrame, batch: int) -> None:
        with self._busy:  # Spark does not wait for us when it stops the query
            self.take(events, batch)

    def close(self) -> None:
        """Wait for the batch in hand, and close the files."""
        with self._busy:
            self.close_files()

    @abstractmethod
    def take(self, events: DataFrame, batch: int) -> None:
        """Take a micro-batch."""

    @abstractmethod
    def close_files(self) -> None:
        """Close what the writer has open; no batch is in hand."""


@dataclass(frozen=True, slots=True)
class RunningQuery:
    """A streaming query and the writer of ours that it hands its batches to."""

    query: StreamingQuery
    writer: BatchWriter

    @property
    def name(self) -> str:
        """The query's name."""
        return self.query.name or "?"

    @property
    def is_active(self) -> bool:
        """Whether it runs."""
        return bool(self.query.isActive)

    @property
    def error(self) -> BaseException | None:
        """Why it stopped; None while it runs, or where it was stopped from outside."""
        return self.query.exception()

    def stop(self) -> None:
        """Stop it; when this returns, nothing is written any more and all files are closed."""
        self.query.stop()
        self.writer.close()


class Marks:
    """Marks of commits to products: how far in Kafka and in time they are, which only ever moves on.

    Attributes:
        through: ``TOPIC/PARTITION`` to the next offset.
        clock: see :class:`~lakehouse.gold.store.BatchMark`.
    """

    def __init__(self) -> None:
        self.through: dict[str, int] = {}
        self.clock: int | None = None

    def go_on_from(self, mark: BatchMark | None) -> None:
        """Be at least as far as a product that says so."""
        if mark is not None:
            self.reached(mark.through)
            self.clock = later(self.clock, mark.clock)

    def reached(self, through: Mapping[str, int]) -> None:
        """Be at least as far as these offsets."""
        for place, end in through.items():
            self.through[place] = max(self.through.get(place, 0), end)

    def of(self, query: str, batch: int, bronze: str, rows: pa.Table, counted: pa.Table) -> BatchMark:
        """The mark of a batch.

        Args:
            query, batch, bronze: see :class:`~lakehouse.gold.store.BatchMark`.
            rows: all its rows, with their ``topic``, ``partition`` and ``offset``.
            counted: those that count, with ``event_time`` and ``received_at``.
        """
        ends = rows.group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist()
        # Of files there are thousands; COMMIT_BRONZE says that they are in.
        ends = [end for end in ends if not end["topic"].startswith(FILE_TOPIC)]
        self.reached({f"{end['topic']}/{end['partition']}": end["offset_max"] + 1 for end in ends})
        self.clock = later(self.clock, newest(counted))
        received = pc.min_max(pc.cast(counted["received_at"], pa.int64())).as_py()
        return BatchMark(
            query,
            batch,
            bronze,
            dict(self.through),
            counted.num_rows,
            received["min"] // 1000 if counted.num_rows else None,
            received["max"] // 1000 if counted.num_rows else None,
            self.clock,
        )


def newest(counted: pa.Table) -> int | None:
    """The clock's value by these events (:class:`~lakehouse.gold.store.BatchMark`), or None where there are none."""
    happened, arrived = (pc.cast(counted[name], pa.int64()) for name in ("event_time", "received_at"))
    found = pc.max(pc.min_element_wise(happened, arrived)).as_py()
    return None if found is None else int(found)


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks at once in threads with Spark's local properties; the first error is raised after all ended."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the query's own thread
            errors.append(error)

    threads = [InheritableThread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
