"""The canonical digest. Whole lakes are compared in test_stream.py."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import datasketches
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP
from lakehouse.operators.sketched import TopN
from lakehouse.replay import Comparison, compare, digest

SCHEMA = pa.schema(
    [("n", pa.int64()), ("city", pa.string()), ("share", pa.float64()), ("at", pa.timestamp("us", "UTC"))]
)
AT = datetime(2026, 1, 1, tzinfo=UTC)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | st.integers(-9, 9),
            "city": st.none() | st.sampled_from(["", "a", "None", "Köln"]),
            "share": st.none() | st.sampled_from([0.0, 1.5, 1e300]),
            "at": st.none() | st.just(AT),
        }
    ),
    max_size=6,
)


def table(found: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(found, schema=SCHEMA)


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_columns_does_not_matter(found: list[dict[str, object]], shuffler: random.Random) -> None:
    other = list(found)
    shuffler.shuffle(other)
    assert digest(table(found)) == digest(table(other).select(["at", "n", "share", "city"]))


@given(rows, rows)
def test_other_rows_have_another_digest(one: list[dict[str, object]], other: list[dict[str, object]]) -> None:
    same = sorted(repr(sorted(row.items())) for row in one) == sorted(repr(sorted(row.items())) for row in other)
    assert (digest(table(one)) == digest(table(other))) == same


def test_sketches_and_last_bits_are_left_out() -> None:
    one = pa.table({"a": [0.1 + 0.2], "sketch": pa.array([b"x"], pa.binary())})
    other = pa.table({"a": [0.3], "sketch": pa.array([b"y"], pa.binary())})
    assert digest(one) == digest(other)
    assert digest(one) != digest(pa.table({"a": [0.3000001]}))


def test_a_comparison() -> None:
    assert Comparison("t", 1, 1, (1, 1), "a", "a").equal
    assert not Comparison("t", 1, 1, (1, 1), "a", "b").equal


TOP = TopN(Product(layer="gold", source="s", sql="SELECT 1", operator="top_n", item="topic", n=5, name="top"))


def lossy(batches: int) -> pa.Table:
    """A top-n of a skewed stream that overflows its sketch, merged from so many batches."""
    rng = random.Random(5)
    stream = [f"t{min(int(rng.paretovariate(0.7)), 5_000)}" for _ in range(8_000)]
    held: pa.Table | None = None
    for start in range(batches):
        sketch = datasketches.frequent_strings_sketch(7)
        for item in stream[start::batches]:
            sketch.update(item)
        partial = pa.table(
            {
                "window_start": pa.array([AT], TIMESTAMP),
                "window_end": pa.array([AT + timedelta(minutes=1)], TIMESTAMP),
                "sketch": [sketch.serialize()],
                "unseen": [0],
            }
        )
        held = TOP.merge(held, partial)
    assert held is not None
    return held


def test_a_lossy_top_n_agrees_within_its_errors() -> None:
    one, other = lossy(3), lossy(10)
    assert max(one["error"].to_pylist()) > 0
    found = compare("top", 1, 1, one, other, TOP)
    assert found.live != found.replayed
    assert found.equal


def test_a_lossy_top_n_that_cannot_be_true_is_found() -> None:
    one = lossy(3)
    rows = one.to_pylist()
    rows[0]["count"] += 10 * max(row["error"] for row in rows) + 10_000
    assert not compare("top", 1, 1, pa.Table.from_pylist(rows, schema=one.schema), lossy(10), TOP).equal


def test_exact_counts_must_be_equal() -> None:
    rows = [{"window_start": AT, "item": "a", "count": 3, "error": 0}]
    other = [{**rows[0], "count": 4}]
    assert not compare("top", 1, 1, pa.Table.from_pylist(rows), pa.Table.from_pylist(other), TOP).equal
