"""The bronze table and how far it is."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.bronze.table import COLUMNS, Progress, create, progress
from lakehouse.contract.lake import Lake, TableRef
from tests.lakehouse.lakes import T0, bronze_rows

T0_US = int(T0.timestamp() * 1e6)


@pytest.fixture
def table(tmp_path: Path) -> TableRef:
    ref = Lake(tmp_path).bronze("clicks")
    create(ref)
    return ref


def append(table: TableRef, count: int, first: int = 0, metadata: str | None = None, partition: int = 0) -> None:
    rows = bronze_rows(
        [b"x"] * count,
        offset=range(first, first + count),
        partition=[partition] * count,
        bronze_at=[T0 + timedelta(seconds=first)] * count,
    )
    properties = CommitProperties(custom_metadata={"userMetadata": metadata}) if metadata else None
    write_deltalake(str(table.path), rows, mode="append", commit_properties=properties)


@given(st.dictionaries(st.text(), st.integers(0, 2**62)), st.integers(0, 2**62), st.dictionaries(st.text(), st.text()))
def test_progress_as_metadata(offsets: dict[str, int], bronze_at: int, topics: dict[str, str]) -> None:
    made = Progress(offsets, bronze_at, topics)
    assert Progress.from_metadata(made.to_metadata()) == made
    assert Progress.from_metadata(json.dumps({"offsets": offsets, "bronze_at": bronze_at})) == Progress(
        offsets, bronze_at
    )


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '"a"', '{"offsets": 1, "bronze_at": 1}', '{"offsets": {}}'])
def test_metadata_of_somebody_else(text: str) -> None:
    assert Progress.from_metadata(text) is None


def test_a_table_that_is_not_there_or_empty(tmp_path: Path, table: TableRef) -> None:
    assert progress(Lake(tmp_path / "other").bronze("clicks")) == Progress()
    assert progress(table) == Progress()
    create(table)  # again: nothing happens
    assert DeltaTable(str(table.path)).version() == 0


def test_progress_stands_in_the_newest_commit_that_says_so(table: TableRef) -> None:
    append(table, 3, metadata=Progress({"clicks/0": 3}, 7).to_metadata())
    append(table, 2, 3, metadata=Progress({"clicks/0": 5, "clicks/1": 9}, 8).to_metadata())
    write_deltalake(
        str(table.path),
        COLUMNS.empty_table(),
        mode="append",
        commit_properties=CommitProperties(custom_metadata={"userMetadata": "a note of somebody's"}),
    )
    DeltaTable(str(table.path)).optimize.compact()
    assert progress(table) == Progress({"clicks/0": 5, "clicks/1": 9}, 8)


def test_progress_from_the_rows_when_the_log_is_gone(table: TableRef) -> None:
    append(table, 3, metadata=Progress({"clicks/0": 3}, T0_US).to_metadata())
    append(table, 4, 10, partition=1)
    loaded = bronze_rows([b"x"], origin=["feed.csv"], offset=[99], topic=["feed.csv"])
    write_deltalake(str(table.path), loaded, mode="append")
    delta = DeltaTable(str(table.path))
    delta.create_checkpoint()
    for commit in (table.path / "_delta_log").glob("*.json"):
        commit.unlink()
    assert progress(table) == Progress({"clicks/0": 3, "clicks/1": 14}, T0_US + 10_000_000)


def test_the_record_can_only_be_added_to(table: TableRef) -> None:
    append(table, 3)
    with pytest.raises(DeltaError, match="append"):
        DeltaTable(str(table.path)).delete("offset = 1")


def test_rows_lie_by_day(table: TableRef) -> None:
    append(table, 1)
    assert DeltaTable(str(table.path)).metadata().partition_columns == ["date"]
    assert [json.loads(p.read_text().splitlines()[0]) for p in (table.path / "_delta_log").glob("*.json")]


def test_a_table_from_before_a_column_gets_it_and_keeps_its_rows(tmp_path: Path) -> None:
    ref = Lake(tmp_path).bronze("clicks")
    old = bronze_rows([b"x"] * 2).drop_columns(["weight"])
    write_deltalake(str(ref.path), old, partition_by=["date"], configuration={"delta.appendOnly": "true"})
    create(ref)
    create(ref)  # a second time changes nothing
    assert DeltaTable(str(ref.path)).version() == 1
    write_deltalake(str(ref.path), bronze_rows([b"y"], weight=[2.5], offset=[2]), mode="append")
    rows = DeltaTable(str(ref.path)).to_pyarrow_table().sort_by("offset")
    assert rows["weight"].to_pylist() == [None, None, 2.5]
