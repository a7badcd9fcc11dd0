"""Sketches that DataSketches in Java wrote, from its tests across languages: read in Python and in Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from lakehouse.sketches.kinds import Question, sketch_of
from tests.registries import sdist

pytestmark = [pytest.mark.soak, pytest.mark.spark]

DISTINCT = {
    "list": 7,
    "compact_set": 24,
    "updatable_set": 24,
    "compact_array4": 10_000,
    "updatable_array4": 10_000,
    "array6": 10_000,
}
COUNTS = {
    "items_sketch_string": {letter * 29: 1 for letter in "abcd"},
    "items_sketch_string_utf8": {"абвгд": 1, "еёжзи": 2, "йклмн": 3, "опрст": 4},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last source distribution that has the files."""
    checksum = "b8f6ced0d340de8efe6480cd1fd9f6bb0766e9d96b23f67e93361826d93555e1"
    return sdist("datasketches", "3.4.0", checksum, tmp_path_factory.mktemp("datasketches"))


@pytest.mark.parametrize("name", DISTINCT)
def test_distinct_counts(written: Path, spark: SparkSession, name: str) -> None:
    sketch = (written / f"hll/test/{name}_from_java.sk").read_bytes()
    merged = sketch_of(json.dumps({"operator": "distinct", "lg_k": 8}))
    for _ in range(2):  # the same again adds nothing
        merged.add({"sketch": sketch})
        [answer] = merged.answers(Question())
        assert answer.lower is not None and answer.upper is not None
        assert answer.lower <= DISTINCT[name] <= answer.upper
    row = spark.createDataFrame([(sketch, merged.serialize()["sketch"])], "java BINARY, ours BINARY")
    java, ours = row.selectExpr("hll_sketch_estimate(java)", "hll_sketch_estimate(ours)").first() or (0, 0)
    assert ours == round(float(answer.estimate))
    assert (
        answer.lower <= java <= answer.upper
    )  # of one sketch, in the order of its items; ours are the same in any order


@pytest.mark.parametrize("name", COUNTS)
def test_frequent_items(written: Path, name: str) -> None:
    merged = sketch_of(json.dumps({"operator": "top_n"}))
    sketch = (written / f"fi/test/{name}_from_java.sk").read_bytes()
    for times in (1, 2):
        merged.add({"sketch": sketch, "unseen": 0})
        found = {answer.what: answer.estimate for answer in merged.answers(Question(n=10))}
        assert found == {item: times * count for item, count in COUNTS[name].items()}
