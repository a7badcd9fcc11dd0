"""Rows in memory: bounded, and never other than those of the table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from lakehouse.gold import store
from lakehouse.gold.store import UNITS, HotRows

START = datetime(2026, 1, 1, tzinfo=UTC)


def rows(*pairs: tuple[int | None, int]) -> pa.Table:
    """Rows of these units with these values."""
    starts = [None if unit is None else START + timedelta(minutes=unit) for unit, _ in pairs]
    return pa.table({"w": pa.array(starts, pa.timestamp("us", "UTC")), "n": [n for _, n in pairs]})


def units(*numbers: int | None) -> list[object]:
    return [None if number is None else START + timedelta(minutes=number) for number in numbers]


def test_what_changed_is_kept() -> None:
    made = HotRows("w")
    assert made.absent(units(1, None)) == units(1, None)
    assert made.rows_of(units(1)) is None
    made.put(units(1, 2, None), rows((1, 10), (1, 11), (None, 5)))
    assert made.absent(units(1, 2, 3, None)) == units(3)
    assert made.rows_of(units(2)) is None  # known to have no rows
    found = made.rows_of(units(1, None))
    assert found is not None
    assert sorted(found["n"].to_pylist()) == [5, 10, 11]
    made.put(units(1), rows((1, 20)))
    found = made.rows_of(units(1, 2, None))
    assert found is not None
    assert sorted(found["n"].to_pylist()) == [5, 20]
    made.clear()
    assert made.absent(units(1)) == units(1)


def test_units_are_bounded_and_the_oldest_go_first() -> None:
    made = HotRows("w")
    for number in range(3 * UNITS):
        made.put(units(number), rows((number, number)))
    assert made.absent(units(0, 3 * UNITS - UNITS - 2)) == units(0, 3 * UNITS - UNITS - 2)
    assert made.absent(units(3 * UNITS - UNITS - 1, 3 * UNITS - 1)) == []
    many = range(1_000, 1_000 + 5 * UNITS)
    made.put(units(*many), rows(*((number, 1) for number in many)))
    assert made.absent(units(*many)) == []


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_HOT_BYTES", 1_000)
    made = HotRows("w")
    for number in range(20):
        made.put(units(number), rows(*((number, n) for n in range(20))))
    found = made.rows_of(units(*range(20)))
    assert found is not None
    assert found.nbytes <= 1_000
    assert made.absent(units(19)) == []
    made.put(units(50), rows(*((50, n) for n in range(2_000))))  # the batch itself is larger
    assert made.absent(units(50)) == []
