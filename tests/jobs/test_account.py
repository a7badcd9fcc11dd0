"""Accounting on made-up tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.account import Account, Push, events_held, latencies, take_account
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source

SOURCE = Source(topic="t", schema="id BIGINT", event_time="received_at", name="rsvps")
MEMBERS = Product("gold", "rsvps", "SELECT 1", operator="distinct", item="m", name="members")
PIPELINE = Pipeline({"rsvps": SOURCE}, {"members": MEMBERS})
SINCE = 1_000_000  # microseconds


@dataclass(frozen=True)
class Row:
    """A bronze row, of this run unless it says otherwise."""

    event_id: str
    fingerprint: str = "f"
    partition: int = 0
    suspect: bool = False
    at: int = SINCE


def bronze(rows: Sequence[Row]) -> pa.Table:
    offsets: dict[int, int] = {}
    made = []
    for row in rows:
        offset = offsets[row.partition] = offsets.get(row.partition, -1) + 1
        columns = {"event_id": row.event_id, "fingerprint": row.fingerprint, "topic": "t", "partition": row.partition}
        made.append({**columns, "offset": offset, "bronze_at": row.at, "reject": None, "suspect": row.suspect})
    schema = [("event_id", pa.string()), ("fingerprint", pa.string()), ("topic", pa.string())]
    schema += [("partition", pa.int32()), ("offset", pa.int64()), ("bronze_at", pa.timestamp("us", "UTC"))]
    schema += [("reject", pa.string()), ("suspect", pa.bool_())]
    return pa.Table.from_pylist(made, schema=pa.schema(schema))


def account(
    tmp_path: Path,
    rows: Sequence[Row],
    sent: Sequence[str | None],
    *,
    refused: Sequence[tuple[str, str]] = (),
    in_gold: int,
) -> Account:
    """The account of a lake with these rows, whose products hold ``in_gold`` events."""
    lake = Lake(tmp_path)
    rejected = pa.table(
        {
            "event_id": pa.array([name for name, _ in refused] + ["x"], pa.string()),
            "fingerprint": pa.array([mark for _, mark in refused] + ["f"], pa.string()),
            "source": pa.array(["rsvps"] * len(refused) + ["another"], pa.string()),
        }
    )
    held = pa.table({"rsvps": pa.array([in_gold - in_gold // 2, in_gold // 2], pa.int64())})
    for table, content in ((lake.bronze("rsvps"), bronze(rows)), (lake.quarantine(), rejected)):
        table.path.mkdir(parents=True)
        write_deltalake(str(table.path), content)
    members = lake.table("gold", "members")
    members.path.mkdir(parents=True)
    write_deltalake(str(members.path), held)
    return take_account(lake, PIPELINE, SOURCE, sent, [float(n) for n in range(len(sent))], [], since_us=SINCE)


def figures(found: Account) -> tuple[int, int, int, int]:
    return found.lost, found.counted_twice, found.duplicates, found.quarantined


def test_all_well(tmp_path: Path) -> None:
    found = account(tmp_path, [Row("a"), Row("b")], ["a", "b"], in_gold=2)
    assert figures(found) == (0, 0, 0, 0)
    assert (found.in_bronze, found.in_gold, found.resent) == (2, 2, 0)


def test_copies_in_the_stream_and_from_a_log(tmp_path: Path) -> None:
    rows = [Row("a"), Row("a", "g"), Row("b"), Row("b", suspect=True)]
    found = account(tmp_path, rows, ["a", "a", "b"], in_gold=2)
    assert figures(found) == (0, 0, 1, 0)
    assert (found.in_bronze, found.resent) == (4, 1)


def test_an_event_that_never_came_is_lost(tmp_path: Path) -> None:
    assert figures(account(tmp_path, [Row("a")], ["a", "b", "b"], in_gold=1))[0] == 1


def test_an_event_that_the_products_do_not_hold_is_lost(tmp_path: Path) -> None:
    assert figures(account(tmp_path, [Row("a"), Row("b")], ["a", "b"], in_gold=1)) == (1, 0, 0, 0)


def test_an_event_counted_twice(tmp_path: Path) -> None:
    assert figures(account(tmp_path, [Row("a"), Row("b")], ["a", "b"], in_gold=3)) == (0, 1, 0, 0)


def test_refused_events_are_accounted_for(tmp_path: Path) -> None:
    rows = [Row("a"), Row("b", "bad"), Row("c", "bad"), Row("c", "good"), Row("~1", "m")]
    refused = [("b", "bad"), ("c", "bad"), ("~1", "m")]
    found = account(tmp_path, rows, ["a", "b", "c", "c", None], refused=refused, in_gold=2)
    assert figures(found) == (0, 0, 1, 3)  # of the two of c one is refused, and the other counts


def test_a_malformed_event_that_never_came_is_lost(tmp_path: Path) -> None:
    found = account(tmp_path, [Row("~1")], [None, None], refused=[("~1", "f")], in_gold=0)
    assert found.lost == 1


def test_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    rows = [Row("a", at=SINCE - 1), Row("old", at=SINCE - 1), Row("~0", at=SINCE - 1), Row("a"), Row("b")]
    found = account(tmp_path, rows, ["a", "b", None], refused=[("~0", "f")], in_gold=3)
    assert figures(found) == (1, 0, 1, 1)  # the malformed one of this run is missing; a is a copy


def test_no_product_counts_events(tmp_path: Path) -> None:
    assert events_held(Lake(tmp_path), PIPELINE, SOURCE) == 0
    assert events_held(Lake(tmp_path), Pipeline({"rsvps": SOURCE}), SOURCE) is None
    some = replace(MEMBERS, sql="SELECT m\nFROM rsvps\nWHERE m > 1")
    assert events_held(Lake(tmp_path), Pipeline({"rsvps": SOURCE}, {"members": some}), SOURCE) is None


def test_latency_is_to_the_first_push_that_contains_the_event() -> None:
    rows = bronze([Row("a"), Row("b"), Row("c", partition=1), Row("a"), Row("late")])
    pushes = [
        Push(100.0, {"t/0": 1}),
        Push(200.0, {"t/0": 1, "t/1": 1}),
        Push(300.0, {"t/0": 2}),  # says nothing of the other partition: it was reached before
        Push(400.0, {"t/0": 3, "t/1": 1}),
    ]
    sent = ["a", "b", "c", "a", None, "late", "nowhere"]
    found = latencies(sent, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0], rows, pushes, since_us=SINCE)
    assert found.tolist() == [[10.0, 90.0], [20.0, 280.0], [30.0, 170.0]]  # the late one is in no push


def test_latency_of_nothing() -> None:
    assert latencies([], [], bronze([]), [], since_us=0).shape == (0, 2)
    assert latencies(["a"], [1.0], bronze([Row("a")]), [], since_us=0).shape == (0, 2)


@pytest.mark.parametrize("at", [SINCE - 1, SINCE])
def test_latency_is_of_this_run(at: int) -> None:
    rows = bronze([Row("a", at=at)])
    found = latencies(["a"], [1.0], rows, [Push(5.0, {"t/0": 1})], since_us=SINCE)
    assert found.shape[0] == (1 if at == SINCE else 0)
