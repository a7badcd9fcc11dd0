"""Distinct counts: the same whatever the batches were, and inside their bounds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import datasketches
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP, Operator
from lakehouse.operators.registry import operator_of

START = datetime(2026, 1, 1, tzinfo=UTC)
PARTIAL = pa.schema(
    [("window_start", TIMESTAMP), ("window_end", TIMESTAMP), ("sketch", pa.binary()), ("r", pa.int64())]
)


def distinct(lg_k: int = 12) -> Operator:
    return operator_of(
        Product("gold", "r", "SELECT t, i FROM r", operator="distinct", item="i", time="t", lg_k=lg_k, name="people")
    )


def partial(items: list[int], lg_k: int = 12) -> pa.Table:
    """What Spark gives for a batch of one window."""
    sketch = datasketches.hll_sketch(lg_k, datasketches.tgt_hll_type.HLL_8)
    for item in items:
        sketch.update(item)
    row = {
        "window_start": START,
        "window_end": START + timedelta(minutes=1),
        "sketch": sketch.serialize_compact(),
        "r": len(items),
    }
    return pa.Table.from_pylist([row], schema=PARTIAL)


def merged(operator: Operator, parts: list[pa.Table]) -> dict[str, object]:
    rows: pa.Table | None = None
    for part in parts:
        rows = operator.merge(rows, part)
    assert rows is not None
    (row,) = rows.to_pylist()
    del row["sketch"]
    return row


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 5_000), min_size=1, max_size=400), min_size=1, max_size=6),
    st.sampled_from([5, 8, 12]),
    st.randoms(use_true_random=False),
)
def test_the_estimate_depends_on_the_set_of_items_alone(batches: list[list[int]], lg_k: int, random: object) -> None:
    operator = distinct(lg_k)
    parts = [partial(batch, lg_k) for batch in batches]
    one_by_one = merged(operator, parts)
    random.shuffle(parts)  # type: ignore[attr-defined]
    assert merged(operator, parts) == one_by_one
    assert merged(operator, [pa.concat_tables(parts)]) == one_by_one
    together = merged(operator, [partial(sum(batches, []), lg_k)])  # noqa: RUF017 - a few lists
    assert together == one_by_one
    assert one_by_one["r"] == sum(map(len, batches))


@pytest.mark.parametrize("count", [1, 10, 100, 1_000, 50_000])
@pytest.mark.parametrize("lg_k", [8, 12])
def test_the_truth_lies_within_the_bounds(count: int, lg_k: int) -> None:
    step = max(1, count // 7)
    parts = [partial(list(range(start, min(count, start + 2 * step))), lg_k) for start in range(0, count, step)]
    row = merged(distinct(lg_k), parts)
    lower, upper, estimate = (float(str(row[name])) for name in ("lower", "upper", "people"))
    assert lower <= count <= upper
    assert abs(estimate - count) <= max(0.5, 3 * 1.04 / 2 ** (lg_k / 2) * count)


def test_a_batch_counted_twice_changes_the_events_and_not_the_estimate() -> None:
    """Skipping a repeated batch is the store's work; the sketch itself does not mind."""
    part = partial(list(range(3000)))
    once, twice = merged(distinct(), [part]), merged(distinct(), [part, part])
    assert once["people"] == twice["people"]
    assert (once["r"], twice["r"]) == (3000, 6000)
