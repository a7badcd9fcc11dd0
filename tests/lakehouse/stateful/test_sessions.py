"""Sessions: any batches in any order, repeated or not, give the sessions that all events have together."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.gold import state_store
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.state_store import StateStore, store_of
from lakehouse.operators.base import TIMESTAMP
from lakehouse.operators.registry import operator_of
from lakehouse.stateful.windows import greatest

START = datetime(2026, 1, 1, tzinfo=UTC)
GAP = 10  # minutes
PARTIAL = pa.schema(
    [
        ("who", pa.string()),
        ("session_start", TIMESTAMP),
        ("session_end", TIMESTAMP),
        ("n", pa.int64()),
        ("top", pa.int64()),
    ]
)
Event = tuple[str, int]  # who, minute


def visits(**more: object) -> Product:
    return Product(
        "gold",
        "r",
        operator="sessions",
        by=("who",),
        time="t",
        gap=f"{GAP} minutes",
        aggregates={"n": "count(*)", "top": "max(m)"},
        name="visits",
        **more,  # type: ignore[arg-type]
    )


def sessions(events: list[Event]) -> list[tuple[str, int, int, int]]:
    """Who, start, end, events: in plain Python."""
    by: dict[str, list[int]] = defaultdict(list)
    for who, minute in events:
        by[who].append(minute)
    found = []
    for who, minutes in by.items():
        group: list[int] = []
        for minute in sorted(minutes):
            if group and minute - group[-1] >= GAP:
                found.append((who, group[0], group[-1], len(group)))
                group = []
            group.append(minute)
        found.append((who, group[0], group[-1], len(group)))
    return sorted(found)


def partial(events: list[Event]) -> pa.Table:
    """What Spark gives for a batch."""
    rows = [
        {"who": who, "session_start": minute(a), "session_end": minute(b), "n": n, "top": b}
        for who, a, b, n in sessions(events)
    ]
    return pa.Table.from_pylist(rows, schema=PARTIAL)


def minute(number: int) -> datetime:
    return START + timedelta(minutes=number)


def micros(number: int) -> int:
    return int(minute(number).timestamp() * 1e6)


def mark(batch: int, newest: int | None) -> BatchMark:
    clock = None if newest is None else micros(newest)
    return BatchMark("q", (batch,), clock=clock)


def store(root: Path, product: Product) -> StateStore:
    made = store_of(product, Lake(root).table("gold", product.name), "test")
    assert isinstance(made, StateStore)
    return made


def held(made: StateStore) -> list[tuple[str, int, int, int, bool]]:
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    assert all(row["top"] == (row["session_end"] - START) // timedelta(minutes=1) for row in rows)
    return sorted(
        (
            row["who"],
            (row["session_start"] - START) // timedelta(minutes=1),
            (row["session_end"] - START) // timedelta(minutes=1),
            row["n"],
            row["closed"],
        )
        for row in rows
    )


def expected(events: list[Event], clock: int) -> list[tuple[str, int, int, int, bool]]:
    return [(who, a, b, n, clock - b >= GAP) for who, a, b, n in sessions(events)]


events = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 120)), min_size=1, max_size=8)


@settings(max_examples=30)
@given(st.lists(events, min_size=1, max_size=6), st.data())
def test_any_batches_in_any_order_with_restarts(batches: list[list[Event]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = store(Path(folder), visits())
        so_far: list[Event] = []
        for number, batch in enumerate(batches):
            so_far += batch
            newest = max(at for _, at in so_far)
            for _ in range(data.draw(st.integers(1, 2))):
                if data.draw(st.booleans()):
                    made = store(Path(folder), visits())
                made.apply(partial(batch), mark(number, newest))
            assert held(made) == expected(so_far, newest)
        again = store(Path(folder) / "again", visits())
        again.replace(pa.concat_tables([partial(batch) for batch in batches]), mark(0, newest))
        assert held(again) == held(made)


def test_a_session_closes_when_time_has_gone_on_although_its_visitor_said_nothing(tmp_path: Path) -> None:
    made = store(tmp_path, visits())
    made.apply(partial([("a", 0), ("b", 5)]), mark(0, 5))
    assert held(made) == [("a", 0, 0, 1, False), ("b", 5, 5, 1, False)]
    made.apply(PARTIAL.empty_table(), mark(1, 10))  # others came, of no concern to this product
    assert held(made) == [("a", 0, 0, 1, True), ("b", 5, 5, 1, False)]


def test_a_session_closes_by_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store(tmp_path, visits(clock="wall"))
    made.apply(partial([("a", 0), ("b", 5)]), mark(0, 5))
    version = DeltaTable(str(made.table.path)).version()

    def at(number: int) -> bool:
        monkeypatch.setattr(state_store, "_now", lambda: micros(number))
        return made.tick()

    assert not at(9), "nothing to say"
    assert DeltaTable(str(made.table.path)).version() == version
    assert at(10)
    assert held(made) == [("a", 0, 0, 1, True), ("b", 5, 5, 1, False)]
    made.apply(partial([("b", 6)]), mark(1, 6))  # time does not go back
    assert held(made) == [("a", 0, 0, 1, True), ("b", 5, 6, 2, False)]
    made = store(tmp_path, visits(clock="wall"))
    assert made.holds(BatchMark("q", (1,)))
    assert not at(8), "nor does it when the machine's clock does"
    assert at(16)
    assert held(made) == [("a", 0, 0, 1, True), ("b", 5, 6, 2, True)]
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    assert {(row["who"], row["expires_at"]) for row in rows} == {("a", minute(10)), ("b", minute(16))}
    made.apply(partial([("b", 20)]), mark(2, 20))  # it goes on from what it read when nothing had come
    assert ("b", 20, 20, 1, False) in held(made)
    monkeypatch.setattr(state_store, "_now", lambda: micros(30))
    assert made.tick()
    found = made.mark()
    assert found is not None
    assert (found.transaction, found.clock) == (2, micros(30))
    whole = store(tmp_path / "again", visits(clock="wall"))
    live, again = made.results(
        DeltaTable(str(made.table.path)).to_pyarrow_table(),
        partial([("a", 0), ("b", 5), ("b", 6), ("b", 20)]),
        found.clock,
    )
    assert live.sort_by("session_end") == again.sort_by("session_end"), "a replay gives the same at the same time"
    whole.replace(partial([("a", 0), ("b", 5)]), mark(0, 5))  # built anew: what is over is not opened again
    assert [row[-1] for row in held(whole)] == [True, True]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.text("ab", max_size=2))), max_size=6), max_size=6
    ),
    st.data(),
)
def test_the_greatest_of_lists_are_the_same_however_they_are_put_together(
    lists: list[list[tuple[int, str | None]]], data: st.DataObject
) -> None:
    kind = pa.list_(pa.struct([("at", pa.int64()), ("sku", pa.string())]))
    cut = data.draw(st.integers(0, len(lists)))

    def of(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        found = greatest(pa.chunked_array([pa.array(parts, kind)]), np.zeros(len(parts), dtype=np.int64), 4).to_pylist()
        return found[0] if found else []

    rows = [[{"at": at, "sku": sku} for at, sku in some] for some in lists]
    whole = sorted((e for some in rows for e in some), key=lambda e: (e["at"], e["sku"] is not None, e["sku"] or ""))
    assert of([of(rows[:cut]), of(rows[cut:])]) == of(rows) == whole[::-1][:4]


def test_a_late_event_makes_one_of_two_closed_sessions(tmp_path: Path) -> None:
    made = store(tmp_path, visits())
    made.apply(partial([("a", 0), ("a", 15), ("b", 0)]), mark(0, 15))
    made.apply(partial([("b", 500)]), mark(1, 500))  # settles what came before
    assert held(made)[:2] == [("a", 0, 0, 1, True), ("a", 15, 15, 1, True)]
    for again in (made, store(tmp_path, visits())):
        again.apply(partial([("a", 7)]), mark(2, 500))
        assert held(again) == [("a", 0, 15, 3, True), ("b", 0, 0, 1, True), ("b", 500, 500, 1, False)]


def test_what_may_not_change_any_more_is_not_written_again(tmp_path: Path) -> None:
    made = store(tmp_path, visits())
    made.apply(partial([("a", 0)]), mark(0, 0))
    made.apply(partial([("b", 100)]), mark(1, 100))
    made.apply(partial([("b", 101)]), mark(2, 101))
    before = set(DeltaTable(str(made.table.path)).file_uris())
    made.apply(partial([("c", 102)]), mark(3, 102))
    after = set(DeltaTable(str(made.table.path)).file_uris())
    assert len(before & after) == 1  # the file of a's session
    assert len(after) == 2
    version = made.apply(PARTIAL.empty_table(), mark(4, 102))  # nothing changes but the position
    assert set(DeltaTable(str(made.table.path)).file_uris()) == after
    assert made.delta().version() == version
    assert made.holds(BatchMark("q", (4,)))


def test_care_of_the_table_in_between_is_noticed(tmp_path: Path) -> None:
    made = store(tmp_path, visits())
    seen: list[Event] = []
    for number in range(6):
        batch = [("a", number * 100), ("b", number * 100 + 1)]
        seen += batch
        made.apply(partial(batch), mark(number, number * 100 + 1))
        if number % 2:
            made.delta().optimize.compact()
    assert held(made) == expected(seen, 501)


def test_retention_removes_what_ended_long_ago(tmp_path: Path) -> None:
    product = visits(retention="1 hour")
    made = store(tmp_path, product)
    for number, at in enumerate((0, 30, 100, 200)):
        made.apply(partial([("a", at)]), mark(number, at))
    assert held(made) == [("a", 200, 200, 1, False)]
    made.apply(partial([("a", 1)]), mark(9, 200))  # far too late
    assert held(made) == [("a", 200, 200, 1, False)]
    live, again = made.results(
        DeltaTable(str(made.table.path)).to_pyarrow_table(),
        partial([("a", at) for at in (0, 1, 30, 100, 200)]),
        micros(200),
    )
    assert live.sort_by("session_start") == again.sort_by("session_start")
    assert live.num_rows == 1


@settings(max_examples=30)
@given(st.lists(events, min_size=1, max_size=8))
def test_with_retention_whatever_is_sure_to_be_whole_is_what_a_replay_gives(batches: list[list[Event]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = store(Path(folder), visits(retention="30 minutes"))
        newest = 0
        for number, batch in enumerate(batches):
            newest = max(newest, *(at for _, at in batch))
            made.apply(partial(batch), mark(number, newest))
        rows = DeltaTable(str(made.table.path)).to_pyarrow_table()
        live, again = made.results(rows, pa.concat_tables([partial(batch) for batch in batches]), micros(newest))
        order = [("who", "ascending"), ("session_start", "ascending")]
        assert live.sort_by(order) == again.sort_by(order)


@pytest.mark.parametrize(
    "aggregate", ["avg(m)", "count(DISTINCT m)", "sum(m) + 1", "m", "sum(", "collect_set(m)", "collect_list(max(m))"]
)
def test_aggregates_that_cannot_be_put_together_are_refused(aggregate: str) -> None:
    with pytest.raises(BadProduct, match="aggregate x"):
        operator_of(Product("gold", "r", operator="sessions", aggregates={"x": aggregate}, name="p"))
