"""What the commits of products say."""

from __future__ import annotations

import pyarrow as pa

from lakehouse.contract.lake import COMMIT_BATCH, COMMIT_BRONZE
from lakehouse.gold.mark import BatchMark, Marks, newest

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
    found = Marks().of("q-1", (3,), batch, batch)
    assert (found.application, found.transaction, found.through) == ("q-1", 3, {"t/0": 8, "t/1": 3})
    assert (found.events, found.oldest, found.newest, found.clock) == (3, 2, 9, 6_000)


def test_marks_never_go_back() -> None:
    marks = Marks()
    marks.go_on_from(BatchMark("q-1", (1,), {"t/0": 20, "t/2": 5}, clock=70_000))
    marks.go_on_from(None)
    later_one = marks.of("q-1", (2,), rows(("t", 0, 7, 5_000, 5_000)), rows())
    assert later_one.through == {"t/0": 20, "t/2": 5}
    assert (later_one.events, later_one.oldest, later_one.newest, later_one.clock) == (0, None, None, 70_000)


def test_the_clock_is_the_latest_of_the_earlier_of_both_times() -> None:
    assert newest(rows()) is None
    assert newest(rows(("t", 0, 0, 10, 30), ("t", 0, 1, 50, 20))) == 20


def test_a_mark_names_one_version_or_those_of_both_sides_of_a_join() -> None:
    for versions, number, bronze in (((7,), "q/7", "7"), ((7, 3), "q/10", "7,3")):
        metadata = BatchMark("q", versions).to_metadata()
        assert (metadata[COMMIT_BATCH], metadata[COMMIT_BRONZE]) == (number, bronze)
        assert BatchMark.from_metadata(metadata) == BatchMark("q", versions)
