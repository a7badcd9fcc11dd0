"""Products and indexes built from more of bronze than the driver may fetch at once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ingest.simulate.scenes import SCENES
from lakehouse.batch import slices
from lakehouse.contract.settings import conf_dir
from lakehouse.silver.conform import conform
from tests.lakehouse.examples.play import START_MS, Example

pytestmark = pytest.mark.spark
MORE = """
[products.shown]
layer = "gold"
source = "impressions"
sql = "SELECT window.start AS window_start, count(*) AS n FROM impressions GROUP BY window(event_time, '1 minute')"

[products.clicked]
layer = "gold"
source = "clicks"
sql = "SELECT window.start AS window_start, count(*) AS n FROM clicks GROUP BY window(event_time, '1 minute')"
"""
A_DAY = 86_400


@contextmanager
def small_driver(spark: SparkSession) -> Iterator[None]:
    """A driver that may fetch no more than 1 MiB at once."""
    assert spark.sparkContext._jsc is not None
    conf = spark.sparkContext._jsc.sc().conf()
    before = conf.get("spark.driver.maxResultSize", "1g")
    conf.set("spark.driver.maxResultSize", "1m")
    try:
        yield
    finally:
        conf.set("spark.driver.maxResultSize", before)


@pytest.fixture
def example(tmp_path: Path) -> Example:
    """Two sources, one with a horizon; each has a product of its own beside the join."""
    folder = tmp_path / "ads"
    shutil.copytree(conf_dir() / "pipelines" / "ads", folder)
    declared = (folder / "pipeline.toml").read_text()
    declared = declared.replace("[sources.clicks]\n", '[sources.clicks]\ndedupe_horizon = "1 hour"\n')
    begins, ends = declared.index("[products.click_through]"), declared.index("[products.time_to_click]")
    (folder / "pipeline.toml").write_text(declared[:begins] + declared[ends:] + MORE)
    return Example(tmp_path, folder, repeats=0.05)


@pytest.mark.soak
def test_a_build_is_not_bounded_by_what_the_driver_may_fetch(example: Example, spark: SparkSession) -> None:
    events = list(islice(SCENES["ads"](5, START_MS), 19_000))
    impressions = [found for found in events[:15_000:15] if found[0] == "impressions"]
    example.write(events[:12_000])  # one commit that is more than a slice
    for start in range(12_000, 15_000, 1_000):
        example.write(events[start : start + 1_000])
    example._commits += A_DAY
    example.write([*events[15_000:18_000], *impressions[::2]])
    with small_driver(spark), example.running(spark) as driver:
        example.wait(driver)
        example.write([*events[18_000:], *impressions, *events[16_000:16_500]])
        example.wait(driver)
    names = ("time_to_click", "shown", "clicked", "quarantine")
    assert example.verified(spark) == dict.fromkeys(names, True)


def test_slices_are_bronze_in_its_order(example: Example, spark: SparkSession) -> None:
    events = [found for found in islice(SCENES["ads"](5, START_MS), 20_000) if found[0] == "impressions"]
    for day, count in enumerate((100, 100, 6_000, 0, 50)):
        example._commits = day * A_DAY
        commits = [events[:count]] if count < 1_000 else [events[:5_000], events[5_000:5_400], events[5_400:count]]
        for commit in commits:
            example.write(commit)
        del events[:count]
    source = example.pipeline.sources["impressions"]
    bronze, version = example.lake.bronze("impressions").path, 6
    with small_driver(spark):
        found = [
            events.select("bronze_at", F.hex("dedupe_key").alias("key"), "offset", "partition").toArrow().to_pylist()
            for events in slices(spark, bronze, source, version, F.lit(128))
        ]
    whole = conform(spark.read.format("delta").load(str(bronze)), source).select("offset", "partition").collect()
    assert sorted((row["offset"], row["partition"]) for rows in found for row in rows) == sorted(map(tuple, whole))
    assert max(map(len, found)) < 4_500
    times = [{row["bronze_at"] for row in rows} for rows in found]
    assert all(max(before) <= min(after) for before, after in pairwise(times))
    keys = [{row["key"] for row in rows} for rows in found]
    assert sum(map(len, keys)) == len(set().union(*keys))  # no event is in two slices
    assert len(found) == 5  # two days, two halves of a commit, two commits, a day


def test_an_empty_table_is_one_slice(example: Example, spark: SparkSession) -> None:
    source = example.pipeline.sources["clicks"]
    (events,) = slices(spark, example.lake.bronze("clicks").path, source, 0, F.lit(128))
    assert events.count() == 0
