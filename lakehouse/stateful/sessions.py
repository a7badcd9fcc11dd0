"""Sessions: events of one key that follow each other within a gap.

A batch's events are put into partial sessions by Spark (``session_window``); a partial session and those that are held
become one where they overlap when each is drawn out by the gap; an event that is just the gap later begins another.
That is associative and commutative, so a late event goes into its session, and may make one of two. A session is closed
when the newest event time so far is the gap, or more, behind its last event: a matter of events alone, so that a replay
closes the same ones.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP
from lakehouse.operators.windows import in_time
from lakehouse.stateful.base import among, codes, input_sql, times
from lakehouse.stateful.folding import aggregates_of

START, END, CLOSED = "session_start", "session_end", "closed"


class Sessions:
    """One row a session: ``by``, ``session_start``, ``session_end`` (its last event), ``closed``, aggregates."""

    ends = END
    unit: tuple[str, ...] = ()
    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to

    def __init__(self, product: Product) -> None:
        self._product = product
        self._aggregates = aggregates_of(product)
        self._gap = product.gap_ms * 1000
        self.key: tuple[str, ...] = (*product.by, START)
        self.counts = next((a.name for a in self._aggregates if a.sql.replace(" ", "").lower() == "count(*)"), None)
        self.schema: pa.Schema | None = None

    def partial_sql(self) -> str:
        time, by = f"`{self._product.time}`", "".join(f"`{name}`, " for name in self._product.by)
        columns = "".join(f", {a.sql} AS `{a.name}`" for a in self._aggregates)
        return in_time(
            self._product,
            f"SELECT {by}min({time}) AS {START}, max({time}) AS {END}{columns} "  # noqa: S608 - a checked pipeline
            f"FROM ({input_sql(self._product)}) WHERE {time} IS NOT NULL "
            f"GROUP BY {by}session_window({time}, '{self._gap - 1} microseconds')",  # Spark's ends belong to it
        )

    def describe(self, partial: pa.Schema) -> None:
        fields = [pa.field(f.name, TIMESTAMP) if pa.types.is_timestamp(f.type) else f for f in partial]
        at = partial.get_field_index(END) + 1
        self.schema = pa.schema([*fields[:at], pa.field(CLOSED, pa.bool_()), *fields[at:]])

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """Sessions of all rows, none of them closed."""
        return self.advance(old, partial, None)

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        """See :class:`~lakehouse.stateful.base.Keeps`."""
        if CLOSED not in partial.schema.names:
            self.describe(partial.schema)
        assert self.schema is not None
        plain = pa.schema([f for f in self.schema if f.name != CLOSED])
        rows = partial.select(plain.names).cast(plain)
        kept = plain.empty_table()
        if held is not None and held.num_rows:
            touched = among(held, rows, self._product.by)
            kept = held.filter(pa.array(~touched)).select(plain.names)
            rows = pa.concat_tables([held.filter(pa.array(touched)).select(plain.names), rows])
        merged = pa.concat_tables([kept, pa.Table.from_pylist(self._merged(rows), schema=plain)])
        last = times(merged[END])
        closed = np.zeros(len(last), dtype=bool) if clock is None else last + self._gap <= clock
        return merged.append_column(CLOSED, pa.array(closed)).select(self.schema.names).cast(self.schema)

    def _merged(self, rows: pa.Table) -> list[dict[str, Any]]:
        """Sessions of rows that are partial sessions."""
        starts, ends = times(rows[START]), times(rows[END])
        keys = codes(rows, self._product.by)
        order = np.lexsort((ends, starts, keys))
        values = rows.to_pylist()
        found: list[dict[str, Any]] = []
        for _, group in groupby(order.tolist(), key=lambda i: int(keys[i])):
            reach: int | None = None
            for i in group:
                if reach is not None and starts[i] < reach:
                    self._join(found[-1], values[i])
                    reach = max(reach, int(ends[i]) + self._gap)
                else:
                    found.append(values[i])
                    reach = int(ends[i]) + self._gap
        return found

    def _join(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        one[END] = max(one[END], other[END])
        for aggregate in self._aggregates:
            one[aggregate.name] = fold(aggregate.fold, one[aggregate.name], other[aggregate.name])

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """Sessions are kept at hand for another gap after they closed: most of what is late comes in that time."""
        if clock is None:
            return np.ones(rows.num_rows, dtype=bool)
        return np.asarray(times(rows[END]) + 2 * self._gap > clock)

    def reach(self, partial: pa.Table, clock: int | None) -> int | None:
        """See :class:`~lakehouse.stateful.base.Keeps`."""
        if clock is None or not partial.num_rows:
            return None
        earliest = int(times(partial[START]).min()) - self._gap
        return earliest if earliest < clock - 2 * self._gap else None

    def called_back(self, rows: pa.Table, partial: pa.Table) -> npt.NDArray[np.bool_]:
        """See :class:`~lakehouse.stateful.base.Keeps`."""
        near = (times(rows[END]) > int(times(partial[START]).min()) - self._gap) & (
            times(rows[START]) < int(times(partial[END]).max()) + self._gap
        )
        return near & among(rows, partial, self._product.by)

    def comparable(self, rows: pa.Table, horizon: int) -> npt.NDArray[np.bool_]:
        """A session that begins within the gap behind the horizon may have lost its beginning."""
        return np.asarray(times(rows[START]) > horizon + self._gap)


def fold(how: str, one: Any, other: Any) -> Any:
    """Two results of an aggregate as one; null is the result over nothing."""
    if one is None or other is None:
        return one if other is None else other
    if how == "sum":
        return one + other
    return min(one, other) if how == "min" else max(one, other)
