"""Top-n: exact below the capacity, inside its bounds above it, whatever the batches were."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import datasketches
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import TIMESTAMP, Operator
from lakehouse.operators.registry import operator_of
from lakehouse.sketches.kinds import Answer, Question, sketch_of

START = datetime(2026, 1, 1, tzinfo=UTC)
PARTIAL = pa.schema(
    [("window_start", TIMESTAMP), ("window_end", TIMESTAMP), ("sketch", pa.binary()), ("seen", pa.int64())]
)
Event = tuple[int, str]  # minute, item

items = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3)
events = st.lists(st.tuples(st.integers(0, 2), items | st.sampled_from("abc")), max_size=120)


def top_n(n: int = 3) -> Operator:
    return operator_of(Product("gold", "r", "SELECT t, i FROM r", operator="top_n", item="i", time="t", n=n, name="p"))


def partial(batch: list[Event], lg_k: int = 10) -> pa.Table:
    """What Spark gives for a batch."""
    sketches: dict[int, datasketches.frequent_strings_sketch] = {}
    seen = Counter(minute for minute, _ in batch)
    for minute, item in batch:
        sketches.setdefault(minute, datasketches.frequent_strings_sketch(lg_k)).update(item)
    rows = [
        {
            "window_start": START + timedelta(minutes=minute),
            "window_end": START + timedelta(minutes=minute + 1),
            "sketch": sketch.serialize(),
            "seen": seen[minute],
        }
        for minute, sketch in sketches.items()
    ]
    return pa.Table.from_pylist(rows, schema=PARTIAL)


def taken(operator: Operator, rows: pa.Table | None, batch: pa.Table) -> pa.Table:
    """Rows of the product with those of a batch."""
    assert operator.schema is not None
    return operator.merge(rows, operator.prepare(batch) if batch.num_rows else operator.schema.empty_table())


def split(batch: list[Event], cuts: list[int]) -> list[list[Event]]:
    places = sorted({0, len(batch), *(cut % (len(batch) + 1) for cut in cuts)})
    return [batch[a:b] for a, b in pairwise(places)] or [[]]


def merged(operator: Operator, tables: list[pa.Table]) -> pa.Table:
    """One after the other, as batches come."""
    rows: pa.Table | None = None
    for table in tables:
        new = taken(operator, rows, table)
        if rows is not None:  # the store keeps the windows that the batch did not touch
            touched = set(new["window_start"].to_pylist())
            kept = [row not in touched for row in rows["window_start"].to_pylist()]
            new = pa.concat_tables([rows.filter(pa.array(kept, pa.bool_())), new])
        rows = new
    assert rows is not None
    return rows


def shown(rows: pa.Table) -> list[tuple[object, ...]]:
    """Result rows without the sketch, in order."""
    columns = ("window_start", "rank", "item", "count", "error")
    return sorted(tuple(row[name] for name in columns) for row in rows.to_pylist())


def exact(batch: list[Event], n: int) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for minute in {minute for minute, _ in batch}:
        counts = Counter(item for other, item in batch if other == minute)
        best = sorted(counts.items(), key=lambda found: (-found[1], found[0]))[:n]
        start = START + timedelta(minutes=minute)
        rows += [(start, rank, item, count, 0) for rank, (item, count) in enumerate(best, 1)]
    return sorted(rows)


@settings(deadline=None, max_examples=60)
@given(events, st.lists(st.integers(0, 200), max_size=6), st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_batches_in_any_order_count_exactly(batch: list[Event], cuts: list[int], random: object, n: int) -> None:
    operator = top_n(n)
    shuffled = list(batch)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    parts = [partial(part) for part in split(shuffled, cuts)]
    assert shown(merged(operator, parts)) == exact(batch, n)
    # At once, as a replay does; and rows of the product merged with rows of the product.
    assert shown(taken(operator, None, pa.concat_tables(parts))) == exact(batch, n)
    half = len(parts) // 2
    left, right = (merged(operator, some) for some in (parts[:half] or [PARTIAL.empty_table()], parts[half:]))
    assert shown(operator.merge(None, pa.concat_tables([left, right]))) == exact(batch, n)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 60).map(lambda k: f"i{int(60 * (k / 60) ** 2)}"), min_size=20, max_size=400),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_with_few_counters_the_bounds_hold_and_no_heavy_item_is_missing(found: list[str], cuts: list[int]) -> None:
    """12 counters for up to 60 items; 6 of them in some batches, which a purge may leave empty."""
    operator = top_n(1000)
    merged_rows: pa.Table | None = None
    for number, part in enumerate(split([(0, item) for item in found], cuts)):
        merged_rows = taken(operator, merged_rows, partial(part, lg_k=3 + number % 2))
    assert merged_rows is not None
    assert_within(merged_rows, found)


def assert_within(table: pa.Table, found: list[str]) -> None:
    """The bounds of one window hold: each item's, and that of all the others."""
    rows = table.to_pylist()
    truth = Counter(found)
    error = rows[0]["error"]
    for row in rows:
        assert row["error"] == error
        assert row["count"] - error <= truth[row["item"]] <= row["count"]
    heavy = {item for item, count in truth.items() if count > error}
    assert heavy <= {row["item"] for row in rows}
    assert error <= len(found)


def test_sketches_that_a_purge_has_left_empty() -> None:
    """7 different items in 6 counters: nothing is left, and it is written as if there had been nothing."""
    operator = top_n(1000)
    lost = [f"x{number}" for number in range(7)]
    emptied = partial([(0, item) for item in lost], lg_k=3)
    assert datasketches.frequent_strings_sketch.deserialize(emptied["sketch"][0].as_py()).is_empty()
    alone = taken(operator, None, emptied)
    assert shown(alone) == [(START, 1, None, 7, 7)]  # the window is known, and that no item is above 7
    for batches in ([emptied, partial([(0, "a")] * 9)], [partial([(0, "a")] * 9), emptied]):
        rows = merged(operator, batches)
        assert shown(rows) == [(START, 1, "a", 16, 7)]
        assert_within(rows, ["a"] * 9 + lost)
        kept = sketch_of('{"operator": "top_n"}')
        kept.add(rows.to_pylist()[0])  # the first rank has the sketch
        assert kept.answers(Question(item="a")) == [Answer("a", 9, 9, 16)]
        assert kept.answers(Question(item="x0")) == [Answer("x0", 0, 0, 7)]
    again = merged(operator, [emptied, emptied])
    assert shown(again) == [(START, 1, None, 14, 14)]
    assert shown(operator.merge(None, pa.concat_tables([again, alone]))) == [(START, 1, None, 21, 21)]


def test_a_state_that_a_purge_leaves_empty_says_what_it_lost() -> None:
    operator = top_n(1000)
    rows = merged(operator, [partial([(0, item)], lg_k=3) for item in "abcdefg"])
    assert shown(rows) == [(START, 1, None, 1, 1)]
    assert_within(taken(operator, rows, partial([(0, "a")] * 3, lg_k=3)), [*"abcdefg", *"aaa"])


def test_merging_nothing_changes_nothing() -> None:
    operator = top_n()
    rows = taken(operator, None, partial([(0, "a"), (0, "b"), (0, "a")]))
    assert taken(operator, rows, PARTIAL.empty_table()) == rows
    assert taken(operator, None, PARTIAL.empty_table()).num_rows == 0
    assert operator.schema is not None
    assert rows.schema == operator.schema


def test_the_sketch_stands_with_the_first_rank_alone() -> None:
    rows = taken(top_n(), None, partial([(0, "a"), (0, "b"), (1, "c")])).to_pylist()
    assert [(row["rank"], row["sketch"] is not None) for row in rows] == [(1, True), (2, False), (1, True)]


@pytest.mark.parametrize(
    "sql", ["SELECT DISTINCT i, t FROM r", "SELECT i, t FROM r LIMIT 3", "SELECT max(i) AS i FROM r", "SELECT i FROM"]
)
def test_input_that_is_not_row_by_row_is_refused(sql: str) -> None:
    with pytest.raises(BadProduct):
        operator_of(Product("gold", "r", sql, operator="top_n", item="i", name="p"))
