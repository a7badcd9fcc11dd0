"""Questions to Count-Min sketches."""

from __future__ import annotations

from collections import Counter

import datasketches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.errors import BadSketch
from lakehouse.sketches.kinds import count_min_inner_product, count_min_point, count_min_range, counters, dyadic

BITS = 6
numbers = st.lists(st.integers(0, 2**BITS - 1), max_size=60)


def sketch(items: list[int], width: int = 16_384) -> datasketches.count_min_sketch:
    found = datasketches.count_min_sketch(4, width)
    for item in items:
        found.update(item)
    return found


@settings(max_examples=30)
@given(st.integers(0, 2**BITS - 1), st.integers(0, 2**BITS - 1))
def test_blocks_make_up_the_range(low: int, high: int) -> None:
    blocks = list(dyadic(low, high, BITS))
    covered = [item for level, block in blocks for item in range(block << level, (block + 1) << level)]
    assert covered == list(range(low, high + 1))
    assert len(blocks) <= 2 * BITS


@settings(max_examples=20)
@given(numbers, numbers, st.integers(-5, 70), st.integers(-5, 70))
def test_wide_sketches_are_exact(one: list[int], other: list[int], low: int, high: int) -> None:
    """16,384 counters a row for 64 items, each with a hash of its own: some row tells them all apart."""
    here, there = Counter(one), Counter(other)
    levels = [sketch([item >> level for item in one]) for level in range(BITS)]
    found = count_min_range(levels, low, high)
    assert found.lower <= sum(low <= item <= high for item in one) <= found.upper
    assert found.estimate == sum(low <= item <= high for item in one)
    assert count_min_inner_product(levels[0], sketch(other)).estimate == sum(here[item] * there[item] for item in here)
    for item in range(2**BITS):
        assert count_min_point(levels[0], item).estimate == here[item]


def test_the_table_is_read_from_the_bytes() -> None:
    found = sketch([1, 1, 2], width=16)
    rows = counters(found)
    assert rows.shape == (4, 16)
    assert (rows.sum(axis=1) == 3).all()
    assert np.array_equal(counters(sketch([], width=16)), np.zeros((4, 16)))


def test_confidence() -> None:
    found = count_min_point(sketch([7] * 10, width=128), 7)
    assert (found.estimate, found.upper, found.confidence) == (10, 10, 1 - 2**-4)
    assert found.lower == pytest.approx(10 - 2 * 10 / 128)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(BadSketch, match="no inner product"):
        count_min_inner_product(sketch([1]), sketch([1], width=64))
