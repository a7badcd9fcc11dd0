"""Any history through any filter: what a subscriber holds is what the filter gives of the table at that version."""

from __future__ import annotations

from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql.closures import Pin, pin_of
from lakehouse.contract.sql.filters import parse_condition
from serve.core.model import TableChange, TableInfo
from serve.core.position import WHOLE
from serve.core.view import RowsView, SubscriberView, rows_before, rows_view
from serve.errors import FilterError
from serve.tables.state import StateStep, TableState
from tests.contract.sql.test_closures import COLUMNS, NOON, SCHEMA, TABLE, TEXTS, VALUES, Writer

INTS, FLOATS, DECIMALS = range(-3, 4), [-1.5, 0.25, 2.5], [Decimal("0.25"), Decimal("2.00")]
TIMES = [NOON, NOON.replace(hour=0)]
DATABASE = duckdb.connect(config={"threads": "1"})
STEPS = st.lists(
    st.dictionaries(
        st.integers(0, 3),
        st.none() | st.fixed_dictionaries({n: st.none() | each for n, each in VALUES.items() if n != "k"}),
        max_size=3,
    ),
    min_size=1,
    max_size=6,
)


def played(steps: list[dict[int, Any]]) -> list[tuple[TableChange, dict[Key, Row]]]:
    """Each change, and the rows after it."""
    state = TableState(TABLE, 0, CommitFacts(0), {})
    history = []
    for version, changed in enumerate(steps, 1):
        upserts: dict[Key, Row] = {}
        for k, values in changed.items():
            if values is not None:
                plain = values | {"t": values["t"] and values["t"].replace(tzinfo=None)}
                upserts[(k,)] = (k, *[plain[name] for name in SCHEMA.names[1:]])
        deletes = tuple((k,) for k, values in changed.items() if values is None and (k,) in state.rows)
        change = state.apply(StateStep(TABLE, version, CommitFacts(version), upserts, deletes))
        history.append((change, dict(state.rows)))
    return history


def by_sql(rows: dict[Key, Row], columns: tuple[str, ...], condition: str) -> set[str]:
    data = pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows.values()], schema=SCHEMA)
    DATABASE.execute("SET TimeZone = 'UTC'")
    DATABASE.register("x", data)
    keys = {k for (k,) in DATABASE.execute(f"SELECT k FROM x WHERE {condition}").fetchall()}
    at = [SCHEMA.names.index(name) for name in columns]
    return {repr(tuple(row[i] for i in at)) for (k,), row in rows.items() if k in keys}


@pytest.fixture(autouse=True)
def any_change_is_worth_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.core.view.FEW_ROWS", 0)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 2**32), st.sampled_from([(), ("i",), ("s", "t")]))
def test_a_filtered_stream_is_the_filtered_table(
    steps: list[dict[int, Any]], seed: int, columns: tuple[str, ...]
) -> None:
    writer = Writer(Random(seed))
    where, guard = writer.condition(2), writer.condition(1)
    view = rows_view(TABLE, where, columns, guard)
    live, held = RowsView(view, TABLE), {}
    history = played(steps)
    for change, rows in history:
        seen = live.advance(change)
        assert seen.version == change.version
        for key in seen.deletes:
            del held[key]  # only what it holds is taken away
        for row in seen.upserts:
            key = seen.table.key_of(row)
            assert held.get(key) != row, "only what differs is told"
            held[key] = row
        assert {repr(row) for row in held.values()} == by_sql(rows, live.table.columns, f"({where}) AND ({guard})")
        assert seen.left == {key for key in seen.deletes if key in rows}, "left, and not gone"
        assert dict(live.rows(live.source(rows))) == held, "a snapshot is what the stream has brought"
    changes = [change for change, _ in history]
    for number, (_, rows) in enumerate(history, 1):
        assert rows_before(history[-1][1], changes[number:]) == rows


PINNED = [
    ("s = 'a'", "s", {"a"}),
    ("i > 0 AND ('ab' = S AND i IN (1, 2, 3))", "s", {"ab"}),
    ("(i IN (1, 2.0, NULL))", "i", {1, 2}),
    ("f = 0.25", "f", {0.25}),
    ("d = 0.25 AND b", "d", {Decimal("0.25")}),
    ("t = '2026-01-01 12:00:00'", "t", {NOON.replace(tzinfo=None)}),
    ("i = NULL", "i", set()),
    *((text, "", set()) for text in ("s <> 'a'", "s = 'a' OR i = 1", "d = 2.5e-1", "s = upper('a')", "i = k", "b")),
]


@pytest.mark.parametrize(("where", "column", "values"), PINNED)
def test_what_a_condition_pins_is_found_by_its_value(
    where: str, column: str, values: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = parse_condition(where, COLUMNS)
    assert tree is not None
    pin = pin_of(tree, COLUMNS)
    assert pin == (Pin(SCHEMA.names.index(column), frozenset(values)) if column else None)
    chance = Random(where)

    def some() -> dict[str, Any]:
        drawn = [chance.choice([None, *each]) for each in (INTS, FLOATS, DECIMALS, TEXTS, [True, False], TIMES, [None])]
        return dict(zip(SCHEMA.names[1:], drawn, strict=True))

    steps = [{k: chance.choice([some(), some(), None]) for k in chance.sample(range(60), 40)} for _ in range(8)]
    view = rows_view(TABLE, where, [], "")
    one, other = RowsView(view, TABLE), RowsView(view, TABLE)
    seen = [one.advance(change) for change, _ in played(steps)]
    monkeypatch.setattr("serve.core.view.FEW_ROWS", 10**9)
    assert seen == [other.advance(change) for change, _ in played(steps)]
    assert any(change.upserts for change in seen) == any(change.left for change in seen) == (where != "i = NULL")


def test_views_that_ask_the_same_are_one() -> None:
    one = rows_view(TABLE, "I = 1 AND (s IN ('a'))  -- a comment", ["S", "i"], "")
    other = rows_view(TABLE, "(i=1) and \"s\" in ('a')", ["i", "s", "s"], "")
    assert one == other
    assert one.id == other.id != WHOLE
    assert rows_view(TABLE, "", list(TABLE.columns), "").id == SubscriberView().id == WHOLE
    assert rows_view(TABLE, "i = 1", [], "").id != rows_view(TABLE, "", [], "i = 1").id, "a right is no wish"


def test_a_condition_cannot_escape_the_guard() -> None:
    live = RowsView(rows_view(TABLE, "TRUE OR i = 1", [], "i = 2 OR i = 3"), TABLE)
    rows: dict[Key, Row] = {(i,): (i, i, *[None] * 6) for i in range(5)}
    assert [key for key, _ in live.rows(live.source(rows))] == [(2,), (3,)]


def test_another_schema_is_looked_at_anew() -> None:
    live = RowsView(rows_view(TABLE, "i > 1", [], ""), TABLE)
    state = TableState(TABLE, 1, CommitFacts(0), {(k,): (k, k, *[None] * 6) for k in range(4)})
    wider = TableInfo("x", "id", (*TABLE.columns, "w"), ("k",), types=(*TABLE.types, pa.int64()))
    rows: dict[Key, Row] = {(k,): (k, k - 1, *[None] * 6, 1) for k in range(1, 4)}
    seen = live.advance(state.apply(StateStep(wider, 2, CommitFacts(2), rows, ((0,),))))
    assert (seen.table.columns[-1], [row[0] for row in seen.upserts], seen.deletes) == ("w", [3], ((2,),))
    assert seen.left == {(2,)}
    narrower = TableInfo("x", "id", ("k", "s"), ("k",), types=(pa.int64(), pa.string()))
    with pytest.raises(FilterError, match="no column 'i'"):
        live.advance(state.apply(StateStep(narrower, 3, CommitFacts(3), {(1,): (1, "a")}, ((2,), (3,)))))
