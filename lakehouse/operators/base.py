"""The contract of an operator."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from lakehouse.contract.pipeline import Product

WINDOW_START = "window_start"
WINDOW_END = "window_end"
TIMESTAMP = pa.timestamp("us", "UTC")


class Operator(Protocol):
    """A mergeable product.

    Attributes:
        key: columns that name one result row.
        unit: columns of the key whose values are rewritten together (a window holds several ranks).
        schema: columns of the product's table; None until :meth:`describe` was told what Spark makes of the SQL.
        fold: for products stored as partials, column to ``sum``, ``min`` or ``max``; empty otherwise.
        counts: column that sums to the number of events held, or None where the product does not know it.
    """

    key: tuple[str, ...]
    unit: tuple[str, ...]
    schema: pa.Schema | None
    fold: dict[str, str]
    counts: str | None

    def partial_sql(self) -> str:
        """Spark SQL over the source's view: one partial row a unit (or a key) of a batch."""

    def describe(self, partial: pa.Schema) -> None:
        """Learn the types that Spark gives the columns of :meth:`partial_sql`."""

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """The rows of every unit in ``partial``, with the rows that the product holds of them now.

        Args:
            old: rows of the product's schema, of just these units; None where there are none.
            partial: what :meth:`partial_sql` gave for a batch.
        """


def operator_of(product: Product) -> Operator:
    """The operator that keeps this product.

    Raises:
        BadProduct: its SQL is not of a kind that can be merged.
    """
    from lakehouse.operators.aggregate import Aggregate
    from lakehouse.operators.distinct import Distinct
    from lakehouse.operators.sql import check_rows, parse
    from lakehouse.operators.top_n import TopN

    if product.operator:
        check_rows(parse(product), product)
    if product.operator == "top_n":
        return TopN(product)
    if product.operator == "distinct":
        return Distinct(product)
    return Aggregate(product)


def windowed(product: Product, columns: str) -> str:
    """Spark SQL that aggregates the product's input over its tumbling windows."""
    return (
        f"SELECT window.start AS {WINDOW_START}, window.end AS {WINDOW_END}, {columns} "  # noqa: S608 - a checked pipeline
        f"FROM ({product.sql.strip().rstrip(';')}) "
        f"WHERE `{product.item}` IS NOT NULL "
        f"GROUP BY window(`{product.time}`, '{product.window_ms} milliseconds')"
    )
