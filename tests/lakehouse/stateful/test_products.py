"""Trigger, retention and the dedupe horizon of products, in a driver on a lake of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from lakehouse.errors import BadProduct
from lakehouse.gold.state_store import store_of
from tests.lakehouse.examples.play import START_MS, Event, Example, at
from tests.lakehouse.lakes import eventually

pytestmark = pytest.mark.spark
PIPELINE = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT, at BIGINT, who STRING"
event_id = "{id}"
key = "{id}"
event_time = "timestamp_millis(at)"
dedupe_horizon = "4 seconds"

[products.by_minute]
layer = "gold"
source = "clicks"
sql = "SELECT window.start AS window_start, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute')"
retention = "10 minutes"

[products.partials]
layer = "silver"
source = "clicks"
sql = "SELECT window.start AS window_start, who, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute'), who"
storage = "append"
retention = "10 minutes"

[products.seldom]
layer = "gold"
source = "clicks"
sql = "SELECT who, count(*) AS n FROM clicks GROUP BY who"
trigger = "2 seconds"
"""


def clicks(*minutes: int, first: int = 0) -> list[Event]:
    return [
        ("clicks", {"id": first + n, "at": START_MS + 60_000 * minute, "who": "ab"[n % 2]})
        for n, minute in enumerate(minutes)
    ]


def test_trigger_and_retention(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    example = Example(tmp_path, tmp_path / "clicks", repeats=0.2)
    minutes = lambda: sorted((row["window_start"], row["n"]) for row in example.rows("by_minute"))  # noqa: E731
    with example.running(spark) as driver:
        example.write(clicks(0, 1, 1, 5))
        example.wait(driver)
        assert minutes() == [(at(START_MS + 60_000 * m), n) for m, n in ((0, 1), (1, 2), (5, 1))]
        example.write(clicks(12, 13, first=10))
        example.wait(driver)
        wanted = [(at(START_MS + 60_000 * m), 1) for m in (5, 12, 13)]  # 13 - 10 is behind 0 and 1
        eventually(lambda: minutes() == wanted, alive=driver.is_alive)  # removed in a commit of its own
        for n in range(6):
            example.write(clicks(1, 5, 13, first=20 + 3 * n))  # minute 1 is too late, minute 5 is not
            example.wait(driver) if n == 5 else None
        assert minutes() == [(at(START_MS + 60_000 * m), n) for m, n in ((5, 7), (12, 1), (13, 7))]
        old = at(START_MS + 3 * 60_000)
        assert all(row["window_start"] > old for row in example.rows("partials"))
        assert {row["who"]: row["n"] for row in example.rows("seldom")} == {"a": 15, "b": 9}
    versions = [DeltaTable(str(example.lake.table("gold", name).path)).version() for name in ("seldom", "by_minute")]
    assert versions[0] <= versions[1]
    names = {file.stem for file in (example.lake.state / "readers").iterdir()}
    assert names == {"live-clicks", "live-clicks-every-2000"}
    assert set(example.verified(spark).values()) == {True}


def test_retention_needs_something_that_ends(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text(PIPELINE + 'retention = "1 day"\n', encoding="utf-8")
    example = Example(tmp_path / "lake", tmp_path)
    product = example.pipeline.products["seldom"]
    with pytest.raises(BadProduct, match="retention removes windows"):
        store_of(product, example.lake.table("gold", "seldom"), "test")


def test_an_id_counts_again_behind_the_horizon(tmp_path: Path, spark: SparkSession) -> None:
    """Commits of bronze are a second apart (see Example)."""
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
    example = Example(tmp_path, tmp_path / "clicks", repeats=0)
    counts = lambda: {row["who"]: row["n"] for row in example.rows("seldom")}  # noqa: E731
    example.write(clicks(0, 0))
    example.write(clicks(0, 0))
    with example.running(spark) as driver:
        example.wait(driver)
        assert counts() == {"a": 1, "b": 1}
        for _ in range(3):
            example.write(clicks(0))
        example.wait(driver)
        for n in range(5):
            example.write(clicks(0, first=100 + n))  # time goes on
        example.write(clicks(0, 0))  # 6 s behind the last copy of a, 9 s behind that of b
        example.wait(driver)
        assert counts() == {"a": 1 + 5 + 1, "b": 1 + 1}
    assert set(example.verified(spark).values()) == {True}


ORDERED = """
[sources.clicks]
topic = "clicks"
schema = "id BIGINT, at BIGINT, who STRING"
event_id = "{id}"
key = "{id}"
event_time = "timestamp_millis(at)"
partitions = 1

[products.fives]
layer = "gold"
source = "clicks"
operator = "count_window"
time = "event_time"
size = 5
aggregates = { least = "min(id)", most = "max(id)" }

[products.total]
layer = "gold"
source = "clicks"
sql = "SELECT who, count(*) AS n FROM clicks GROUP BY who"
"""


def test_a_batch_that_ends_inside_a_version_changes_no_order(tmp_path: Path, spark: SparkSession) -> None:
    """A version in three files, the rows that are first in bronze's order in the last of them; a file a batch."""
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "pipeline.toml").write_text(ORDERED, encoding="utf-8")
    example = Example(tmp_path, tmp_path / "clicks", repeats=0)
    small = dataclasses.replace(example.settings.spark, max_bytes_per_trigger="1")
    example.settings = dataclasses.replace(example.settings, spark=small)
    windows = lambda: sorted((r["number"], r["events"], r["least"], r["most"]) for r in example.rows("fives"))  # noqa: E731
    with example.running(spark) as driver:
        for start in (0, 12):
            example.write_in_files([clicks(*[0] * 4, first=start + 4 * n) for n in (2, 1, 0)])
        example.write(clicks(0, 0, first=0))  # again
        example.wait(driver)
        wanted = [(n, min(5, 24 - 5 * n), 5 * n, min(23, 5 * n + 4)) for n in range(5)]
        eventually(lambda: windows() == wanted, alive=driver.is_alive)
    assert sum(row["n"] for row in example.rows("total")) == 24
    assert set(example.verified(spark).values()) == {True}
