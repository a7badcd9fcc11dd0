"""What the writers of streaming queries share: one batch at a time, and the marks that the batches' commits carry."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import InheritableThread
from pyspark.sql import DataFrame

from lakehouse.checkpoint import Checkpoint
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


class Marks:
    """Marks of one query's batches: how far in Kafka and in time its products are, which only ever moves on.

    Attributes:
        through: ``TOPIC/PARTITION`` to the next offset.
        clock: see :class:`~lakehouse.gold.store.BatchMark`.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._query = ""
        self.through: dict[str, int] = {}
        self.clock: int | None = None

    @property
    def query(self) -> str:
        """The query's id, once it runs."""
        self._query = self._query or Checkpoint.read(self._checkpoint).query
        return self._query

    def go_on_from(self, mark: BatchMark | None) -> None:
        """Be at least as far as a product that says so."""
        if mark is not None:
            self.through = {**mark.through, **self.through}
            self.clock = later(self.clock, mark.clock)

    def of(self, batch: int, bronze: str, rows: pa.Table, counted: pa.Table) -> BatchMark:
        """The mark of a batch.

        Args:
            bronze: the Delta source's offset behind it.
            rows: all its rows, with their ``topic``, ``partition`` and ``offset``.
            counted: those that count, with ``event_time`` and ``received_at``.
        """
        for end in rows.group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist():
            if end["topic"].startswith(FILE_TOPIC):
                continue  # thousands of files; COMMIT_BRONZE says that they are in
            place = f"{end['topic']}/{end['partition']}"
            self.through[place] = max(self.through.get(place, 0), end["offset_max"] + 1)
        self.clock = later(self.clock, newest(counted))
        received = pc.min_max(pc.cast(counted["received_at"], pa.int64())).as_py()
        return BatchMark(
            self.query,
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
