"""Any split into batches, any order and any repetition of them gives the same products, for every operator."""

from __future__ import annotations

import random
import tempfile
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.lake import Lake
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from lakehouse.operators.base import Operator
from lakehouse.operators.registry import operator_of
from lakehouse.replay import digest
from tests.lakehouse.operators.partials import OPERATORS, Event

SLIDES = {"": 60, "20 seconds": 20, "40 seconds": 20}  # to the length of a pane
events = st.lists(
    st.builds(Event, st.integers(0, 10**9), st.integers(-70, 200), st.sampled_from(["a", "b", ""]), st.integers(0, 40)),
    min_size=1,
    max_size=80,
    unique_by=lambda event: event.id,
)


def taken(operator: Operator, held: pa.Table | None, raw: pa.Table) -> pa.Table:
    """What the store does with a batch, without a table."""
    operator.describe(raw.schema)
    partial = operator.prepare(raw) if raw.num_rows else raw
    if held is None:
        return operator.merge(None, partial)
    touched = set(partial["window_start"].to_pylist())
    mask = pa.array([start in touched for start in held["window_start"].to_pylist()], pa.bool_())
    old, rest = held.filter(mask), held.filter(pa.array([not hit.as_py() for hit in mask], pa.bool_()))
    return pa.concat_tables([rest, operator.merge(old if old.num_rows else None, partial)])


def shown(rows: pa.Table) -> str:
    """The canonical digest, sketches of counts and of members included: theirs are equal to the last bit."""
    exact = [name for name in rows.schema.names if name.startswith("sketch") and name_is_linear(rows)]
    for name in exact:
        text = pa.array([value.hex() for value in rows[name].to_pylist()])
        rows = rows.append_column(f"{name}_as_text", text)
    return digest(rows)


def name_is_linear(rows: pa.Table) -> bool:
    """Whether the rows are of frequency or membership."""
    return bool({"outside", "fpp"} & set(rows.schema.names))


@pytest.mark.parametrize("slide", SLIDES)
@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=8)
@given(events, st.lists(st.integers(0, 100), max_size=5), st.randoms(use_true_random=False))
def test_the_batches_do_not_matter(
    name: str, slide: str, stream: list[Event], cuts: list[int], shuffler: random.Random
) -> None:
    make, partial = OPERATORS[name]
    operator, seconds = operator_of(make(slide)), SLIDES[slide]
    whole = taken(operator, None, partial(stream, seconds))
    shuffled = list(stream)
    shuffler.shuffle(shuffled)
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    held: pa.Table | None = None
    for first, last in pairwise(places):
        held = taken(operator, held, partial(shuffled[first:last], seconds))
    assert held is not None
    assert shown(held) == shown(whole)
    # A replay merges the product's own rows from nothing.
    assert shown(operator.merge(None, held)) == shown(whole)
    assert held.select(list(operator.key)).group_by(list(operator.key)).aggregate([]).num_rows == held.num_rows


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=3)
@given(events, st.data())
def test_repeated_batches_and_restarts_do_not_matter(name: str, stream: list[Event], data: st.DataObject) -> None:
    make, partial = OPERATORS[name]
    product, slide = make("20 seconds"), 20
    with tempfile.TemporaryDirectory() as folder:
        table = Lake(Path(folder)).table("gold", "p")
        store = ProductStore(product, table, "test")
        for number, first in enumerate(range(0, len(stream), 20)):
            for _ in range(data.draw(st.integers(1, 2))):
                if data.draw(st.booleans()):
                    store = ProductStore(product, table, "test")
                store.apply(partial(stream[first : first + 20], slide), BatchMark("q", (number,)))
        rows = DeltaTable(str(table.path)).to_pyarrow_table()
    assert shown(rows) == shown(taken(operator_of(product), None, partial(stream, slide)))


@pytest.mark.parametrize("name", ["distinct", "reservoir", "sql"])
def test_a_build_of_many_panes_is_merged_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lakehouse.operators import aggregate, rows, sketched

    made = random.Random(1)
    stream = [Event(n, made.randrange(3_000), made.choice("ab"), made.randrange(30)) for n in range(600)]
    make, partial = OPERATORS[name]
    operator = operator_of(make("20 seconds"))
    whole = shown(taken(operator, None, partial(stream, 20)))
    for module in (aggregate, rows, sketched):
        monkeypatch.setattr(module, "_MOST", 10)
    assert shown(taken(operator, None, partial(stream, 20))) == whole
