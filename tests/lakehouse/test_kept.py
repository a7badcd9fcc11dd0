"""A micro-batch's events are computed once, whoever reads them, and let go."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakehouse.kept import kept

pytestmark = pytest.mark.spark


def test_events_are_read_once_and_let_go(spark: SparkSession, tmp_path: Path) -> None:
    file = str(tmp_path / "events")
    rows = [(1, "a", [("x", 1)]), (2, None, []), (3, "ä" * 100, None)]
    kind = "id INT, text STRING, parts ARRAY<STRUCT<name: STRING, n: INT>>"
    spark.createDataFrame(rows, kind).coalesce(1).write.parquet(file)
    held = spark.sparkContext._jsc.sc().getPersistentRDDs
    before = held().size()
    # A random number tells two computations apart.
    events = spark.read.schema(kind).parquet(file).withColumn("once", F.rand())
    with kept(events) as same:
        first = same.orderBy("id").toArrow()
        assert held().size() == before + 1
        assert same.orderBy("id").toArrow().equals(first)
        assert same.where("id = 3").select("once").toArrow()["once"][0] == first["once"][2]
        assert [row["text"] for row in first.to_pylist()] == ["a", None, "ä" * 100]
        assert first["parts"].to_pylist() == [[{"name": "x", "n": 1}], [], None]
    assert held().size() == before
