"""Quantiles: what two builds of the same events may differ in, and what not."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from lakehouse.contract.pipeline import Product
from lakehouse.operators.sketched import Quantiles, quantile_name
from lakehouse.replay import compare
from tests.lakehouse.operators.partials import Event, quantiles

PRODUCT = Product("gold", "r", "SELECT 1", operator="quantiles", item="item", time="t", by=("city",), k=20, name="p")
OPERATOR = Quantiles(PRODUCT)
VALUES = [Event(n, 0, "a", random.Random(n).randrange(1_000_000)) for n in range(5_000)]


def build(batches: int, stream: list[Event] = VALUES) -> pa.Table:
    """The product's rows after so many batches."""
    rows: pa.Table | None = None
    for start in range(batches):
        partial = quantiles(stream[start::batches], 60)
        OPERATOR.describe(partial.schema)
        rows = OPERATOR.merge(rows, partial)
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("rank", "name"), [(0.5, "p50"), (0.999, "p99_9"), (0.07, "p7"), (1.0, "p100"), (0.0, "p0"), (0.12345, "p12_345")]
)
def test_names(rank: float, name: str) -> None:
    assert quantile_name(rank) == name


def test_two_builds_agree_within_their_errors() -> None:
    one, other = build(1), build(40)
    found = compare("p", 1, 1, one, other, OPERATOR)
    assert found.live != found.replayed  # or the sketches drew nothing, and this shows nothing
    assert found.equal


@pytest.mark.parametrize("changed", ["p50", "p99", "r", "min", "max"])
def test_a_changed_column_is_found(changed: str) -> None:
    rows: list[dict[str, Any]] = build(3).to_pylist()
    rows[0][changed] += 1
    one = pa.Table.from_pylist(rows, schema=OPERATOR.schema)
    assert not compare("p", 1, 1, one, build(3), OPERATOR).equal


def test_other_values_are_found() -> None:
    """As many, as small and as large, and another distribution between."""
    ordered = sorted(event.item for event in VALUES)
    low, high = ordered[0], ordered[-1]
    squeezed = [
        Event(event.id, 0, "a", event.item if event.item in (low, high) else low + (event.item - low) // 2)
        for event in VALUES
    ]
    assert not compare("p", 1, 1, build(3), build(3, squeezed), OPERATOR).equal


def test_other_windows_are_found() -> None:
    moved = [Event(event.id, event.at + 60, event.city, event.item) for event in VALUES]
    assert not compare("p", 1, 1, build(3), build(3, moved), OPERATOR).equal
