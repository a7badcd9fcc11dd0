"""A product that is one Spark SQL aggregate query: which of its columns are keys, and how the others merge.

Read from the query's own text (sqlglot), so that a pipeline declares nothing twice. ``count``, ``count_if``, ``sum``,
``min`` and ``max`` merge; an average is refused with the pair of columns to keep instead.
"""

from __future__ import annotations

import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import Fold
from lakehouse.contract.sql.spark import line_of
from lakehouse.errors import BadProduct
from lakehouse.operators.base import WINDOW_START, Operator, plain_fields
from lakehouse.operators.sql import WINDOW, check_rows, parse
from lakehouse.operators.windows import Sliding, in_time, slides

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
        self.counts = counts if product.lateness_ms is None and not slides(select) else None

    def partial_sql(self) -> str:
        sql = self._sliding.sql if self._sliding else self._product.sql
        return in_time(self._product, sql.strip().rstrip(";"))

    def describe(self, partial: pa.Schema) -> None:
        self.schema = pa.schema(plain_fields(partial))
        if self.unit and not pa.types.is_timestamp(self.schema.field(WINDOW_START).type):
            self.unit = ()  # a column of that name which is no time

    def prepare(self, partial: pa.Table) -> pa.Table:
        return self._sliding.spread(partial, self.merge) if self._sliding else partial

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        self.describe(partial.schema)
        return Fold(self.key, self.fold).arrow(self._stacked(old, partial))


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


def _is_window(e: exp.Expression) -> bool:
    return isinstance(e, exp.Anonymous) and e.name.lower() == WINDOW


def _stands_for(grouped: exp.Expression, name: str, column: exp.Expression) -> bool:
    """Whether a column of the SELECT is what the GROUP BY names."""
    if _is_window(grouped):
        return isinstance(column, exp.Column) and column.table.lower() == "window"
    return grouped == column or (isinstance(grouped, exp.Column) and not grouped.table and grouped.name == name)


def _counts_all(column: exp.Expression) -> bool:
    inner = column.unalias()
    return isinstance(inner, exp.Count) and isinstance(inner.this, exp.Star)
