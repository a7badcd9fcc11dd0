"""The rows of a product that changed last, in memory: the next batch mostly changes the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

UNITS = 64
"""Units kept beside those of the last batch; the rows of others are read from the table when they change."""
MAX_BYTES = 32 << 20


class HotRows:
    """Rows by unit, bounded in units and in bytes.

    Args:
        column: whose values are the units.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._rows: pa.Table | None = None
        self._units: dict[object, None] = {}  # the one that changed last at the end

    def clear(self) -> None:
        """Forget all."""
        self._rows = None
        self._units.clear()

    def absent(self, units: Sequence[object]) -> list[object]:
        """Those of the units whose rows are not here."""
        return [unit for unit in units if unit not in self._units]

    def rows_of(self, units: Sequence[object]) -> pa.Table | None:
        """Rows of these units, of those that are here; None for no rows."""
        if self._rows is None:
            return None
        found = self._rows.filter(self._among(units))
        return found if found.num_rows else None

    def put(self, units: Sequence[object], rows: pa.Table) -> None:
        """Take these rows for all that there are of these units."""
        kept = self._rows.filter(pc.invert(self._among(units))) if self._rows is not None else rows.slice(0, 0)
        self._rows = pa.concat_tables([kept, rows]).combine_chunks()
        for unit in units:
            self._units.pop(unit, None)
            self._units[unit] = None
        self._forget(len(self._units) - UNITS - len(units))
        while self._rows.nbytes > MAX_BYTES and len(self._units) > len(units):
            self._forget(min(1 + len(self._units) // 2, len(self._units) - len(units)))

    def _forget(self, count: int) -> None:
        """Forget the units that did not change for longest."""
        if count > 0 and self._rows is not None:
            oldest = list(self._units)[:count]
            self._rows = self._rows.filter(pc.invert(self._among(oldest))).combine_chunks()
            for unit in oldest:
                del self._units[unit]

    def _among(self, units: Sequence[object]) -> pa.ChunkedArray:
        assert self._rows is not None
        column = self._rows[self._column]
        return pc.is_in(column, value_set=pa.array(units, column.type))
