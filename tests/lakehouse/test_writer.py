"""What the writers of streaming queries share."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lakehouse.gold.store import BatchMark
from lakehouse.writer import BatchWriter, Marks, newest, side_by_side

ROWS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("event_time", pa.timestamp("us", "UTC")),
        ("received_at", pa.timestamp("us", "UTC")),
    ]
)


def rows(*found: tuple[str, int, int, int, int]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(ROWS.names, row, strict=True)) for row in found], schema=ROWS)


def test_a_mark_says_how_far_in_kafka_and_in_time_a_batch_reaches() -> None:
    batch = rows(("t", 0, 7, 5_000, 9_000), ("t", 1, 2, 8_000, 6_000), ("file:a", 0, 99, 1_000, 2_000))
    found = Marks().of("q-1", 3, "3", batch, batch)
    assert (found.query, found.batch, found.through) == ("q-1", 3, {"t/0": 8, "t/1": 3})
    assert (found.events, found.oldest, found.newest, found.clock) == (3, 2, 9, 6_000)


def test_marks_never_go_back() -> None:
    kept = Marks()
    kept.go_on_from(BatchMark("q-1", 1, "1", {"t/0": 20, "t/2": 5}, clock=70_000))
    kept.go_on_from(None)
    later_one = kept.of("q-1", 2, "2", rows(("t", 0, 7, 5_000, 5_000)), rows())
    assert later_one.through == {"t/0": 20, "t/2": 5}
    assert (later_one.events, later_one.oldest, later_one.newest, later_one.clock) == (0, None, None, 70_000)


def test_the_clock_is_the_latest_of_the_earlier_of_both_times() -> None:
    assert newest(rows()) is None
    assert newest(rows(("t", 0, 0, 10, 30), ("t", 0, 1, 50, 20))) == 20


class Slow(BatchWriter):
    """Notes the order in which things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.begun, self.may_end = threading.Event(), threading.Event()

    def take(self, _events: object, batch: int) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        self.noted.append(f"batch {batch}")

    def close_files(self) -> None:
        self.noted.append("closed")


def test_files_are_closed_behind_the_batch_in_hand() -> None:
    writer = Slow()
    taking = threading.Thread(target=writer, args=(None, 4))
    taking.start()
    assert writer.begun.wait(60)
    closing = threading.Thread(target=writer.close)
    closing.start()
    writer.may_end.set()
    taking.join()
    closing.join()
    assert writer.noted == ["batch 4", "closed"]


@pytest.mark.spark
def test_all_tasks_end_before_the_first_error_is_raised(spark: SparkSession) -> None:
    done: list[int] = []

    def fails() -> None:
        raise ValueError("one of them")

    assert spark.sparkContext is not None  # the threads carry its properties
    with pytest.raises(ValueError, match="one of them"):
        side_by_side([fails, lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]
