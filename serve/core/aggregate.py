"""Live aggregates: a GROUP BY over a table's rows in memory, kept up to date from each change alone.

Each commit is known row by row, so every aggregate here can take a value back. Sums are exact (integers and decimals as
they are, floats as Shewchuk's expansions): a result does not depend on the order of commits, and every process, live or
replaying, gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.errors import QueryRefused
from lakehouse.contract.pipeline.added import resolve_references
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql import BOOL, DATE, DECIMAL, FLOAT, INT, NUMBERS, OTHER, TEXT, TIMESTAMP
from lakehouse.contract.sql.closures import Columns, Getter, compile_condition, compile_expression, pin_of
from lakehouse.contract.sql.filters import check, conjunction, normal, parse_condition, parsed
from serve.core.model import TableChange, TableInfo, in_order
from serve.core.view import SubscriberView, touched_rows
from serve.errors import FilterError

_EXACT = Context(prec=76)  # decimal128 has 38 digits: this adds 10^38 of them without rounding
MAX_GROUPS = 100_000
MAX_ITEMS = 64
OPENING_ROWS = 1_000  # at a time, so that grouping a large table blocks nobody
_HOW = (exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg)
_CLAUSES = ("expressions", "from_", "from", "where", "group")
_ARROW = {
    INT: pa.int64(),
    FLOAT: pa.float64(),
    DECIMAL: pa.decimal256(76, 18),
    TEXT: pa.string(),
    BOOL: pa.bool_(),
    TIMESTAMP: pa.timestamp("us"),
    DATE: pa.date32(),
}


class Count:
    """Counts values. Base of all that take values in, and out again; never NULL."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, value: Any) -> None:
        self.count += 1

    def remove(self, value: Any) -> None:
        self.count -= 1

    def result(self) -> Any:
        return self.count


class Total(Count):
    """The exact sum, rounded once; None for no values, or if it is beyond a float.

    Floats: J. R. Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997: partials that do not overlap.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole: int | Decimal = 0
        self._partials: list[float] = []

    def add(self, value: Any) -> None:
        self.count += 1
        self._put(value)

    def remove(self, value: Any) -> None:
        self.count -= 1
        self._put(-value)

    def result(self) -> Any:
        if not self.count:
            return None
        if not self._partials:
            return self._whole
        return _finite(lambda: math.fsum([*self._partials, self._whole]))

    def _put(self, value: Any) -> None:
        if not isinstance(value, float):
            exact = isinstance(value, Decimal) or isinstance(self._whole, Decimal)
            self._whole = _EXACT.add(Decimal(self._whole), Decimal(value)) if exact else self._whole + value
            return
        kept = []
        for partial in self._partials:
            big, small = (value, partial) if abs(value) >= abs(partial) else (partial, value)
            value = big + small
            if rest := small - (value - big):
                kept.append(rest)
        self._partials = [*kept, value]


class Mean(Total):
    """The exact mean; None in the same cases as the sum."""

    def result(self) -> float | None:
        total = super().result()
        return None if total is None else _finite(lambda: float(total) / self.count)


def _finite(result: Callable[[], float]) -> float | None:
    try:
        value = result()
    except (OverflowError, ValueError):  # ValueError: infinities of both signs
        return None
    return value if math.isfinite(value) else None


class DistinctCount(Count):
    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Any, int] = {}

    def add(self, value: Any) -> None:
        self._counts[value] = self._counts.get(value, 0) + 1

    def remove(self, value: Any) -> None:
        self._counts[value] -= 1
        if not self._counts[value]:
            del self._counts[value]

    def result(self) -> Any:
        return len(self._counts)


class Extreme(DistinctCount):
    """The least or the greatest, by ``pick`` (``min`` or ``max``). Taking it back searches the distinct values."""

    def __init__(self, pick: Callable[[Iterable[Any]], Any]) -> None:
        super().__init__()
        self._pick = pick
        self._best: Any = None

    def add(self, value: Any) -> None:
        super().add(value)
        self._best = value if self._best is None else self._pick((self._best, value))

    def remove(self, value: Any) -> None:
        super().remove(value)
        if value == self._best and value not in self._counts:
            self._best = self._pick(self._counts) if self._counts else None

    def result(self) -> Any:
        return self._best


@dataclass(frozen=True, slots=True)
class AggregateColumn:
    """One column of the result."""

    name: str
    type: pa.DataType  # Arrow type of its values
    group: int | None = None  # index of the grouping column; None for an aggregate
    value: Getter | None = None  # what is aggregated, in a row; None: the row itself (`count(*)`)
    new: Callable[[], Count] = Count  # takes values in and out


@dataclass(slots=True)
class _Group:
    rows: int
    parts: list[Count] = field(default_factory=list)


def aggregate_view(
    table: TableInfo, select: str, where: str, guard: str, seen: TableInfo | None = None
) -> SubscriberView:
    """The view for a live aggregate; arguments as for :func:`serve.core.view.rows_view`. Raises FilterError."""
    named = seen or table
    conditions = [parse_condition(where, Columns.of(named)), parse_condition(guard, Columns.of(table))]
    plain, guarded = ("" if tree is None else tree.sql("duckdb") for tree in conditions)
    view = SubscriberView(plain, (), parse_select(select, named).sql("duckdb"), guarded)
    AggregateView(view, table)  # kinds are checked here
    return view


class AggregateView:
    """Groups of a table's rows. Call :meth:`opening` first. Raises FilterError if the statement does not fit."""

    def __init__(self, view: SubscriberView, table: TableInfo) -> None:
        self._view = view
        self._bind(table)
        self._groups: dict[Key, _Group] = {}
        self._results: dict[Key, Row] = {}

    def opening(self, rows: Iterable[Row]) -> Generator[None, None, None]:
        """Take in the table's rows, some at each step. Raises FilterError for too many groups."""
        touched: set[Key] = set() if self._by else {()}
        for count, row in enumerate(rows, 1):
            self._put(row, touched, add=True)
            if count % OPENING_ROWS == 0:
                yield
        self._settle(touched)

    def advance(self, change: TableChange) -> TableChange:
        """Groups with new results, and groups without rows; otherwise as of :class:`serve.core.view.RowsView`."""
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
        """The groups, whatever the table's rows are."""
        return list(self._results.items())

    def rows(self, pairs: Iterable[tuple[Key, Row]]) -> Iterable[tuple[Key, Row]]:
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
        self._aggregated = [item for item in self._items if item.group is None]
        listed = [item.name for item in self._items]
        if len(set(listed)) != len(listed):
            raise FilterError("two columns have the same name", "Name them with AS")
        key = {item.group: item.name for item in self._items if item.group is not None}
        if missing := [name for i, name in enumerate(names) if i not in key]:
            raise FilterError(f"{', '.join(missing)} is grouped by and not selected", "Select it: it is the key")
        self.table = replace(  # columns of the result; its key is the grouping columns
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
            group = self._groups[at] = _Group(0, [item.new() for item in self._aggregated])
        group.rows += 1 if add else -1
        touched.add(at)
        for part, item in zip(group.parts, self._aggregated, strict=True):
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
        parts = iter(group.parts if group else [item.new() for item in self._aggregated])
        return tuple([next(parts).result() if item.group is None else at[item.group] for item in self._items])

    def _rebound(self, change: TableChange) -> TableChange:
        """The table's columns have changed and every row was sent again: group anew."""
        old, self._groups, self._results = self._results, {}, {}
        columns = self.table.columns
        self._bind(change.table)
        for _ in self.opening(change.upserts):
            pass
        same = columns == self.table.columns
        upserts = {at: row for at, row in self._results.items() if not same or old.get(at) != row}
        gone = sorted((at for at in old if at not in self._results), key=in_order)
        return self._told(change, {at: upserts[at] for at in sorted(upserts, key=in_order)}, gone)

    def _told(self, change: TableChange, upserts: Mapping[Key, Row], deletes: list[Key]) -> TableChange:
        return replace(
            change,
            table=self.table,
            upserts=tuple(upserts.values()),
            deletes=tuple(deletes),
            before={},
            facts=self._view.facts(change.facts),
            was=None,
            keys=tuple(upserts),
        )


def _item(node: exp.Expr, groups: list[str], table: TableInfo, known: Columns) -> AggregateColumn:
    inner = node.this if isinstance(node, exp.Alias) else node
    name = node.alias if isinstance(node, exp.Alias) else inner.sql("duckdb").replace('"', "").lower()
    if isinstance(inner, exp.Column):
        column = known.resolve(inner.name)
        at, kind = known.at[column]
        if column not in groups:
            raise FilterError(f"{column} is neither grouped by nor aggregated")
        if kind == OTHER:
            raise FilterError(f"{column} is of a kind that is not grouped by")
        return AggregateColumn(name if isinstance(node, exp.Alias) else column, table.types[at], groups.index(column))
    argument = inner.this
    distinct = isinstance(argument, exp.Distinct)
    if distinct:
        argument = argument.expressions[0]
    if isinstance(argument, exp.Star):
        return AggregateColumn(name, pa.int64())
    kind, value = compile_expression(argument, known)
    if kind == OTHER:
        raise FilterError(f"{argument.sql('duckdb')} is of a kind that is not aggregated")
    if isinstance(inner, exp.Count):
        return AggregateColumn(name, pa.int64(), None, value, DistinctCount if distinct else Count)
    if isinstance(inner, (exp.Min, exp.Max)):
        pick: Callable[[Iterable[Any]], Any] = min if isinstance(inner, exp.Min) else max
        return AggregateColumn(name, _type_of(argument, kind, table, known), None, value, lambda: Extreme(pick))
    if kind not in NUMBERS:
        raise FilterError(f"{argument.sql('duckdb')} is no number: it is of kind {kind}")
    if isinstance(inner, exp.Avg):
        return AggregateColumn(name, pa.float64(), None, value, Mean)
    return AggregateColumn(name, _ARROW[kind], None, value, Total)


def _type_of(node: exp.Expr, kind: str, table: TableInfo, known: Columns) -> pa.DataType:
    if isinstance(node, exp.Column):
        return table.types[known.at[known.resolve(node.name)][0]]
    return _ARROW.get(kind, pa.string())


def rows_of_select(sql: str, table: TableInfo) -> tuple[list[str], str] | None:
    """Columns and condition of a statement that asks for rows; None if it aggregates. Raises FilterError."""
    tree = _statement(sql, table)
    if tree.args.get("group") is not None or any(node.find(exp.AggFunc) for node in tree.expressions):
        return None
    columns: list[str] = []
    for node in tree.expressions:
        if isinstance(node, exp.Column):
            check(node)
            columns.append(node.name)
        elif isinstance(node, exp.Star) and not any(node.args.values()):
            columns += table.columns
        else:
            remedy = "Without GROUP BY, name columns as they are in the table, or *"
            raise FilterError(f"{node.sql('duckdb')} is no column", remedy)
    where = tree.args.get("where")
    return columns, "" if where is None else where.this.sql("duckdb")


def parse_select(sql: str, table: TableInfo) -> exp.Select:
    """The statement, normalized, without FROM. Raises FilterError for what is not kept up to date here."""
    tree = _statement(sql, table)
    known = Columns.of(table)
    inner, grouped = tree.args.get("where"), tree.args.get("group")
    if inner is not None:
        check(inner.this)
    by = [] if grouped is None else grouped.expressions
    extra = grouped is not None and any(value for name, value in grouped.args.items() if name != "expressions")
    if extra or not all(isinstance(node, exp.Column) for node in by):
        raise FilterError("GROUP BY takes columns only")
    for node in [*tree.expressions, *by]:
        _check_item(node)
    normalised = normal(tree, known)
    assert isinstance(normalised, exp.Select)
    return normalised


def _statement(sql: str, table: TableInfo) -> exp.Select:
    """One SELECT over this table with clauses that can be kept up to date; without FROM."""
    tree = parsed(sql)
    if not isinstance(tree, exp.Select):
        raise FilterError("it is not one SELECT", "Write SELECT city, sum(n) AS n GROUP BY city")
    _join_references(tree, table)
    for name, value in tree.args.items():
        if value and name not in _CLAUSES:
            raise FilterError(
                f"{name.upper()} is not kept up to date here", "SELECT … WHERE … GROUP BY … is; or make it a product"
            )
    source = tree.args.get("from_") or tree.args.get("from")
    if source is not None:
        if not isinstance(source.this, exp.Table) or source.this.sql("duckdb").strip('"') != table.name:
            raise FilterError(f"FROM names this table, {table.name!r}, or nothing")
        source.pop()
    if len(tree.expressions) > MAX_ITEMS:
        raise FilterError(f"it has more than {MAX_ITEMS} columns")
    return tree


def _join_references(tree: exp.Select, table: TableInfo) -> None:
    """Replace joins of a source with its references by the references' columns, and drop the source's alias. Raises
    FilterError: a reference is joined in another way than it is declared, or has no such field.
    """
    source = tree.args.get("from_") or tree.args.get("from")
    if not table.references or source is None:
        return
    own = source.this.alias_or_name
    try:
        resolve_references(tree, {table.name: table.references})
    except QueryRefused as refused:
        raise FilterError(refused.problem, refused.remedy) from None
    if not source.this.alias_column_names:
        source.this.set("alias", None)
    for column in list(tree.find_all(exp.Column)):
        if len(column.parts) != 2:
            continue
        spec = table.references.get(column.table)
        if spec is not None and column.name not in spec.fields:
            remedy = f"Fields that the pipeline declares: {', '.join(spec.fields) or 'none'}"
            raise FilterError(f"the reference {column.table!r} has no field {column.name!r}", remedy)
        if spec is not None or column.table == own:
            name = column.name if spec is None else f"{column.table}.{column.name}"
            column.replace(exp.column(name, quoted=True))


def _check_item(node: exp.Expr) -> None:
    inner = node.this if isinstance(node, exp.Alias) else node
    if isinstance(inner, exp.Column):
        check(inner)
        return
    if not isinstance(inner, _HOW):
        raise FilterError(
            f"{inner.sql('duckdb')} is not kept up to date here",
            "count, count(DISTINCT …), sum, min, max and avg are, beside the columns grouped by",
        )
    extra = [name for name, value in inner.args.items() if value and name not in ("this", "big_int")]
    if extra:
        raise FilterError(f"{inner.sql('duckdb')} is not kept up to date here")
    argument = inner.this
    if isinstance(argument, exp.Distinct):
        if not isinstance(inner, exp.Count) or len(argument.expressions) != 1 or argument.args.get("on"):
            raise FilterError("DISTINCT is taken in count(DISTINCT column) only")
        argument = argument.expressions[0]
    if not (isinstance(argument, exp.Star) and isinstance(inner, exp.Count)):
        if argument is None:
            raise FilterError(f"{inner.sql('duckdb')} lacks its argument")
        check(argument)
