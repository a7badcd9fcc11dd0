"""Staging tables: a part of the record, made anew or refreshed, in one commit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source, load_pipeline
from lakehouse.contract.pipeline.folder import Staging
from lakehouse.contract.settings import conf_dir
from lakehouse.contract.storage import remove_tree
from lakehouse.errors import StagingError
from lakehouse.load.staging import refresh
from lakehouse.maintain.care import Caretaker
from serve.sql.statement import run_sql

COLUMNS = ("merchant", "offer", "version", "title", "price", "available", "tie")
STAGING = Staging("catalogue", ("price", "title"), "available AND price < 20", name="bargains")


def pipeline() -> Pipeline:
    source = Source("offers", "merchant STRING", "now()")
    product = Product(
        "gold",
        "offers",
        "SELECT * FROM offers",
        operator="latest",
        by=("merchant", "offer"),
        version="version",
        storage="append",
        name="catalogue",
    )
    return Pipeline({"offers": source}, {"catalogue": product}, staging={"bargains": STAGING})


def record(lake: Lake, *rows: tuple[str, str, int, str, float, bool]) -> None:
    """Append partial rows to the catalogue."""
    made = pa.table({name: list(column) for name, column in zip(COLUMNS[:-1], zip(*rows, strict=True), strict=True)})
    made = made.append_column("tie", pa.array([1] * len(rows), pa.int64()))
    configuration = {
        names.PROPERTY_KEY: "merchant,offer",
        names.PROPERTY_FOLD: json.dumps(dict.fromkeys(COLUMNS[2:], "latest")),
        names.PROPERTY_ORDER: "version,tie",
    }
    path = lake.table("gold", "catalogue").path
    path.mkdir(parents=True, exist_ok=True)
    DeltaTable.create(str(path), made.schema, "ignore", configuration=configuration, raise_if_key_not_exists=False)
    write_deltalake(str(path), made, mode="append")


def shown(lake: Lake) -> list[tuple[object, ...]]:
    rows = DeltaTable(str(lake.table("gold", "bargains").path)).to_pyarrow_table()
    assert rows.schema.names == ["merchant", "offer", "price", "title"]
    return sorted(tuple(row.values()) for row in rows.to_pylist())


def test_rebuilt_and_refreshed(lake: Lake) -> None:
    with pytest.raises(StagingError, match="no table catalogue yet"):
        refresh(lake, pipeline(), STAGING)
    record(lake, ("m1", "o1", 2, "Lamp", 5.0, True), ("m1", "o2", 1, "Desk", 90.0, True))
    record(lake, ("m1", "o1", 1, "Old lamp", 4.0, True), ("m2", "o1", 1, "Tea", 3.0, False))
    first = refresh(lake, pipeline(), STAGING)
    assert (first.rows, first.changed, first.product_version) == (1, True, 2)
    assert shown(lake) == [("m1", "o1", 5.0, "Lamp")]
    assert refresh(lake, pipeline(), STAGING) == replace(first, changed=False)

    before = DeltaTable(str(lake.table("gold", "bargains").path))
    record(lake, ("m1", "o2", 2, "Desk", 19.0, True), ("m2", "o1", 2, "Tea", 3.5, True))
    again = refresh(lake, pipeline(), STAGING)
    assert (again.rows, again.changed, again.version) == (3, True, first.version + 1)
    assert len(shown(lake)) == 3
    assert before.to_pyarrow_table().num_rows == 1  # who reads the old version goes on reading it
    assert run_sql(lake, "SELECT count(*) AS n FROM bargains").to_pylist() == [{"n": 3}]
    assert run_sql(lake, "SELECT title FROM catalogue WHERE offer = 'o1' ORDER BY 1").to_pylist() == [
        {"title": "Lamp"},
        {"title": "Tea"},
    ]

    made = refresh(lake, pipeline(), STAGING, rebuild=True)
    assert (made.rows, made.changed, made.version) == (3, True, again.version + 1)
    remove_tree(lake.table("gold", "bargains").path)  # dropped: the record has everything
    assert refresh(lake, pipeline(), STAGING, rebuild=True).rows == 3
    assert len(shown(lake)) == 3

    wider = replace(STAGING, where="", columns=())
    assert refresh(lake, pipeline(), wider).rows == 3  # its declaration has changed
    assert run_sql(lake, "SELECT count(*) AS n FROM bargains WHERE tie = 1").to_pylist() == [{"n": 3}]


def test_a_running_driver_refreshes_it_on_its_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lake, now = Lake(tmp_path), [0.0]
    hourly = replace(STAGING, name="hourly", every="1 hour")
    broken = replace(STAGING, name="broken", where="price <", every="1 hour")
    declared = replace(pipeline(), staging={"broken": broken, "hourly": hourly, "bargains": STAGING})
    care = Caretaker(lake, declared, now=lambda: now[0])
    assert care.turn() == [], "the product is not there yet"
    record(lake, ("m1", "o1", 2, "Lamp", 5.0, True))
    assert care.turn() == ["hourly: 1 rows of catalogue version 1"]
    assert "staging table broken is not refreshed" in caplog.text
    record(lake, ("m1", "o2", 2, "Desk", 6.0, True))
    now[0] = 3_599.0
    assert [said for said in care.turn() if "hourly:" in said] == []
    now[0] = 3_600.0
    assert "hourly: 2 rows of catalogue version 2" in care.turn()
    now[0] = 7_200.0
    assert [said for said in care.turn() if said.startswith("hourly:")] == [], "nothing is new"
    assert not lake.table("gold", "bargains").exists(), "without a schedule only the command makes it"


@pytest.mark.parametrize(
    ("changed", "error", "problem"),
    [
        ({"columns": ("nothing",)}, StagingError, "has no column 'nothing'"),
        ({"where": "price <"}, ConfigError, "where"),
        ({"where": "price IN (SELECT 1)"}, ConfigError, "where"),
        ({"where": "count(*) > 1"}, ConfigError, "where"),
        ({"where": "read_text('x') = 'y'"}, ConfigError, "where"),
    ],
)
def test_what_cannot_be_staged(
    tmp_path: Path, changed: dict[str, object], error: type[Exception], problem: str
) -> None:
    lake = Lake(tmp_path)
    record(lake, ("m1", "o1", 2, "Lamp", 5.0, True))
    with pytest.raises(error, match=problem):
        refresh(lake, pipeline(), replace(STAGING, **changed))  # type: ignore[arg-type]


def test_the_pipeline_declares_it() -> None:
    loaded = load_pipeline(conf_dir() / "pipelines" / "offers")
    assert loaded.staging["bargains"].product == "catalogue"
    with pytest.raises(ConfigError, match="no product 'nothing'"):
        replace(loaded, staging={"x": Staging("nothing", name="x")})
    with pytest.raises(ConfigError, match="the name is taken"):
        replace(loaded, staging={"offers": Staging("catalogue", name="offers")})
