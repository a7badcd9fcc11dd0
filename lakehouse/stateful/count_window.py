"""Windows of so many events: every 100 rides of a city.

An event's window is its ordinal among the events of its key, in bronze's order, divided by the size. Bronze only grows,
so an ordinal never changes, whenever and in whatever batch the event is counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP
from lakehouse.operators.windows import in_time
from lakehouse.stateful.base import codes, in_bronze_order, ordered_input, times
from lakehouse.stateful.folding import aggregates_of

NUMBER, FIRST, LAST, EVENTS, COMPLETE = "number", "first_at", "last_at", "events", "complete"
_AT = "_at"


class CountWindow:
    """One row a window: ``by``, ``number`` from 0, ``first_at``, ``last_at``, ``events``, ``complete``, aggregates.

    The newest window of a key is live. Events are numbered in the driver: a batch's rows go through it, and a build's.
    """

    ends = LAST
    unit: tuple[str, ...] = ()
    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to

    def __init__(self, product: Product) -> None:
        self._product = product
        self._aggregates = aggregates_of(product)
        self._by = product.by
        self.key: tuple[str, ...] = (*product.by, NUMBER)
        self.counts: str | None = EVENTS
        self.schema: pa.Schema | None = None

    def partial_sql(self) -> str:
        by = "".join(f"`{name}`, " for name in self._by)
        rows = "".join(f", {a.row} AS `{a.name}`" for a in self._aggregates)
        order = ", ".join(f"`_{name}`" for name in ("bronze_at", "topic", "partition", "offset"))
        return in_time(
            self._product,
            f"SELECT {by}`{self._product.time}` AS {_AT}{rows}, {order} "  # noqa: S608 - a checked pipeline
            f"FROM ({ordered_input(self._product)}) WHERE `{self._product.time}` IS NOT NULL",
        )

    def describe(self, partial: pa.Schema) -> None:
        by = [_plain(partial.field(name)) for name in self._by]
        own = [
            pa.field(NUMBER, pa.int64()),
            pa.field(FIRST, TIMESTAMP),
            pa.field(LAST, TIMESTAMP),
            pa.field(EVENTS, pa.int64()),
            pa.field(COMPLETE, pa.bool_()),
        ]
        values = [pa.field(a.name, _summed(partial.field(a.name).type, a.fold)) for a in self._aggregates]
        self.schema = pa.schema([*by, *own, *values])

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """The windows after these events came behind those of ``old``."""
        return self.advance(old, partial, None)

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        """See :class:`~lakehouse.stateful.base.Keeps`."""
        if COMPLETE in partial.schema.names:  # rows of the product itself: nothing to number
            return partial
        self.describe(partial.schema)
        assert self.schema is not None
        held = self.schema.empty_table() if held is None else held.select(self.schema.names).cast(self.schema)
        rows = in_bronze_order(partial, tuple(a.name for a in self._aggregates))
        numbered = rows.select([*self._by, *(a.name for a in self._aggregates)])
        numbered = numbered.append_column(NUMBER, pa.array(self._numbers(held, rows)))
        at = pc.cast(rows[_AT], TIMESTAMP)
        numbered = numbered.append_column(FIRST, at).append_column(LAST, at)
        numbered = numbered.append_column(EVENTS, pa.array(np.ones(rows.num_rows, dtype=np.int64)))
        wanted = pa.schema([f for f in self.schema if f.name != COMPLETE])
        merged = self._grouped(
            pa.concat_tables([held.select(wanted.names), numbered.select(wanted.names).cast(wanted)])
        )
        complete = pc.equal(merged[EVENTS], self._product.size)
        return merged.append_column(COMPLETE, complete).select(self.schema.names).cast(self.schema)

    def _numbers(self, held: pa.Table, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The window of each row, which are in bronze's order, behind the events that are held."""
        size = self._product.size
        before = np.asarray(pc.add(pc.multiply(held[NUMBER], size), held[EVENTS]).to_numpy(), dtype=np.int64)
        if self._by:
            schema = held.select(self._by).schema
            both = codes(pa.concat_tables([held.select(self._by), rows.select(self._by).cast(schema)]), self._by)
        else:
            both = np.zeros(held.num_rows + rows.num_rows, dtype=np.int64)
        known, keys = both[: held.num_rows], both[held.num_rows :]
        base = np.zeros(int(both.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(base, known, before)
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        begins = np.searchsorted(sorted_keys, sorted_keys, side="left")
        ordinal = np.empty(len(keys), dtype=np.int64)
        ordinal[order] = np.arange(len(keys)) - begins
        return np.asarray((base[keys] + ordinal) // size)

    def _grouped(self, rows: pa.Table) -> pa.Table:
        how = {FIRST: "min", LAST: "max", EVENTS: "sum", **{a.name: a.fold for a in self._aggregates}}
        grouped = rows.group_by(list(self.key)).aggregate(list(how.items()))
        columns = {name: grouped[name if name in self.key else f"{name}_{how[name]}"] for name in rows.schema.names}
        return pa.table(columns)

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """The newest window of each key."""
        keys = codes(rows, self._by)
        numbers = rows[NUMBER].to_numpy()
        newest = np.full(int(keys.max(initial=-1)) + 1, -1, dtype=np.int64)
        np.maximum.at(newest, keys, numbers)
        return np.asarray(numbers == newest[keys])

    def reach(self, partial: pa.Table, clock: int | None) -> int | None:
        """A window that is full stays as it is."""
        return None

    def called_back(self, rows: pa.Table, partial: pa.Table) -> npt.NDArray[np.bool_]:
        """None: see :meth:`reach`."""
        return np.zeros(rows.num_rows, dtype=bool)

    def comparable(self, rows: pa.Table, horizon: int) -> npt.NDArray[np.bool_]:
        """See :class:`~lakehouse.stateful.base.Keeps`."""
        return times(rows[LAST]) > horizon


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(TIMESTAMP) if pa.types.is_timestamp(field.type) else field


def _summed(kind: pa.DataType, how: str) -> pa.DataType:
    """What a column of this type is after folding, as Spark has it."""
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if how != "sum":
        return kind
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.float64()
