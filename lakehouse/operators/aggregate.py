"""A product that is one Spark SQL aggregate query: which of its columns are keys, and how the others merge.

Read from the query's own text (sqlglot), so that a pipeline declares nothing twice. ``count``, ``count_if``, ``sum``,
``min`` and ``max`` merge; an average is refused with the pair of columns to keep instead.
"""

from __future__ import annotations

import re

import pyarrow as pa
import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import WINDOW_START

_MERGES: dict[type, str] = {
    exp.Count: "sum",
    exp.CountIf: "sum",
    exp.Sum: "sum",
    exp.Min: "min",
    exp.Max: "max",
}


class Aggregate:
    """Rows of a ``GROUP BY``."""

    def __init__(self, product: Product) -> None:
        self._product = product
        select = _parse(product)
        self.fold: dict[str, str] = {}
        keys: list[str] = []
        for column in select.expressions:
            merge = _merge_of(column, product)
            if merge:
                self.fold[column.alias_or_name] = merge
            else:
                keys.append(column.alias_or_name)
        self.key: tuple[str, ...] = tuple(keys)
        self.unit: tuple[str, ...] = (WINDOW_START,) if WINDOW_START in keys else ()
        self.counts = next((c.alias_or_name for c in select.expressions if _counts_all(c)), None)
        self.schema: pa.Schema | None = None

    def partial_sql(self) -> str:
        return self._product.sql.strip().rstrip(";")

    def describe(self, partial: pa.Schema) -> None:
        self.schema = pa.schema([pa.field(field.name, _plain(field.type)) for field in partial])

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        self.describe(partial.schema)
        assert self.schema is not None
        tables = [table.select(self.schema.names).cast(self.schema) for table in (old, partial) if table is not None]
        rows = pa.concat_tables(tables)
        merged = rows.group_by(list(self.key)).aggregate(list(self.fold.items()))
        names = [*self.key, *self.fold]
        by_name = {name: merged[name if name in self.key else f"{name}_{self.fold[name]}"] for name in names}
        return pa.table({name: by_name[name] for name in self.schema.names}).cast(self.schema)


def _parse(product: Product) -> exp.Select:
    # sqlglot takes a leading `window` in GROUP BY for the WINDOW clause; any other name serves to look at the columns.
    text = re.sub(r"\bwindow(?=\s*\()", "window_of", product.sql, flags=re.IGNORECASE)
    try:
        tree = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise BadProduct(product.name, f"its SQL does not parse: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, exp.Select) or tree.args.get("group") is None:
        raise BadProduct(product.name, "its SQL is not one SELECT … GROUP BY", "Use an operator for anything else")
    if tree.args.get("having") or tree.args.get("limit") or tree.args.get("order") or tree.args.get("distinct"):
        raise BadProduct(
            product.name, "HAVING, DISTINCT, ORDER BY and LIMIT cannot be kept up to date", "Apply them when reading"
        )
    unnamed = [column.sql() for column in tree.expressions if not column.alias_or_name]
    if unnamed:
        raise BadProduct(product.name, f"column {unnamed[0]} has no name", "Add AS name")
    return tree


def _merge_of(column: exp.Expression, product: Product) -> str | None:
    """How the column's partial values merge, or None for a key."""
    inner = column.unalias()
    if not inner.find(exp.AggFunc):
        return None
    merge = _MERGES.get(type(inner))
    if merge is None or any(isinstance(argument, exp.Distinct) for argument in inner.iter_expressions()):
        raise BadProduct(
            product.name,
            f"column {column.alias_or_name} ({inner.sql(dialect='spark')}) cannot be merged from partial results",
            "Keep sums and counts and divide when reading; use operator = 'distinct' for distinct counts",
        )
    return merge


def _counts_all(column: exp.Expression) -> bool:
    inner = column.unalias()
    return isinstance(inner, exp.Count) and isinstance(inner.this, exp.Star)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that the Delta table holds: timestamps in microseconds, UTC."""
    return pa.timestamp("us", "UTC") if pa.types.is_timestamp(kind) else kind
