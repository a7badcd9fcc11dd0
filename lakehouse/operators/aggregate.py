"""A product that is one Spark SQL aggregate query over events, or over the pairs of a join.

Which of its columns are keys, and how the others merge, is read from the query's own text (sqlglot), so that a pipeline
declares nothing twice. ``count``, ``count_if``, ``sum``, ``min`` and ``max`` merge; an average is refused with the pair
of columns to keep instead.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import Fold
from lakehouse.contract.sql.spark import WINDOW, line_of
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.errors import BadProduct
from lakehouse.operators.base import WINDOW_START, Operator, in_time, spread_and_merged
from lakehouse.operators.sql import check_rows, parse

VIEW = "joined"
_MOST = 1_000_000  # rows of windows that are made of panes at once

_FOLDS: dict[type, str] = {
    exp.Count: "sum",
    exp.CountIf: "sum",
    exp.Sum: "sum",
    exp.Min: "min",
    exp.Max: "max",
}


class Aggregate(Operator):
    """Rows of a ``GROUP BY``."""

    def __init__(self, product: Product) -> None:
        self._product = product
        select = _parse(product)
        fold: dict[str, str] = {}
        keys: list[str] = []
        for column in select.expressions:
            merge = _merge_of(column, product)
            if merge:
                fold[column.alias_or_name] = merge
            else:
                keys.append(column.alias_or_name)
        _check_keys(select, keys, product)
        check_rows(select, product, aggregated=select)
        self.fold = fold
        self.key = tuple(keys)
        self.unit = (WINDOW_START,) if WINDOW_START in keys else ()
        self._sliding = Sliding.found_in(select, product.sql)
        counts = next((c.alias_or_name for c in select.expressions if _counts_all(c)), None)
        slides = any(len(call.expressions) > 2 for call in _windows(select))  # an event may lie in several windows
        self.counts = counts if product.lateness_ms is None and not slides else None

    def partial_sql(self) -> str:
        sql = self._sliding.sql if self._sliding else self._product.sql
        return in_time(self._product, sql.strip().rstrip(";"))

    def describe(self, partial: pa.Schema) -> None:
        super().describe(partial)
        if self.unit and not pa.types.is_timestamp(self.schema.field(WINDOW_START).type):
            self.unit = ()  # a column of that name which is no time

    def prepare(self, partial: pa.Table) -> pa.Table:
        if self._sliding is None:
            return partial
        window_ms, slide_ms, end = self._sliding.window_ms, self._sliding.slide_ms, self._sliding.end
        return spread_and_merged(partial, window_ms, slide_ms, self.merge, most=_MOST, end=end)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        self.describe(partial.schema)
        return Fold(self.key, self.fold).arrow(self._stacked(old, partial))


class Join(Aggregate):
    """Rows of a ``GROUP BY`` over the pairs of two sources, joined by columns and a bound of time.

    The SQL reads from the view :data:`VIEW`, whose two columns are named as the sources are and hold one event each,
    payload and envelope; the right one is null where a left event stands alone. A pair counts when both events have
    come, in whatever order and however late: there is no watermark, so nothing is dropped
    (docs/decisions/0006-joins.md).

    Pairs that are lost again (a left event alone, until its right one comes) are subtracted. So only sums and counts
    can be kept of an outer join or of ``match = "first"``, beside a ``count(*)`` that tells when nothing is left of a
    row.
    """

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self.retracts = product.kind == "left_outer" or product.match == "first"
        if product.lateness_ms is not None:
            remedy = "Leave it out: late events find their pairs"
            raise BadProduct(product.name, "a join has no lateness", remedy, key="lateness")
        if self.retracts:
            self._check_retracts()

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """The rows without those of which nothing is left."""
        merged = super().merge(old, partial)
        if not self.retracts:
            return merged
        for name in self.fold:  # what was added and taken off again is 0: so the sum over nothing is 0 throughout
            index = merged.schema.get_field_index(name)
            merged = merged.set_column(index, merged.schema.field(name), pc.fill_null(merged[name], 0))
        return merged.filter(pc.not_equal(merged[self.counts], 0))

    def signed(self, gained: pa.Table, lost: pa.Table) -> pa.Table:
        """Partial rows of a step: those of the pairs it brought, less those of the pairs it ended."""
        if not lost.num_rows:
            return gained
        for name in self.fold:
            index = lost.schema.get_field_index(name)
            lost = lost.set_column(index, lost.schema.field(name), pc.negate(lost[name]))
        return pa.concat_tables([gained, lost])

    def columns(self, source: str) -> set[str] | None:
        """Columns of one side that the SQL reads, in lower case; None: all, or it is not known."""
        tree = parse(self._product)
        if any(not isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star)):
            return None
        found: set[str] = set()
        for column in tree.find_all(exp.Column):
            path = [part.name.lower() for part in column.parts]
            if path[0] == VIEW:
                path = path[1:]
            if path and path[0] == source.lower():
                if len(path) == 1:
                    return None
                found.add(path[1])
        return found

    def _check_retracts(self) -> None:
        name = self._product.name
        if self._product.storage == "append":
            problem = "pairs of this join are taken back, so it keeps no partial rows"
            raise BadProduct(name, problem, "Leave out storage", key="storage")
        if self.counts is None:
            raise BadProduct(name, "pairs of this join are taken back", "Add count(*) AS … to its SELECT")
        if any(fold != "sum" for fold in self.fold.values()):
            raise BadProduct(
                name,
                "pairs of this join are taken back, and a minimum or maximum cannot be",
                "Keep sums and counts, or use kind = 'inner' with match = 'all'",
            )


def fold_of(aggregate: exp.Expr) -> str | None:
    """``sum``, ``min`` or ``max``, by which two results become one; None if they cannot."""
    distinct = any(isinstance(argument, exp.Distinct) for argument in aggregate.iter_expressions())
    return None if distinct else _FOLDS.get(type(aggregate))


def _parse(product: Product) -> exp.Select:
    tree = parse(product)
    if not isinstance(tree, exp.Select) or tree.args.get("group") is None:
        raise BadProduct(product.name, "its SQL is not one SELECT … GROUP BY", "Use an operator for anything else")
    later = [tree.args[name] for name in ("having", "limit", "order", "distinct") if tree.args.get(name)]
    if later:
        problem = "HAVING, DISTINCT, ORDER BY and LIMIT cannot be kept up to date"
        raise BadProduct(product.name, problem, "Apply them when reading", line=line_of(later[0]))
    # Spark and sqlglot name a bare expression each in their own way.
    unnamed = [column for column in tree.expressions if not isinstance(column, exp.Alias | exp.Column | exp.Dot)]
    if unnamed:
        problem = f"column {unnamed[0].sql(dialect='spark')} has no name"
        raise BadProduct(product.name, problem, "Add AS name", line=line_of(unnamed[0]))
    return tree


def _merge_of(column: exp.Expression, product: Product) -> str | None:
    """How the column's partial values merge, or None for a key."""
    inner = column.unalias()
    if not inner.find(exp.AggFunc):
        return None
    merge = fold_of(inner)
    if merge is None:
        raise BadProduct(
            product.name,
            f"column {column.alias_or_name} ({inner.sql(dialect='spark')}) cannot be merged from partial results",
            "Keep sums and counts and divide when reading; use operator = 'distinct' for distinct counts",
            line=line_of(column),
        )
    return merge


def _check_keys(select: exp.Select, keys: list[str], product: Product) -> None:
    """Every grouped expression is a column, and every other column is grouped: else rows of several groups merge."""
    group = select.args["group"]
    plain = {column.alias_or_name: column.unalias() for column in select.expressions if column.alias_or_name in keys}
    grouped = [
        select.expressions[int(e.name) - 1].unalias() if isinstance(e, exp.Literal) and e.is_int else e
        for e in group.expressions
    ]
    if not all(isinstance(e, exp.Expression) and not isinstance(e, _MANY_GROUPINGS) for e in grouped) or any(
        group.args.get(name) for name in ("rollup", "cube", "grouping_sets", "totals")
    ):
        raise BadProduct(product.name, "ROLLUP, CUBE and GROUPING SETS cannot be kept up to date", "Group by columns")
    for e in grouped:
        if not any(_stands_for(e, name, column) for name, column in plain.items()):
            remedy = f"Add {'window.start AS ' + WINDOW_START if _is_window(e) else e.sql(dialect='spark')} to SELECT"
            raise BadProduct(product.name, "it groups by what is not a column of its rows", remedy, line=line_of(e))
    for name, column in plain.items():
        if not group.args.get("all") and not any(_stands_for(e, name, column) for e in grouped):
            raise BadProduct(
                product.name,
                f"column {name} ({column.sql(dialect='spark')}) is neither grouped by nor an aggregate we can merge",
                "Group by it; count, count_if, sum, min and max merge",
                line=line_of(column),
            )


_MANY_GROUPINGS = (exp.Rollup, exp.Cube, exp.GroupingSets)


def _is_window(e: exp.Expr) -> bool:
    return isinstance(e, exp.Anonymous) and e.name.lower() == WINDOW


def _windows(select: exp.Select) -> list[exp.Expr]:
    return [call for call in select.find_all(exp.Anonymous) if _is_window(call)]


def _stands_for(grouped: exp.Expression, name: str, column: exp.Expression) -> bool:
    """Whether a column of the SELECT is what the GROUP BY names."""
    if _is_window(grouped):
        return isinstance(column, exp.Column) and column.table.lower() == "window"
    return grouped == column or (isinstance(grouped, exp.Column) and not grouped.table and grouped.name == name)


def _counts_all(column: exp.Expression) -> bool:
    inner = column.unalias()
    return isinstance(inner, exp.Count) and isinstance(inner.this, exp.Star)


@dataclass(frozen=True, slots=True)
class Sliding:
    """A query over sliding windows of a plain SQL aggregate, asked of Spark as one over panes.

    ``GROUP BY window(event_time, '30 minutes', '5 seconds')`` makes Spark aggregate each event 360 times. If the query
    says no more of its window than its start and end, panes of five seconds give the same rows.
    """

    sql: str
    window_ms: int
    slide_ms: int  # between the starts of two
    end: str | None  # column with the window's end; None: there is none

    @classmethod
    def found_in(cls, select: exp.Select, text: str) -> Sliding | None:
        """The query's sliding windows; None: it has none, or says something of them that panes could not."""
        calls = _windows(select)
        if len(calls) != 1 or not any(call is calls[0] for call in select.args["group"].expressions):
            return None
        arguments = calls[0].expressions[1:]
        if len(arguments) != 2 or not all(argument.is_string for argument in arguments):
            return None
        length, slide = (str(argument.this) for argument in arguments)
        found = [c for c in select.find_all(exp.Column) if "window" in (c.table.lower(), c.name.lower())]
        columns = {column.this.name.lower(): column for column in found}
        outer = {id(item.unalias()): item.alias_or_name for item in select.expressions}
        if len(found) != len(columns) or any(id(column) not in outer for column in found):
            return None
        try:
            window_ms, slide_ms = duration_ms(length), duration_ms(slide)
        except ValueError:
            return None
        pattern = rf",\s*(['\"]){re.escape(length)}\1\s*,\s*(['\"]){re.escape(slide)}\2\s*\)"
        sql, replaced = re.subn(pattern, f", '{math.gcd(window_ms, slide_ms)} milliseconds')", text)
        names = {name: outer[id(column)] for name, column in columns.items()}
        if replaced != 1 or not 0 < slide_ms < window_ms or names.get("start") != WINDOW_START:
            return None
        return cls(sql, window_ms, slide_ms, names.get("end"))
