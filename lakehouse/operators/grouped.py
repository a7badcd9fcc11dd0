"""Products that keep one state, such as a sketch, for each window and group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START, plain_type
from lakehouse.operators.windows import spread_and_merged

State = TypeVar("State")
Row = dict[str, Any]
Key = tuple[Any, ...]
_MOST = 20_000  # rows with sketches that are made at once


class Grouped(ABC, Generic[State]):
    """Merges the states of a window and group, and makes result rows of each.

    Args:
        product: what is kept.
        columns: of the result rows, behind the window's bounds and the groups.
        held: those of ``columns`` that a state is read from; the first is null in rows that hold none.
        ranks: column that tells the rows of one window and group apart, where there are several.
    """

    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to

    def __init__(
        self, product: Product, columns: Sequence[tuple[str, pa.DataType]], held: Sequence[str], ranks: str = ""
    ) -> None:
        self._product = product
        self._columns = list(columns)
        self._held = list(held)
        self._group = [WINDOW_START, *product.by]
        self.key: tuple[str, ...] = (*self._group, *([ranks] if ranks else []))
        self.unit: tuple[str, ...] = (WINDOW_START,)
        # Sliding windows hold an event several times, and a lateness leaves some out.
        whole = not product.slide and product.lateness_ms is None and product.source in dict(columns)
        self.counts: str | None = product.source if whole else None
        self.schema: pa.Schema | None = None
        check_names(product, [WINDOW_START, WINDOW_END, *product.by, *(name for name, _ in columns)])
        if not product.by:
            self.describe(pa.schema([]))

    @abstractmethod
    def partial_sql(self) -> str:
        """See :class:`~lakehouse.operators.base.Operator`."""

    @abstractmethod
    def add(self, state: State | None, row: Row) -> State:
        """The state with that of a row taken in; the state given may be changed."""

    @abstractmethod
    def rows(self, state: State) -> list[Row]:
        """Result rows of a state, without window and groups."""

    def digested(self, partial: pa.Table) -> pa.Table:
        """Partial rows that hold states, of what Spark gave."""
        return partial

    def describe(self, partial: pa.Schema) -> None:
        by = [(name, plain_type(partial.field(name).type)) for name in self._product.by]
        for name, kind in by:
            if pa.types.is_nested(kind) or pa.types.is_floating(kind):
                raise BadProduct(self._product.name, f"it groups by {name}, {kind}", "Group by texts, integers, dates")
        self.schema = pa.schema([(WINDOW_START, TIMESTAMP), (WINDOW_END, TIMESTAMP), *by, *self._columns])

    def prepare(self, partial: pa.Table) -> pa.Table:
        rows = self.digested(partial)
        if not self._product.slide:
            return rows
        return spread_and_merged(rows, self._product.window_ms, self._product.slide_ms, self.merge, most=_MOST)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        assert self.schema is not None, "describe() comes first"
        states: dict[Key, State] = {}
        ends: dict[Key, Any] = {}
        untouched = None
        if old is not None:
            touched = set(self._keys(partial))
            found = pa.array([key in touched for key in self._keys(old)], pa.bool_())
            untouched = old.filter(pc.invert(found))
            old = old.filter(found)
        for table in (old, partial):
            for key, row in [] if table is None else self._read(table):
                if row[self._held[0]] is not None:
                    states[key] = self.add(states.get(key), row)
                    ends[key] = row[WINDOW_END]
        rows = []
        for key, state in states.items():
            named = {WINDOW_END: ends[key], **dict(zip(self._group, key, strict=True))}
            rows += [{**named, **row} for row in self.rows(state)]
        merged = pa.Table.from_pylist(rows, schema=self.schema)
        return merged if untouched is None else pa.concat_tables([untouched.cast(self.schema), merged])

    def _keys(self, table: pa.Table) -> Iterator[Key]:
        return zip(*(table[name].to_pylist() for name in self._group), strict=True)

    def _read(self, table: pa.Table) -> Iterator[tuple[Key, Row]]:
        rows = table.select([WINDOW_END, *self._held]).to_pylist()
        return zip(self._keys(table), rows, strict=True)


def check_names(product: Product, names: Sequence[str]) -> None:
    """Refuse a product two of whose columns would have the same name.

    Raises:
        BadProduct: so it is.
    """
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise BadProduct(
            product.name, f"column {twice} would stand for two things", "Rename the product or the column in its SQL"
        )


def lists_by(table: pa.Table, group: Sequence[str], lists: Mapping[str, str]) -> Iterator[tuple[Row, Row]]:
    """Rows of equal ``group`` columns as lists.

    Args:
        lists: column to what is made of it, e.g. ``list`` or ``sum``.

    Returns:
        Values of the group columns, and those of ``lists``, by column.
    """
    grouped = table.group_by(list(group), use_threads=False).aggregate(list(lists.items()))
    named = [*group, *(f"{name}_{how}" for name, how in lists.items())]
    for number in range(grouped.num_rows):
        values = {name: grouped[name][number] for name in named}
        yield (
            {name: values[name].as_py() for name in group},
            {name: values[f"{name}_{how}"] for name, how in lists.items()},
        )
