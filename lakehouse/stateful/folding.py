"""Aggregates over the rows of a session or window: what Spark computes, and how two of its results become one."""

from __future__ import annotations

from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct

_FOLDS: dict[type, str] = {exp.Count: "sum", exp.CountIf: "sum", exp.Sum: "sum", exp.Min: "min", exp.Max: "max"}


@dataclass(frozen=True, slots=True)
class Folded:
    """One declared aggregate.

    Attributes:
        name: the column.
        sql: the aggregate as declared.
        row: the same for a single row: folded over rows it gives what ``sql`` gives.
        fold: ``sum``, ``min`` or ``max``.
    """

    name: str
    sql: str
    row: str
    fold: str


def aggregates_of(product: Product) -> tuple[Folded, ...]:
    """The product's aggregates.

    Raises:
        BadProduct: one of them does not parse, or cannot be put together from parts.
    """
    return tuple(_folded(product, name, text) for name, text in product.aggregates.items())


def _folded(product: Product, name: str, text: str) -> Folded:
    try:
        tree = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        raise BadProduct(product.name, f"aggregate {name} does not parse: {str(error).splitlines()[0]}") from None
    fold = _FOLDS.get(type(tree))
    distinct = any(isinstance(argument, exp.Distinct) for argument in tree.iter_expressions())
    several = isinstance(tree, exp.Count) and tree.expressions
    if fold is None or distinct or several or list(tree.find_all(exp.AggFunc, exp.Query, exp.Window)) != [tree]:
        raise BadProduct(
            product.name,
            f"aggregate {name} ({text}) cannot be put together from parts",
            "Use one of count, count_if, sum, min and max; keep sums and counts and divide when reading",
        )
    return Folded(name, text, _row(tree), fold)


def _row(tree: exp.Expr) -> str:
    argument: str = tree.this.sql(dialect="spark")
    if isinstance(tree, exp.CountIf):
        return f"CAST(if(coalesce({argument}, false), 1, 0) AS BIGINT)"
    if isinstance(tree, exp.Count):
        one = "1" if isinstance(tree.this, exp.Star) else f"if(({argument}) IS NULL, 0, 1)"
        return f"CAST({one} AS BIGINT)"
    return argument
