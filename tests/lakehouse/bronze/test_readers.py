"""Bronze that is not the table that was derived from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable

from lakehouse.bronze.readers import check_record, note_record
from lakehouse.contract.lake import Lake
from lakehouse.errors import BronzeReplaced
from tests.lakehouse.test_maintain import TOTALS, bronze, reading, store_with


def test_a_new_lake_and_one_that_lost_its_state(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    check_record(lake, "clicks")
    table = bronze(lake, 3)
    store = store_with(lake, TOTALS, 1)
    check_record(lake, "clicks", [store.table])
    note_record(lake, "clicks")
    reading(lake, table, 4)
    check_record(lake, "clicks", [store.table])
    shutil.rmtree(lake.state)
    check_record(lake, "clicks", [store.table])


def test_bronze_that_was_deleted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    table = bronze(lake, 3)
    store = store_with(lake, TOTALS, 1)
    note_record(lake, "clicks")
    reading(lake, table, 4)
    shutil.rmtree(table.path)
    with pytest.raises(BronzeReplaced, match=r"bronze/clicks is gone") as caught:
        check_record(lake, "clicks", [store.table])
    bronze(lake, 1)
    with pytest.raises(BronzeReplaced, match="another table than before"):
        check_record(lake, "clicks", [store.table])
    assert {path.relative_to(tmp_path).as_posix() for path in caught.value.leftovers} == {
        "_millrace/record/clicks",
        "_millrace/readers/live-clicks.json",
        "gold/totals",
    }
    for path in caught.value.leftovers:  # the remedy
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    check_record(lake, "clicks", [store.table])


def test_products_without_their_record(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    store = store_with(lake, TOTALS, 1)
    with pytest.raises(BronzeReplaced, match="is gone"):
        check_record(lake, "clicks", [store.table])


def test_bronze_that_was_put_back_from_an_older_copy(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    table = bronze(lake, 3)
    note_record(lake, "clicks")
    copy = tmp_path / "copy"
    shutil.copytree(table.path, copy)
    bronze(lake, 2, first=3)
    reading(lake, table, 6)
    check_record(lake, "clicks")
    shutil.rmtree(table.path)
    shutil.copytree(copy, table.path)
    assert DeltaTable(str(table.path)).version() == 3
    with pytest.raises(BronzeReplaced, match="live-clicks has read up to version 5, and it ends at 3"):
        check_record(lake, "clicks")
    shutil.rmtree(lake.state / "readers")
    for part, text in (("offsets", json.dumps({"clicks": {"0": 10}})), ("commits", "")):
        folder = lake.checkpoint("bronze-clicks") / part
        folder.mkdir(parents=True)
        (folder / "0").write_text(f"v1\n{{}}\n{text}")
    with pytest.raises(BronzeReplaced, match="offsets of clicks/0 up to 10 were taken, and it has those up to 6"):
        check_record(lake, "clicks")
