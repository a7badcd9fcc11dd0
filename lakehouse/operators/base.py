"""The contract of an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import STATEFUL

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
            partial: what :meth:`partial_sql` gave for a batch, after :func:`prepared`.
        """


@runtime_checkable
class Prepares(Protocol):
    """An operator whose partial rows are not yet what merges: counts to be put in a sketch, panes of a window."""

    def prepare(self, partial: pa.Table) -> pa.Table:
        """Rows that :meth:`Operator.merge` takes, of what Spark gave for a batch."""


@runtime_checkable
class Estimates(Protocol):
    """An operator whose rows depend, within the errors that they state, on how the events fell into batches."""

    def agrees(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether two results of the same events can both be true."""


def prepared(operator: Operator, partial: pa.Table) -> pa.Table:
    """Partial rows as they merge; the operator must have been told their schema."""
    return operator.prepare(partial) if isinstance(operator, Prepares) and partial.num_rows else partial


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that the Delta table holds: timestamps in microseconds, UTC, and everything nullable.

    Spark knows of some columns that they hold no nulls; which, depends on how a query was planned.
    """
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return kind


def plain(rows: pa.Table) -> pa.Table:
    """Rows with all columns of plain types; Spark gives timestamps in the session's zone."""
    return rows.cast(pa.schema([pa.field(field.name, plain_type(field.type)) for field in rows.schema]))


def operator_of(product: Product) -> Operator:
    """The operator that keeps this product.

    Raises:
        BadProduct: its SQL is not of a kind that can be merged.
    """
    if product.operator in STATEFUL:
        from lakehouse.stateful.base import stateful_operator

        return stateful_operator(product)
    from lakehouse.operators.aggregate import Aggregate
    from lakehouse.operators.distinct import Distinct
    from lakehouse.operators.frequency import Frequency
    from lakehouse.operators.latest import Latest
    from lakehouse.operators.membership import Membership
    from lakehouse.operators.quantiles import Quantiles
    from lakehouse.operators.reservoir import Reservoir
    from lakehouse.operators.skew import Skew
    from lakehouse.operators.sql import check_rows, parse
    from lakehouse.operators.top_n import TopN

    operators: dict[str, Callable[[Product], Operator]] = {
        "": Aggregate,
        "top_n": TopN,
        "distinct": Distinct,
        "frequency": Frequency,
        "membership": Membership,
        "quantiles": Quantiles,
        "reservoir": Reservoir,
        "skew": Skew,
        "latest": Latest,
    }
    if product.operator:
        check_rows(parse(product), product)
    return operators[product.operator](product)
