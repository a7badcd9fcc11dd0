"""The terms of the serving tier: a table as subscribers see it, a change, a request, a caller's rights. Data only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.pipeline.source import EnrichSpec
from lakehouse.contract.pipeline.tenants import UNDECLARED, TenantBorder
from lakehouse.contract.rows import Fold, Key, Row
from serve.core.position import Position
from serve.errors import RequestError

DEFAULT_RETENTION_MS = 7 * 86_400_000
"""Delta keeps removed data files for a week and the log for a month, where a table does not say otherwise."""


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as subscribers see it."""

    name: str
    table_id: str  # in the Delta metadata
    columns: tuple[str, ...]  # that are sent, in the table's order; binary ones are not
    key: tuple[str, ...]  # columns that identify a row
    # How rows of one key, which are partials, are folded, by column (lakehouse.contract.rows); empty: a key occurs once
    fold: Mapping[str, str] = field(default_factory=dict)
    types: tuple[pa.DataType, ...] = ()  # of `columns`
    retention_ms: int = DEFAULT_RETENTION_MS  # life of the log and the removed data files that a position needs
    order: tuple[str, ...] = ()  # for a fold by `latest`: the columns whose greatest values win
    # Of a source, by name: each has a column `NAME`, whether the event has a row of it, and columns `NAME.FIELD`
    references: Mapping[str, EnrichSpec] = field(default_factory=dict)

    @property
    def folding(self) -> Fold:
        return Fold(self.key, self.fold, self.order)

    def narrowed(self, names: Collection[str]) -> tuple[TableInfo, list[int]]:
        """The table with these columns only, and where its rows have them."""
        at = [i for i, name in enumerate(self.columns) if name in names]
        columns = tuple([self.columns[i] for i in at])
        types = tuple([self.types[i] for i in at]) if self.types else ()
        fold = {name: how for name, how in self.fold.items() if name in names}
        return replace(self, columns=columns, types=types, fold=fold), at

    def key_of(self, row: Row) -> Key:
        return tuple([row[self.columns.index(name)] for name in self.key])


@dataclass(frozen=True, slots=True)
class TableChange:
    """What one commit changed for a subscriber."""

    table: TableInfo
    version: int
    upserts: tuple[Row, ...]  # new or changed rows, in key order
    deletes: tuple[Key, ...]  # keys that are gone, in order
    facts: CommitFacts  # `through` is the last one known
    before: Mapping[Key, Row] = field(default_factory=dict)  # rows that upserts and deletes replace
    was: TableInfo | None = None  # the table before the commit if its columns were others; `before` has those
    left: frozenset[Key] = frozenset()  # deletes that are still in the table, no longer in the subscriber's view
    keys: tuple[Key, ...] = ()  # of the upserts; empty if not computed
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False, compare=False, repr=False)

    def keyed(self) -> Iterator[tuple[Key, Row]]:
        return zip(self.keys or map(self.table.key_of, self.upserts), self.upserts, strict=True)

    def pinned(self, column: int, values: Collection[Any]) -> tuple[list[tuple[Key, Row]], list[Key]]:
        """Upserts with their keys, and deletes, whose column has or had one of the values.

        Found by an index, so that a change is read once for a thousand filters that ask for one value each.
        """
        index = self._indexes.get(column)
        if index is None:
            index = self._indexes[column] = _Index(self, column)
        upserts = sorted({at for value in values for at in index.upserts.get(value, ())})
        deletes = sorted({at for value in values for at in index.deletes.get(value, ())})
        return [index.pairs[at] for at in upserts], [self.deletes[at] for at in deletes]

    def settle(self) -> None:
        """Drop the indexes that :meth:`pinned` made; they are made anew if somebody asks later."""
        self._indexes.clear()


@dataclass(frozen=True, slots=True)
class SubscribeRequest:
    """What a subscriber asks for, over any transport."""

    table: str
    position: Position | None = None  # where it resumes; None: a snapshot first
    where: str = ""  # SQL condition on rows; empty: all rows
    columns: tuple[str, ...] = ()  # wanted columns, besides the key's; empty: all
    select: str = ""  # a live aggregate, `SELECT … GROUP BY …`, instead of rows
    conflate: bool = False  # when it lags, it gets the latest row of each key instead of every change
    window: int = 0  # how many unacknowledged changes it may be sent; 0: any number


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller and its rights."""

    name: str = "anyone"  # for logs; never a secret
    tenant: str = ""
    tables: frozenset[str] | None = None  # that it may read; None: all
    # SQL conditions by table (`*`: every other one) that its rows must fulfil, whatever else it asks for
    rows: Mapping[str, str] = field(default_factory=dict)
    key: str = ""  # id of the key that it showed; empty if none was required
    queries: bool = False  # may add and remove continuous queries
    border: TenantBorder = field(default=UNDECLARED, compare=False)

    @property
    def owner(self) -> str:
        """Id that its webhooks are kept under: that of the key before any rotation."""
        return self.key.partition("-")[0]

    def may_read(self, table: str) -> bool:
        """Whether the table exists for it."""
        listed = self.tables is None or table in self.tables
        return listed and self.border.limit(self.tenant, table) is not None

    def check_table(self, table: str) -> None:
        """Raises RequestError as for a missing table: what it may not read does not exist for it."""
        if not self.may_read(table):
            raise no_such_table(table)

    def condition(self, table: str) -> str:
        """Condition on the table's rows; empty if none. Raises RequestError for a table that it may not read."""
        self.check_table(table)
        own = self.rows.get(table, self.rows.get("*", ""))
        column = self.border.limit(self.tenant, table)
        if not column:
            return own
        limited = exp.EQ(this=exp.column(column, quoted=True), expression=exp.Literal.string(self.tenant)).sql("duckdb")
        return f"{limited} AND ({own})" if own else limited

    @property
    def unlimited(self) -> bool:
        """Whether it may see everything, as a monitoring system must."""
        return self.tables is None and not self.rows and not self.tenant


def no_such_table(table: str) -> RequestError:
    """The refusal for tables that are missing or hidden."""
    return RequestError(RequestError.NOT_FOUND, "no_such_table", f"no table {table!r} is served here")


OPEN = Principal(queries=True)
"""Everything: for a server that only this machine reaches."""


class _Index:
    """Rows of a change by the values that a column has now and had before."""

    def __init__(self, change: TableChange, column: int) -> None:
        self.pairs = list(change.keyed())
        self.upserts: dict[Any, list[int]] = {}
        self.deletes: dict[Any, list[int]] = {}
        before = change.before
        for at, (key, row) in enumerate(self.pairs):
            value, old = row[column], before.get(key)
            self.upserts.setdefault(value, []).append(at)
            if old is not None and old[column] != value:
                self.upserts.setdefault(old[column], []).append(at)
        for at, key in enumerate(change.deletes):
            if (old := before.get(key)) is not None:
                self.deletes.setdefault(old[column], []).append(at)


def in_order(key: Key) -> tuple[Any, ...]:
    """Sort key for keys, nulls last: every process sends a commit's rows in the same order."""
    return tuple([(value is None, value if value is not None else 0) for value in key])
