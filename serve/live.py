"""Live aggregates: a GROUP BY over a table's rows in memory, kept up to date from each change alone.

What a commit adds and takes away is known row by row, so every aggregate here can take a value back: sums are exact
(integers and decimals as they are, floats as Shewchuk's expansions), so that a result does not depend on the order of
commits and every process, live or replaying, gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.rows import Key, Row
from serve.accumulators import Accumulator, Count, Distinct, Extreme, Mean, Total
from serve.errors import FilterError
from serve.filters.compile import compile_condition, compile_expression, pin_of
from serve.filters.functions import Getter
from serve.filters.kinds import BOOL, DATE, DECIMAL, FLOAT, INT, NUMBERS, OTHER, TEXT, TIMESTAMP, Columns
from serve.filters.parse import conjunction, parse_condition
from serve.filters.select import parse_select
from serve.filters.view import View, touched_rows
from serve.model import Change, TableInfo, in_order

MAX_GROUPS = 100_000
OPENING_ROWS = 1_000  # at a time, so that nobody waits for a large table to be grouped
_ARROW = {
    INT: pa.int64(),
    FLOAT: pa.float64(),
    DECIMAL: pa.decimal256(76, 18),
    TEXT: pa.string(),
    BOOL: pa.bool_(),
    TIMESTAMP: pa.timestamp("us"),
    DATE: pa.date32(),
}


@dataclass(frozen=True, slots=True)
class Item:
    """One column of the result.

    Attributes:
        name: of the column.
        type: Arrow type of its values.
        group: which of the grouping columns it is; None: an aggregate.
        value: what is aggregated, in a row; None: the row itself (``count(*)``).
        new: makes its accumulator.
    """

    name: str
    type: pa.DataType
    group: int | None = None
    value: Getter | None = None
    new: Callable[[], Accumulator] = Count


@dataclass(slots=True)
class _Group:
    rows: int
    parts: list[Accumulator] = field(default_factory=list)


def aggregate_view(table: TableInfo, select: str, where: str, guard: str, seen: TableInfo | None = None) -> View:
    """The view that a request for a live aggregate asks for; arguments as of :func:`serve.filters.view.rows_view`.

    Raises:
        FilterError: something in it is not kept up to date here.
    """
    named = seen or table
    conditions = [parse_condition(where, Columns.of(named)), parse_condition(guard, Columns.of(table))]
    plain, guarded = ("" if tree is None else tree.sql("duckdb") for tree in conditions)
    view = View(plain, (), parse_select(select, named).sql("duckdb"), guarded)
    AggregateView(view, table)  # kinds are checked here
    return view


class AggregateView:
    """Groups of a table's rows. Call :meth:`opening` before anything else.

    Args:
        view: has a ``select``.
        table: of what.

    Raises:
        FilterError: the statement does not fit the table.
    """

    def __init__(self, view: View, table: TableInfo) -> None:
        self._view = view
        self._bind(table)
        self._groups: dict[Key, _Group] = {}
        self._results: dict[Key, Row] = {}

    @property
    def table(self) -> TableInfo:
        """The result's columns; its key is what is grouped by."""
        return self._table

    def opening(self, rows: Iterable[Row]) -> Iterator[None]:
        """Take the table's rows in, some thousands at each step.

        Raises:
            FilterError: too many groups.
        """
        touched: set[Key] = set() if self._by else {()}
        for count, row in enumerate(rows, 1):
            self._put(row, touched, add=True)
            if count % OPENING_ROWS == 0:
                yield
        self._settle(touched)

    def advance(self, change: Change) -> Change:
        """Groups that have other results now, and those that have no rows any more."""
        if change.was is not None:
            return self._rebound(change)
        touched: set[Key] = set()
        changed, gone = touched_rows(change, self._pin)
        for key, row in changed:
            if (old := change.before.get(key)) is not None:
                self._put(old, touched, add=False)
            self._put(row, touched, add=True)
        for key in gone:
            if (old := change.before.get(key)) is not None:
                self._put(old, touched, add=False)
        return self._told(change, *self._settle(touched))

    def source(self, rows: Mapping[Key, Row]) -> list[tuple[Key, Row]]:
        """The results by group."""
        return list(self._results.items())

    def rows(self, pairs: Iterable[tuple[Key, Row]]) -> Iterable[tuple[Key, Row]]:
        """As they are."""
        return pairs

    def _bind(self, table: TableInfo) -> None:
        known = Columns.of(table)
        select = parse_select(self._view.select, table)
        conditions = [parse_condition(text, known) for text in (self._view.guard, self._view.where)]
        inner = select.args.get("where")
        condition = conjunction(*conditions, None if inner is None else inner.this)
        self._matches = None if condition is None else compile_condition(condition, known)
        self._pin = None if condition is None else pin_of(condition, known)
        grouped = select.args.get("group")
        names = [known.resolve(node.name) for node in (grouped.expressions if grouped else [])]
        self._by = [known.at[name][0] for name in names]
        self._items = [_item(node, names, table, known) for node in select.expressions]
        listed = [item.name for item in self._items]
        if len(set(listed)) != len(listed):
            raise FilterError("two columns have the same name", "Name them with AS")
        key = {item.group: item.name for item in self._items if item.group is not None}
        if missing := [name for i, name in enumerate(names) if i not in key]:
            raise FilterError(f"{', '.join(missing)} is grouped by and not selected", "Select it: it is the key")
        self._table = replace(
            table,
            columns=tuple(listed),
            key=tuple(key[i] for i in range(len(names))),
            fold={},
            types=tuple(item.type for item in self._items),
        )

    def _put(self, row: Row, touched: set[Key], *, add: bool) -> None:
        if self._matches is not None and self._matches(row) is not True:
            return
        at = tuple([row[i] for i in self._by])
        group = self._groups.get(at)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                raise FilterError(f"it has more than {MAX_GROUPS} groups", "Make it a product of the pipeline")
            group = self._groups[at] = _Group(0, [item.new() for item in self._items if item.group is None])
        group.rows += 1 if add else -1
        touched.add(at)
        for part, item in zip(group.parts, [item for item in self._items if item.group is None], strict=True):
            value = row if item.value is None else item.value(row)
            if value is not None:
                (part.add if add else part.remove)(value)

    def _settle(self, touched: set[Key]) -> tuple[dict[Key, Row], list[Key]]:
        upserts: dict[Key, Row] = {}
        deletes: list[Key] = []
        for at in sorted(touched, key=in_order):
            group = self._groups.get(at)
            if self._by and (group is None or not group.rows):
                self._groups.pop(at, None)
                if self._results.pop(at, None) is not None:
                    deletes.append(at)
                continue
            row = self._result(at, group)
            if self._results.get(at) != row:
                self._results[at] = upserts[at] = row
        return upserts, deletes

    def _result(self, at: Key, group: _Group | None) -> Row:
        parts = iter(group.parts if group else [item.new() for item in self._items if item.group is None])
        return tuple([next(parts).result() if item.group is None else at[item.group] for item in self._items])

    def _rebound(self, change: Change) -> Change:
        """The table's columns are others: every row was sent anew, so it is grouped anew."""
        old, self._groups, self._results = self._results, {}, {}
        columns = self._table.columns
        self._bind(change.table)
        for _ in self.opening(change.upserts):
            pass
        same = columns == self._table.columns
        upserts = {at: row for at, row in self._results.items() if not same or old.get(at) != row}
        gone = sorted((at for at in old if at not in self._results), key=in_order)
        return self._told(change, {at: upserts[at] for at in sorted(upserts, key=in_order)}, gone)

    def _told(self, change: Change, upserts: Mapping[Key, Row], deletes: list[Key]) -> Change:
        return replace(
            change,
            table=self._table,
            upserts=tuple(upserts.values()),
            deletes=tuple(deletes),
            before={},
            was=None,
            keys=tuple(upserts),
        )


def _item(node: exp.Expr, groups: list[str], table: TableInfo, known: Columns) -> Item:
    inner = node.this if isinstance(node, exp.Alias) else node
    name = node.alias if isinstance(node, exp.Alias) else inner.sql("duckdb").replace('"', "").lower()
    if isinstance(inner, exp.Column):
        column = known.resolve(inner.name)
        at, kind = known.at[column]
        if column not in groups:
            raise FilterError(f"{column} is neither grouped by nor aggregated")
        if kind == OTHER:
            raise FilterError(f"{column} is of a kind that is not grouped by")
        return Item(name if isinstance(node, exp.Alias) else column, table.types[at], groups.index(column))
    argument = inner.this
    distinct = isinstance(argument, exp.Distinct)
    if distinct:
        argument = argument.expressions[0]
    if isinstance(argument, exp.Star):
        return Item(name, pa.int64())
    kind, value = compile_expression(argument, known)
    if kind == OTHER:
        raise FilterError(f"{argument.sql('duckdb')} is of a kind that is not aggregated")
    if isinstance(inner, exp.Count):
        return Item(name, pa.int64(), None, value, Distinct if distinct else Count)
    if isinstance(inner, (exp.Min, exp.Max)):
        pick: Callable[[Iterable[Any]], Any] = min if isinstance(inner, exp.Min) else max
        return Item(name, _type_of(argument, kind, table, known), None, value, lambda: Extreme(pick))
    if kind not in NUMBERS:
        raise FilterError(f"{argument.sql('duckdb')} is no number: it is of kind {kind}")
    if isinstance(inner, exp.Avg):
        return Item(name, pa.float64(), None, value, Mean)
    return Item(name, _ARROW[kind], None, value, Total)


def _type_of(node: exp.Expr, kind: str, table: TableInfo, known: Columns) -> pa.DataType:
    if isinstance(node, exp.Column):
        return table.types[known.at[known.resolve(node.name)][0]]
    return _ARROW.get(kind, pa.string())
