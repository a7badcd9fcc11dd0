"""The canonical digest. Whole lakes are compared in test_stream.py."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from lakehouse.replay import Comparison, digest

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
def test_the_order_of_rows_and_columns_does_not_matter(found: list[dict[str, object]], random: object) -> None:
    other = list(found)
    random.shuffle(other)  # type: ignore[attr-defined]
    assert digest(table(found)) == digest(table(other).select(["at", "n", "share", "city"]))


@given(rows, rows)
def test_other_rows_have_another_digest(one: list[dict[str, object]], other: list[dict[str, object]]) -> None:
    same = sorted(map(repr, one)) == sorted(map(repr, other))
    assert (digest(table(one)) == digest(table(other))) == same


def test_sketches_and_last_bits_are_left_out() -> None:
    one = pa.table({"a": [0.1 + 0.2], "sketch": pa.array([b"x"], pa.binary())})
    other = pa.table({"a": [0.3], "sketch": pa.array([b"y"], pa.binary())})
    assert digest(one) == digest(other)
    assert digest(one) != digest(pa.table({"a": [0.3000001]}))


def test_a_comparison() -> None:
    assert Comparison("t", 1, 1, (1, 1), "a", "a").equal
    assert not Comparison("t", 1, 1, (1, 1), "a", "b").equal
