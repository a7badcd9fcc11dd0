"""The index of a join: the changes that batches tell add up to the join, whatever the batches were."""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP
from lakehouse.stateful.join_index import LEFT, RIGHT, JoinIndex

START = datetime(1970, 1, 1, 0, 0, 30, tzinfo=UTC)  # times around 0
SCHEMA = pa.schema(
    [
        ("side", pa.int32()),
        ("join_key", pa.binary()),
        ("at", TIMESTAMP),
        ("dedupe_key", pa.binary()),
        ("body", pa.string()),
    ]
)
WITHIN = 10
Event = tuple[int, int | None, int]  # side, key, second


def product(kind: str, match: str, **more: Any) -> Product:
    return Product(
        "gold",
        "l",
        "SELECT 1",
        operator="join",
        right="r",
        on=("k",),
        within=f"{WITHIN} seconds",
        kind=kind,
        match=match,
        **more,
    )


def rows(events: list[tuple[int, Event]]) -> pa.Table:
    made = [
        {
            "side": side,
            "join_key": None if key is None else bytes([200 + key]) * 16,
            "at": START + timedelta(seconds=second),
            "dedupe_key": number.to_bytes(16, "big"),
            "body": f"{number}",
        }
        for number, (side, key, second) in events
    ]
    return pa.Table.from_pylist(made, schema=SCHEMA)


def joined(events: list[tuple[int, Event]], kind: str, match: str) -> Counter[tuple[str, str | None]]:
    found: Counter[tuple[str, str | None]] = Counter()
    for number, (side, key, second) in events:
        if side != LEFT:
            continue
        rights = sorted(
            (at, other)
            for other, (s, k, at) in events
            if s == RIGHT and k == key and k is not None and second <= at <= second + WITHIN
        )
        for _, other in rights[:1] if match == "first" else rights:
            found[str(number), str(other)] += 1
        if kind == "left_outer" and not rights:
            found[str(number), None] += 1
    return found


events = st.lists(
    st.tuples(st.sampled_from([LEFT, RIGHT]), st.none() | st.integers(0, 2), st.integers(-45, 15)), max_size=25
)


@settings(max_examples=60)
@given(
    events,
    st.sampled_from(["inner", "left_outer"]),
    st.sampled_from(["all", "first"]),
    st.lists(st.integers(0, 25), max_size=5),
    st.data(),
)
def test_changes_add_up_to_the_join(
    found: list[Event], kind: str, match: str, cuts: list[int], data: st.DataObject
) -> None:
    named = list(enumerate(found))
    places = sorted({0, len(named), *(min(cut, len(named)) for cut in cuts)})
    total: Counter[tuple[str, str | None]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        index = JoinIndex(Path(folder), product(kind, match))
        for batch, (a, b) in enumerate(zip(places, [*places[1:], len(named)], strict=True)):
            changes = index.enter(rows(named[a:b]), batch, f"q/{batch}")
            if data.draw(st.booleans()):  # a crash behind it: the batch comes again
                index.close()
                index = JoinIndex(Path(folder), product(kind, match))
                assert index.position() == f"q/{batch}"
                assert index.enter(rows(named[a:b]), batch, f"q/{batch}") == changes
            for change in changes:
                total[change.left, change.right] += change.sign
            assert {pair: count for pair, count in total.items() if count} == dict(joined(named[:b], kind, match))
        assert len(index) == sum(key is not None or side == LEFT for side, key, _ in found)
        index.close()


def test_what_is_remembered_can_be_looked_up_and_forgotten(tmp_path: Path) -> None:
    index = JoinIndex(tmp_path, product("inner", "all", retention="1 hour"))
    index.enter(rows([(1, (LEFT, 7, -40)), (2, (RIGHT, 7, -35)), (3, (LEFT, 7, 0)), (4, (LEFT, 8, -40))]), 3, "q/3")
    found = index.lookup(bytes([207]) * 16)
    assert found == [(LEFT, -10_000_000, "1"), (LEFT, 30_000_000, "3"), (RIGHT, -5_000_000, "2")]
    assert index.forget(-5_000_000) == 2
    assert [body for _, _, body in index.lookup(bytes([207]) * 16)] == ["3", "2"]
    assert index.lookup(bytes([208]) * 16) == []
    index.close()
    other = JoinIndex(tmp_path, product("inner", "all", retention="1 hour"), readonly=True)
    assert len(other) == 2
    other.close()


def test_an_index_without_retention_forgets_nothing(tmp_path: Path) -> None:
    index = JoinIndex(tmp_path, product("inner", "all"))
    index.enter(rows([(1, (LEFT, 7, -40))]), 0, "q/0")
    assert index.forget(10**15) == 0
    assert len(index) == 1
    index.close()


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_a_right_event_at_the_bound(tmp_path: Path, before: int, after: int) -> None:
    index = JoinIndex(tmp_path, product("inner", "all"))
    index.enter(rows([(1, (LEFT, 7, 0))]), 0, "q/0")
    inside = index.enter(rows([(2, (RIGHT, 7, WITHIN)), (3, (RIGHT, 7, 0))]), 1, "q/1")
    outside = index.enter(rows([(4, (RIGHT, 7, WITHIN + after)), (5, (RIGHT, 7, -before - after))]), 2, "q/2")
    assert sorted(str(change.right) for change in inside) == ["2", "3"]
    assert [change.right for change in outside] == (["4"] if after == 0 else [])
    index.close()
