"""The table of rejected events."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from lakehouse.contract.lake import Lake
from lakehouse.silver.quarantine import COLUMNS, Quarantine
from tests.lakehouse.lakes import T0


def rejected(*ids: str, source: str = "clicks") -> pa.Table:
    rows = [
        {
            "event_id": name,
            "source": source,
            "tenant": "default",
            "received_at": T0,
            "reason": "not JSON",
            "payload": "{",
            "fingerprint": "f",
            "topic": "t",
            "partition": 0,
            "offset": number,
            "bronze_at": T0,
        }
        for number, name in enumerate(ids)
    ]
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def ids(lake: Lake) -> list[str]:
    found: list[str] = DeltaTable(str(lake.quarantine().path)).to_pyarrow_table()["event_id"].to_pylist()
    return sorted(found)


def test_a_batch_is_taken_once(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    first = Quarantine(lake.quarantine())
    first.apply(rejected("a", "b"), "q", 3)
    first.apply(rejected("a", "b"), "q", 3)
    Quarantine(lake.quarantine()).apply(rejected("a", "b"), "q", 3)  # after a restart
    first.apply(rejected("old"), "q", 2)
    assert ids(lake) == ["a", "b"]
    first.apply(rejected("c"), "q", 4)
    assert ids(lake) == ["a", "b", "c"]


def test_a_batch_without_rejections_makes_no_commit(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    Quarantine(lake.quarantine()).apply(rejected(), "q", 0)
    assert DeltaTable(str(lake.quarantine().path)).version() == 0


def test_sources_share_the_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    one, other = Quarantine(lake.quarantine()), Quarantine(lake.quarantine())
    one.apply(rejected("a"), "q1", 0)
    other.apply(rejected("b", source="visits"), "q2", 0)
    one.apply(rejected("c"), "q1", 1)  # it does not know of the other's commit yet
    assert ids(lake) == ["a", "b", "c"]
    one.replace(rejected("d"), "clicks", ("q1", 1))
    assert ids(lake) == ["b", "d"]
    one.apply(rejected("e"), "q1", 2)
    assert ids(lake) == ["b", "d", "e"]


def test_a_batch_behind_those_that_were_filled_in_comes_again(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    kept = Quarantine(lake.quarantine())
    kept.apply(rejected("a"), "q", 5)
    kept.apply(rejected("b"), "q", 6)  # and a crash before the query has noted it
    for again in (kept, Quarantine(lake.quarantine())):
        again.replace(rejected("a"), "clicks", ("q", 5))
        again.apply(rejected("a"), "q", 5)
        again.apply(rejected("b"), "q", 6)
        assert ids(lake) == ["a", "b"]
    absent = Lake(tmp_path / "other")
    made = Quarantine(absent.quarantine())
    made.replace(rejected("a"), "clicks", ("q", 5))
    made.apply(rejected("a"), "q", 5)
    assert ids(absent) == ["a"]
