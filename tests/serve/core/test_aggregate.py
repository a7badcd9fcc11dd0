"""Live aggregates: what is kept up to date is what SQL gives, at every step and whatever the order."""

from __future__ import annotations

import math
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.rows import Key, Row
from serve.core.aggregate import AggregateView, aggregate_view
from serve.core.model import TableInfo
from serve.errors import FilterError
from serve.tables.state import StateStep, TableState

SCHEMA = pa.schema([("k", pa.int64()), ("g", pa.string()), ("i", pa.int64()), ("f", pa.float64())])
TABLE = TableInfo("x", "id", tuple(SCHEMA.names), ("k",), types=tuple(SCHEMA.types))
DATABASE = duckdb.connect(config={"threads": "1"})
SELECTS = [
    "SELECT g, count(*) AS n, count(i) AS some, sum(i) AS total, min(f) AS low, max(i) AS high GROUP BY g",
    "SELECT sum(i + 1) AS total, avg(i) AS mean, count(DISTINCT i) AS different, count(*) AS n FROM x",
    "SELECT sum(i) AS total, g AS name, max(g) AS last FROM x WHERE i > 0 GROUP BY g",
]
ROW = st.tuples(
    st.sampled_from(["a", "b", None]),
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from([0.1, 0.2, 1e16, -3.0]),
)
STEPS = st.lists(st.dictionaries(st.integers(0, 4), st.none() | ROW, max_size=4), max_size=6)


def opened(select: str, rows: dict[Key, Row] | None = None) -> AggregateView:
    view = AggregateView(aggregate_view(TABLE, select, "", ""), TABLE)
    for _ in view.opening(list((rows or {}).values())):
        pass
    return view


def by_sql(select: str, state: TableState) -> list[tuple[Any, ...]]:
    data = pa.Table.from_pylist(
        [dict(zip(SCHEMA.names, row, strict=True)) for row in state.rows.values()], schema=SCHEMA
    )
    DATABASE.register("x", data)
    if " FROM " not in select:
        select = select.replace(" GROUP", " FROM x GROUP")
    return sorted(DATABASE.execute(select).fetchall(), key=repr)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(STEPS, st.sampled_from(SELECTS))
def test_every_step_is_what_duckdb_gives(steps: list[dict[int, Any]], select: str) -> None:
    state = TableState(TABLE, 0, CommitFacts(0), {})
    view = opened(select)
    held = dict(view.source({}))
    for version, changed in enumerate(steps, 1):
        upserts: dict[Key, Row] = {(k,): (k, *row) for k, row in changed.items() if row is not None}
        deletes = tuple((k,) for k, row in changed.items() if row is None and (k,) in state.rows)
        change = view.advance(state.apply(StateStep(TABLE, version, CommitFacts(version), upserts, deletes)))
        for key in change.deletes:
            del held[key]
        held |= {change.table.key_of(row): row for row in change.upserts}
        assert sorted(held.values(), key=repr) == by_sql(select, state)
        fresh = opened(select, state.rows)
        assert sorted(fresh.source({}), key=repr) == sorted(view.source({}), key=repr), (
            "whoever comes later has the same, to the last bit"
        )


def test_floats_are_summed_exactly_and_can_be_taken_back() -> None:
    state = TableState(TABLE, 0, CommitFacts(0), {})
    view = opened("SELECT sum(f) AS total, avg(f) AS mean")
    values = [0.1] * 10 + [1e16, 1.0, -1e16]
    rows: dict[Key, Row] = {(k,): (k, "a", 1, value) for k, value in enumerate(values)}
    change = view.advance(state.apply(StateStep(TABLE, 1, CommitFacts(1), rows)))
    assert change.upserts == ((math.fsum(values), math.fsum(values) / len(values)),)
    change = view.advance(state.apply(StateStep(TABLE, 2, CommitFacts(2), {}, tuple(list(rows)[1:]))))
    assert change.upserts == ((0.1, 0.1),)


def test_a_large_table_is_grouped_in_slices() -> None:
    view = AggregateView(aggregate_view(TABLE, SELECTS[1], "", ""), TABLE)
    slices = sum(1 for _ in view.opening((k, "a", 1, 0.0) for k in range(3_500)))
    assert slices == 3
    assert view.source({})[0][1] == (7_000, 1.0, 1, 3_500)


@pytest.mark.parametrize(
    ("select", "problem"),
    [
        ("SELECT g, sum(i) AS n GROUP BY g HAVING sum(i) > 1", "HAVING"),
        ("SELECT g, sum(i) AS n GROUP BY g ORDER BY n", "ORDER"),
        ("SELECT g, sum(i) AS n GROUP BY g LIMIT 3", "LIMIT"),
        ("SELECT DISTINCT g", "DISTINCT"),
        ("SELECT g, i, count(*) GROUP BY g", "neither grouped by"),
        ("SELECT count(*) GROUP BY g", "Select it"),
        ("SELECT g, median(i) GROUP BY g", "not kept up to date"),
        ("SELECT g, sum(DISTINCT i) GROUP BY g", "DISTINCT"),
        ("SELECT sum(g)", "no number"),
        ("SELECT i + 1, count(*) GROUP BY i + 1", "GROUP BY takes columns"),
        ("SELECT g, count(*) GROUP BY ALL", "GROUP BY takes columns"),
        ("SELECT count(*) FROM y", "FROM names this table"),
        ("SELECT count(*) FROM x JOIN x AS z ON TRUE", "not kept"),
        ("SELECT count(*) FROM (SELECT 1)", "FROM names"),
        ("SELECT sum((SELECT 1))", "not taken"),
        ("SELECT sum(i) OVER ()", "not kept"),
        ("SELECT count(*), count(*)", "same name"),
        ("WITH a AS (SELECT 1) SELECT count(*)", "not kept"),
        ("SELECT count(*) UNION SELECT 1", "one SELECT"),
        ("DELETE FROM x", "one SELECT"),
        ("SELECT *", "not kept"),
        ("SELECT sum(nope)", "no column"),
    ],
)
def test_what_is_refused(select: str, problem: str) -> None:
    with pytest.raises(FilterError) as refused:
        aggregate_view(TABLE, select, "", "")
    assert problem in str(refused.value)
