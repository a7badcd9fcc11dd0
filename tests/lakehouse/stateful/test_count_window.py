"""Windows by count: the same windows whatever the batches were."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.state_store import StateStore, store_of
from lakehouse.operators.base import TIMESTAMP
from lakehouse.operators.registry import operator_of

START = datetime(2026, 1, 1, tzinfo=UTC)
PARTIAL = pa.schema(
    [
        ("city", pa.string()),
        ("_at", TIMESTAMP),
        ("n", pa.int64()),
        ("total", pa.int32()),
        ("least", pa.int32()),
        ("_bronze_at", TIMESTAMP),
        ("_topic", pa.string()),
        ("_partition", pa.int32()),
        ("_offset", pa.int64()),
    ]
)
Event = tuple[str | None, int | None]  # city, value


def rides(size: int = 3, **more: Any) -> Product:
    aggregates = {"n": "count(v)", "total": "sum(v)", "least": "min(v)"}
    return Product(
        "gold",
        "r",
        operator="count_window",
        by=("city",),
        time="t",
        size=size,
        aggregates=aggregates,
        name="rides",
        **more,
    )


def numbered(events: list[Event], first: int = 0) -> pa.Table:
    """Rows as Spark gives them, in an order that is not bronze's."""
    rows = [
        {
            "city": city,
            "_at": START + timedelta(seconds=number),
            "n": 0 if value is None else 1,
            "total": value,
            "least": value,
            "_bronze_at": START + timedelta(minutes=number // 4),
            "_topic": "t",
            "_partition": 0,
            "_offset": number,
        }
        for number, (city, value) in enumerate(events, first)
    ]
    return pa.Table.from_pylist(rows[::-1], schema=PARTIAL)


def windows(events: list[Event], size: int) -> list[tuple[Any, ...]]:
    by: dict[str | None, list[int | None]] = defaultdict(list)
    for city, value in events:
        by[city].append(value)
    found = []
    for city, values in by.items():
        for number in range(0, len(values), size):
            group = values[number : number + size]
            known = [value for value in group if value is not None]
            total, least = (sum(known), min(known)) if known else (None, None)
            found.append((city, number // size, len(group), len(group) == size, len(known), total, least))
    return sorted(found, key=str)


def store(root: Path, product: Product) -> StateStore:
    made = store_of(product, Lake(root).table("gold", product.name), "test")
    assert isinstance(made, StateStore)
    return made


def mark(batch: int, clock: int | None = None) -> BatchMark:
    return BatchMark("q", (batch,), clock=clock)


def held(made: StateStore) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(made.table.path)).to_pyarrow_table().to_pylist()
    columns = ("city", "number", "events", "complete", "n", "total", "least")
    return sorted((tuple(row[name] for name in columns) for row in rows), key=str)


values = st.none() | st.integers(-5, 5)
events = st.lists(st.tuples(st.sampled_from(["Ulm", "Köln", None]), values), max_size=40)


@settings(max_examples=25)
@given(events, st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5), st.data())
def test_any_batches_with_restarts_and_repetition(
    found: list[Event], cuts: list[int], size: int, data: st.DataObject
) -> None:
    places = sorted({0, len(found), *(min(cut, len(found)) for cut in cuts)})
    with tempfile.TemporaryDirectory() as folder:
        made = store(Path(folder), rides(size))
        for batch, (a, b) in enumerate(zip(places, [*places[1:], len(found)], strict=True)):
            for _ in range(data.draw(st.integers(1, 2))):
                if data.draw(st.booleans()):
                    made = store(Path(folder), rides(size))
                made.apply(numbered(found[a:b], a), mark(batch))
        assert held(made) == windows(found, size)
        again = store(Path(folder) / "again", rides(size))
        again.replace(numbered(found), mark(0))
        assert held(again) == held(made)


def test_bronze_decides_the_order(tmp_path: Path) -> None:
    made = store(tmp_path, rides(2))
    made.apply(numbered([("Ulm", 1), ("Ulm", 2), ("Ulm", 3)]), mark(0))
    assert [(row[1], row[5]) for row in held(made)] == [(0, 3), (1, 3)]


def test_full_windows_are_not_written_again_and_retention_removes_them(tmp_path: Path) -> None:
    made = store(tmp_path, rides(2, retention="1 minute"))
    at = lambda seconds: int((START + timedelta(seconds=seconds)).timestamp() * 1e6)  # noqa: E731
    made.apply(numbered([("Ulm", 1), ("Ulm", 2), ("Ulm", 3)]), mark(0, at(3)))
    first = set(DeltaTable(str(made.table.path)).file_uris())
    made.apply(numbered([("Köln", 1)], 3), mark(1, at(4)))
    assert len(first & set(DeltaTable(str(made.table.path)).file_uris())) == 1
    made.apply(numbered([("Köln", 1)], 100), mark(2, at(100)))
    # Ulm's newest window stays, however old: its number goes on from there.
    assert [(row[0], row[1], row[3]) for row in held(made)] == [("Köln", 0, True), ("Ulm", 1, False)]


@pytest.mark.parametrize(
    "sql", ["SELECT * FROM (SELECT * FROM r)", "WITH x AS (SELECT * FROM r) SELECT * FROM x", "FROM r SELECT a"]
)
def test_input_without_bronzes_order_is_refused(sql: str) -> None:
    product = Product("gold", "r", sql, operator="count_window", aggregates={"n": "count(*)"}, name="p")
    with pytest.raises(BadProduct):
        operator_of(product).partial_sql()
