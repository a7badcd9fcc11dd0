"""What the SQL of a product may be: each of its rows must come from one event, whatever the batch it arrived in."""

from __future__ import annotations

import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.sql.spark import WINDOW, line_of, spark_text
from lakehouse.errors import BadProduct

__all__ = ["WINDOW", "check_rows", "parse", "tree_of"]

_SEES_OTHER_ROWS = (exp.Join, exp.Window, exp.Except, exp.Intersect)
_CLAUSES = ("distinct", "group", "having", "limit", "order")


def parse(product: Product) -> exp.Expr:
    """The product's SQL as a tree. Raises BadProduct: it does not parse."""
    try:
        return tree_of(product.sql)
    except sqlglot.errors.ParseError as error:
        raise BadProduct(product.name, f"its SQL does not parse: {str(error).splitlines()[0]}") from None


def tree_of(sql: str) -> exp.Expr:
    """A query in Spark's dialect as a tree."""
    return sqlglot.parse_one(spark_text(sql), dialect="spark")


def check_rows(tree: exp.Expr, product: Product, *, aggregated: exp.Select | None = None) -> None:
    """Refuse what looks at several events at once, other than the aggregation ``aggregated``.

    Raises:
        BadProduct: a batch's result would depend on which events share the batch.
    """
    bad = next(iter(tree.find_all(*_SEES_OTHER_ROWS)), None) or next(
        (union for union in tree.find_all(exp.Union) if union.args.get("distinct")), None
    )
    if bad is None:
        bad = next(
            (
                select
                for select in tree.find_all(exp.Select)
                if select is not aggregated
                and (any(select.args.get(clause) for clause in _CLAUSES) or select.find(exp.AggFunc))
            ),
            None,
        )
    if bad is not None:
        text = bad.sql(dialect="spark").replace(WINDOW, "window")
        raise BadProduct(
            product.name,
            f"it looks at several events at once ({text if len(text) < 60 else text[:60] + ' …'})",
            "Select from the source row by row; joins, DISTINCT, nested aggregates and window functions do not merge",
            line=line_of(bad),
        )
