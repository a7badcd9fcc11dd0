"""The data files of a product's table, as its one writer knows them, and what the log says of their columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from lakehouse.contract.deltalog import AddedFile
from lakehouse.operators.base import WINDOW_START

_HOT_BYTES = 32 << 20  # of rows in memory; others are read from the table when they change
_STATS_TEXT = 64  # characters: bounds of longer texts are left out


class DataFiles:
    """The data files of a product's table, and the windows in them.

    The rows of those that were used last stay in memory, since the next batch mostly changes the same ones.

    Args:
        read: the rows of a file.
    """

    def __init__(self, read: Callable[[AddedFile], pa.Table]) -> None:
        self._read = read
        self._files: dict[str, _DataFile] = {}
        self._rows: dict[str, pa.Table] = {}  # the one that was used last at the end
        self._bytes = 0

    def load(self, delta: DeltaTable) -> None:
        """Take the files of a table's version in place of all that is known."""
        self.replace(self.all(), [])
        for add in pa.table(delta.get_add_actions(flatten=True)).to_pylist():
            first, last = (add.get(f"{side}.{WINDOW_START}") for side in ("min", "max"))
            if isinstance(last, datetime):
                last += timedelta(milliseconds=1)  # delta-rs cuts microseconds off
            known = add.get(f"null_count.{WINDOW_START}") == 0 and isinstance(first, date) and isinstance(last, date)
            file = AddedFile(add["path"], {}, True, int(add["size_bytes"]))
            self._files[file.path] = _DataFile(file, (first, last) if known else None)

    def all(self) -> list[AddedFile]:
        return [held.file for held in self._files.values()]

    def replace(self, old: Iterable[AddedFile], new: Iterable[tuple[AddedFile, pa.Table]]) -> None:
        """A commit's files and their rows in place of others."""
        for file in old:
            del self._files[file.path]
            self._forget(file.path)
        for file, rows in new:
            self._files[file.path] = _DataFile(file, _span(rows))
            self._remember(file.path, rows)

    def holding(self, units: pa.Array | None) -> Iterator[tuple[AddedFile, pa.Table, pa.Table]]:
        """Each file with rows of these units: its rows of them, and its others; None: of all units."""
        values = [] if units is None else units.to_pylist()
        for held in list(self._files.values()):
            if units is not None and held.span is not None and not any(_within(value, held.span) for value in values):
                continue
            rows = self._forget(held.file.path)
            rows = self._read(held.file) if rows is None else rows
            self._remember(held.file.path, rows)
            among = pa.repeat(True, rows.num_rows) if units is None else pc.is_in(rows[WINDOW_START], value_set=units)
            if pc.any(among).as_py():
                yield held.file, rows.filter(among), rows.filter(pc.invert(among))

    def _remember(self, path: str, rows: pa.Table) -> None:
        self._rows[path] = rows
        self._bytes += rows.nbytes
        while self._bytes > _HOT_BYTES:
            self._forget(next(iter(self._rows)))

    def _forget(self, path: str) -> pa.Table | None:
        rows = self._rows.pop(path, None)
        self._bytes -= 0 if rows is None else rows.nbytes
        return rows


@dataclass(frozen=True, slots=True)
class _DataFile:
    """A data file, and the first and the last window in it; None: not known, or not of times alone."""

    file: AddedFile
    span: tuple[Any, Any] | None


def _span(rows: pa.Table) -> tuple[Any, Any] | None:
    if WINDOW_START not in rows.schema.names or not pa.types.is_temporal(rows[WINDOW_START].type):
        return None
    found = pc.min_max(rows[WINDOW_START], skip_nulls=False).as_py()
    return None if found["min"] is None else (found["min"], found["max"])


def _within(value: Any, span: tuple[Any, Any]) -> bool:
    return value is not None and span[0] <= value <= span[1]


def stats_of(rows: pa.Table) -> str:
    """What the log says of a data file with these rows: bounds of times, dates, whole numbers and short texts."""
    least, most, nulls = {}, {}, {}
    for name in rows.schema.names:
        kind = rows[name].type
        bounded = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, pa.types.is_string)
        if any(each(kind) for each in bounded):
            nulls[name] = rows[name].null_count
            with suppress(ValueError, OverflowError):  # years that Python does not have
                bounds = pc.min_max(rows[name]).as_py()
                if bounds["min"] is not None and not (pa.types.is_string(kind) and len(bounds["max"]) > _STATS_TEXT):
                    least[name], most[name] = _millis(bounds["min"], 0), _millis(bounds["max"], 999)
    found = {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return orjson.dumps(found).decode()


def _millis(value: object, more: int) -> object:
    """A time as readers of stats know it, in milliseconds; other values as they are."""
    if not isinstance(value, datetime):
        return value
    return f"{(value + timedelta(microseconds=more)).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
