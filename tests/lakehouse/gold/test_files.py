"""Files of a product's table: which hold a window, and that no others are read or written anew."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
import pytest

from lakehouse.contract.deltalog import AddedFile
from lakehouse.gold import files
from lakehouse.gold.files import DataFiles, stats_of

START = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = pa.timestamp("us", "UTC")


def units(*minutes: int | None) -> pa.Array:
    return pa.array([None if m is None else START + timedelta(minutes=m) for m in minutes], TIMES)


def rows(*minutes: int | None) -> pa.Table:
    return pa.table({"window_start": units(*minutes), "n": list(range(len(minutes)))})


class Disk:
    """Files, and which of them were read."""

    def __init__(self) -> None:
        self.tables: dict[str, pa.Table] = {}
        self.read: list[str] = []
        self.known = DataFiles(self._rows)

    def put(self, name: str, table: pa.Table, *old: str) -> None:
        self.tables[name] = table
        self.known.replace([AddedFile(each, {}, True) for each in old], [(AddedFile(name, {}, True), table)])

    def _rows(self, file: AddedFile) -> pa.Table:
        self.read.append(file.path)
        return self.tables[file.path]

    def holding(self, wanted: pa.Array | None) -> dict[str, tuple[list[int], list[int]]]:
        found = self.known.holding(wanted)
        return {file.path: (held["n"].to_pylist(), rest["n"].to_pylist()) for file, held, rest in found}


def test_the_rows_of_a_window_and_the_others_of_its_file() -> None:
    disk = Disk()
    disk.put("a", rows(0, 0, 5))
    disk.put("b", rows(9, None))
    assert disk.holding(units(0)) == {"a": ([0, 1], [2])}
    assert disk.holding(units(3)) == {}  # between the windows of a file
    assert disk.holding(units(5, 9)) == {"a": ([2], [0, 1]), "b": ([0], [1])}
    assert disk.holding(units(None)) == {"b": ([1], [0])}
    assert disk.holding(None) == {"a": ([0, 1, 2], []), "b": ([0, 1], [])}
    disk.put("c", rows(0), "a")
    assert disk.holding(units(0, 5)) == {"c": ([0], [])}
    assert disk.read == []


def test_rows_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_HOT_BYTES", 5 * rows(0).nbytes)
    disk = Disk()
    for minute in range(10):
        disk.put(str(minute), rows(minute))
    assert disk.holding(units(9)) == {"9": ([0], [])}
    assert disk.read == []
    assert disk.holding(units(0)) == {"0": ([0], [])}
    assert disk.read == ["0"]
    disk.put("large", rows(*range(20, 120)))  # itself more than the bound
    assert list(disk.holding(units(20))) == ["large"]
    assert disk.read == ["0", "large"]


def test_the_logs_bounds_hold_every_value() -> None:
    at = START + timedelta(microseconds=1_001)
    table = pa.table(
        {
            "at": pa.array([at, None], TIMES),
            "day": [date(2026, 1, 1), date(2026, 1, 3)],
            "n": [2**62, -1],
            "short": ["b", "a"],
            "long": ["b", "z" * 100],
            "absent": pa.nulls(2, pa.int64()),
            "far": pa.array([0, 2**62], pa.int64()).cast(TIMES),  # a year that Python does not have
            "share": [0.5, float("nan")],
            "sketch": [b"a", b"b"],
        }
    )
    assert json.loads(stats_of(table)) == {
        "numRecords": 2,
        "minValues": {"at": "2026-01-01T00:00:00.001Z", "day": "2026-01-01", "n": -1, "short": "a"},
        "maxValues": {"at": "2026-01-01T00:00:00.002Z", "day": "2026-01-03", "n": 2**62, "short": "b"},
        "nullCount": {"at": 1, "day": 0, "n": 0, "short": 0, "long": 0, "absent": 2, "far": 0},
    }
