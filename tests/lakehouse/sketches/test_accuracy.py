"""The benchmark of the sketches in small: bounds that are never broken, and errors of the published order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.bench import bench_sketches as bench


@pytest.mark.parametrize(
    "task",
    [
        lambda: bench.distinct(200_000, lg_k=12, part=50_000, processes=1),
        lambda: bench.heavy_hitters(50_000, items=5_000, lg_k=8, parts=10),
        lambda: bench.membership(3_000, parts=3),
        lambda: bench.quantiles(50_000, parts=20, trials=2),
        lambda: bench.sample(150),
    ],
    ids=["distinct", "heavy_hitters", "membership", "quantiles", "sample"],
)
def test_the_truth_lies_within_the_bounds(task: Callable[[], dict[str, Any]]) -> None:
    found = task()
    assert found["violations"] == 0
    # A standard error, and the share of false positives, may be passed; not by three times.
    assert 0 <= found["error"] < 3 * found["bound"]


def test_count_min() -> None:
    for found in bench.frequency(50_000, items=3_000, parts=5):
        assert found["violations"] == 0
        assert 0 <= found["error"] <= found["bound"]
