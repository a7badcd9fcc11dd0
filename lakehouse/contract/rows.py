"""Rows of a table whose rows are partials: how they become one row a key, and how rows are found by key.

``sum``, ``min`` and ``max`` fold a column by itself; NULLs are passed over. ``latest`` takes a whole row: of a key's
rows the one with the greatest order columns, compared from the first of them on, NULL before everything (as Spark's
``max_by(struct(*), struct(…))`` has it). A NULL in another column of that row is its value: it is never filled in from
an older row. Of rows with equal order columns any may win. Folding is associative and commutative, and idempotent but
for ``sum``, which needs each partial once.

:class:`Fold` has this one definition for three engines: SQL text for DuckDB, Arrow, and tuples in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import deltalake
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER
from lakehouse.contract.sql import quoted
from lakehouse.contract.storage import LakePath

LATEST: Final = "latest"
FOLDS: Final = ("sum", "min", "max", LATEST)
IN_MEMORY_ROWS = 100_000

Row: TypeAlias = tuple[Any, ...]
"""Values of one row in the order of the table's columns."""

Key: TypeAlias = tuple[Any, ...]
"""Values of the key columns."""

_IN_PYTHON: Mapping[str, Callable[[Any, Any], Any]] = {"sum": lambda a, b: a + b, "min": min, "max": max}


@dataclass(frozen=True, slots=True)
class Fold:
    """The fold of one table.

    Attributes:
        how: one of :data:`FOLDS` by column. A column without one has the same value in all partials of a key.
        order: for ``latest``: the columns whose greatest values win.
    """

    key: tuple[str, ...]
    how: Mapping[str, str]
    order: tuple[str, ...] = ()

    @classmethod
    def from_properties(cls, properties: Mapping[str, str | None]) -> Fold | None:
        """The fold in a table's properties; None if its rows are no partials.

        Raises ValueError: the properties do not describe a fold; the text says which and why.
        """
        text = properties.get(PROPERTY_FOLD)
        if not text:
            return None
        try:
            how = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"{PROPERTY_FOLD} is not JSON: {error}") from None
        if not isinstance(how, dict) or any(each not in FOLDS for each in how.values()):
            raise ValueError(f"{PROPERTY_FOLD} is not an object of {', '.join(FOLDS)}")
        order = names_in(properties.get(PROPERTY_ORDER))
        if LATEST in how.values() and not order:
            raise ValueError(f"it folds by {LATEST!r} and its metadata has no {PROPERTY_ORDER}")
        return cls(names_in(properties.get(PROPERTY_KEY)), how, order)

    @property
    def by_row(self) -> bool:
        """Whether one of a key's rows is the result, as it is."""
        return LATEST in self.how.values()

    def sql(self, relation: str, columns: Sequence[str], types: Mapping[str, str] | None = None) -> str:
        """DuckDB's SELECT over the folded rows.

        Args:
            relation: name of the partials, quoted where it needs to be.
            types: of the columns; sums are cast back to them (a sum of BIGINT is HUGEINT).
        """
        group = ", ".join(map(quoted, self.key))
        if self.by_row:
            order = ", ".join(f"{quoted(name)} DESC NULLS LAST" for name in self.order)
            return (
                f"SELECT {', '.join(map(quoted, columns))} FROM {relation} "  # noqa: S608 - names are quoted
                f"QUALIFY row_number() OVER (PARTITION BY {group} ORDER BY {order}) = 1"
            )
        folded = [
            quoted(name) if name in self.key else self._sql_column(name, (types or {}).get(name)) for name in columns
        ]
        return f"SELECT {', '.join(folded)} FROM {relation} GROUP BY {group}"  # noqa: S608 - names are quoted

    def arrow(self, rows: pa.Table) -> pa.Table:
        """The folded rows, with the schema of ``rows``, which has all key and order columns."""
        if self.by_row:
            return self._latest(rows)
        columns = [name for name in rows.schema.names if name not in self.key]
        wanted = [(name, self.how.get(name, "first")) for name in columns]
        groups = rows.group_by(list(self.key), use_threads=False).aggregate(wanted)
        found = dict(zip([f"{name}_{how}" for name, how in wanted], columns, strict=True))
        folded = groups.rename_columns([found.get(name, name) for name in groups.schema.names])
        return folded.select(rows.schema.names).cast(rows.schema)

    def rows(self, columns: Sequence[str], rows: Iterable[Row], into: Mapping[Key, Row]) -> dict[Key, Row]:
        """Folded rows by key, of the keys that ``rows`` has, on top of what was folded before.

        Args:
            into: rows folded from earlier partials; left as it is.
        """
        key_at = [columns.index(name) for name in self.key]
        merge = self._merger(columns)
        totals: dict[Key, Row] = {}
        for row in rows:
            key = tuple([row[i] for i in key_at])
            held = totals.get(key) or into.get(key)
            totals[key] = row if held is None else merge(held, row)
        return totals

    def _merger(self, columns: Sequence[str]) -> Callable[[Row, Row], Row]:
        if self.by_row:
            order_at = [columns.index(name) for name in self.order]

            def rank(row: Row) -> tuple[tuple[bool, Any], ...]:
                return tuple([(row[i] is not None, row[i]) for i in order_at])

            return lambda held, row: row if rank(row) > rank(held) else held
        folds = [_IN_PYTHON[self.how[name]] if name in self.how else None for name in columns]

        def merged(held: Row, row: Row) -> Row:
            return tuple(
                [
                    new if old is None else old if fold is None or new is None else fold(old, new)
                    for fold, old, new in zip(folds, held, row, strict=True)
                ]
            )

        return merged

    def _latest(self, rows: pa.Table) -> pa.Table:
        ranks: dict[str, pa.ChunkedArray] = {}
        for name in self.order:  # NULL comes first, where Arrow sorts it last
            ranks |= {f"{name} is there": pc.is_valid(rows[name]), name: rows[name]}
        order = pc.sort_indices(pa.table(ranks), [(name, "ascending") for name in ranks])
        place = pc.sort_indices(order)  # of each row among all; the last one is the greatest
        keys = rows.select(list(self.key)).append_column("millrace.place", place)
        last = keys.group_by(list(self.key), use_threads=False).aggregate([("millrace.place", "max")])
        return rows.take(order.take(last["millrace.place_max"].combine_chunks()))

    def _sql_column(self, name: str, kind: str | None) -> str:
        folded = f"{self.how.get(name, 'any_value')}({quoted(name)})"
        return f"CAST({folded} AS {kind}) AS {quoted(name)}" if kind else f"{folded} AS {quoted(name)}"


class UnknownColumn(MillraceError):
    """A look-up named a column that the table does not have."""

    def __init__(self, column: str) -> None:
        super().__init__(column)
        self.column = column

    def __str__(self) -> str:
        return f"there is no column {self.column!r}"


class KeyedRows:
    """Finds rows of one table as of its newest version. Threads may share it; it blocks.

    A small table is kept in memory without its binary columns, so that a look-up reads no file; of a larger one only
    the files are read that may hold the key.
    """

    def __init__(self, table: LakePath) -> None:
        self._log = DeltaLog(table)
        self._lock = threading.Lock()
        self._delta: deltalake.DeltaTable | None = None
        self._rows: pa.Table | None = None
        self._version = -1

    def key(self) -> tuple[str, ...]:
        """The key's columns."""
        with self._lock:
            return names_in(self._open().metadata().configuration.get(PROPERTY_KEY))

    def version(self) -> int:
        """The newest version."""
        with self._lock:
            return self._open().version()

    def find(self, wanted: Mapping[str, Sequence[str]]) -> tuple[int, pa.Table]:
        """Version, and rows in which each column has one of the values given as text; binary columns are left out.

        Partials are folded. A text that is no value of its column's type matches nothing.

        Raises:
            UnknownColumn: the table has no such column.
        """
        with self._lock:
            delta = self._open()
            version = delta.version()
            fold = Fold.from_properties(delta.metadata().configuration)
            if fold is None:
                return version, self._filtered(delta, wanted)
            # Other columns than the key's count after folding: a partial may have a value that the row has not.
            rows = self._filtered(delta, {name: texts for name, texts in wanted.items() if name in fold.key})
        rows = fold.arrow(rows)
        condition = _condition(rows.schema, {name: texts for name, texts in wanted.items() if name not in fold.key})
        return version, rows if condition is None else rows.filter(condition)

    def _open(self) -> deltalake.DeltaTable:
        if self._delta is None or not self._log.has(self._version):
            self._delta, self._rows = deltalake.DeltaTable(str(self._log.table)), None
            self._version = self._delta.version()
        elif self._log.has(self._version + 1):
            self._delta.update_incremental()
            self._version, self._rows = self._delta.version(), None
        return self._delta

    def _filtered(self, delta: deltalake.DeltaTable, wanted: Mapping[str, Sequence[str]]) -> pa.Table:
        data = delta.to_pyarrow_dataset()
        condition = _condition(data.schema, wanted)
        names = [field.name for field in data.schema if not _is_binary(field.type)]
        if self._rows is None and data.count_rows() <= IN_MEMORY_ROWS:
            self._rows = data.to_table(columns=names)
        if self._rows is None:
            return data.to_table(columns=names, filter=condition)
        return self._rows if condition is None else self._rows.filter(condition)


def names_in(text: str | None) -> tuple[str, ...]:
    """Column names of a property, which has commas between them."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _condition(schema: pa.Schema, wanted: Mapping[str, Sequence[str]]) -> ds.Expression | None:
    condition: ds.Expression | None = None
    for column, texts in wanted.items():
        if column not in schema.names:
            raise UnknownColumn(column)
        one = ds.field(column).isin(_values(texts, schema.field(column).type))
        condition = one if condition is None else condition & one
    return condition


def _values(texts: Sequence[str], kind: pa.DataType) -> pa.Array:
    values = []
    for text in texts:
        try:
            values.append(pa.scalar(text).cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
    return pa.array([value.as_py() for value in values], kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
