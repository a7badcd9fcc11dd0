"""The contract of operators, and what they share.

An operator says how Spark aggregates a product's events into partial rows, and merges partial rows in the driver.
Merging is associative and commutative, and merging nothing changes nothing. So any split of the events into batches, in
any order, gives the same rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct

WINDOW_START = "window_start"
WINDOW_END = "window_end"
TIMESTAMP = pa.timestamp("us", "UTC")


class Operator(ABC):
    """A mergeable product.

    Attributes:
        key: columns that name one result row.
        unit: columns of the key whose values are rewritten together (a window holds several ranks).
        schema: columns of the product's table; None until :meth:`describe` was told what Spark makes of the SQL.
        fold: for products stored as partials, column to ``sum``, ``min`` or ``max``; empty for others.
        counts: column that sums to the number of events held, or None if the product does not know it.
    """

    key: tuple[str, ...]
    unit: tuple[str, ...] = ()
    schema: pa.Schema | None = None
    fold: Mapping[str, str] = MappingProxyType({})
    counts: str | None = None

    @abstractmethod
    def partial_sql(self) -> str:
        """Spark SQL over the source's view: one partial row a unit (or a key) of a batch."""

    def whole_sql(self) -> str:
        """The same over all events of a source at once: it may leave out rows that :meth:`merge` would."""
        return self.partial_sql()

    @abstractmethod
    def describe(self, partial: pa.Schema) -> None:
        """Learn the types that Spark gives the columns of :meth:`partial_sql`."""

    def prepare(self, partial: pa.Table) -> pa.Table:
        """Rows that :meth:`merge` takes, made of what Spark gave for a batch: sketches of counts, windows of panes.

        The operator must have been told their schema.
        """
        return partial

    @abstractmethod
    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """The rows of every unit in ``partial``, with the rows that the product holds of them now.

        Args:
            old: rows of the product's schema, of just these units; None if there are none.
            partial: what :meth:`prepare` gave for a batch.
        """

    def _stacked(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """Both as one table of the product's schema."""
        assert self.schema is not None, "describe() comes first"
        tables = [table.select(self.schema.names).cast(self.schema) for table in (old, partial) if table is not None]
        return pa.concat_tables(tables)

    def agrees(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether two different results of the same events can both be true.

        Only where rows depend, within the errors that they state, on how the events fell into batches.
        """
        return False


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that the Delta table holds: timestamps in microseconds, UTC, and everything nullable.

    Spark knows of some columns that they hold no nulls; which, depends on how a query was planned.
    """
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct(plain_fields(kind))
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    return kind


def plain_fields(fields: pa.Schema | pa.StructType) -> list[pa.Field]:
    """The fields with their plain types."""
    return [pa.field(field.name, plain_type(field.type)) for field in fields]


def plain(rows: pa.Table) -> pa.Table:
    """Rows with all columns of plain types; Spark gives timestamps in the session's zone."""
    return rows.cast(pa.schema(plain_fields(rows.schema)))


def codes(rows: pa.Table, columns: Sequence[str]) -> npt.NDArray[np.int64]:
    """A number from 0 for each row, equal for rows that are equal in ``columns``; null is equal to null."""
    found = np.zeros(rows.num_rows, dtype=np.int64)
    for name in columns:
        one = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        one = one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one
        found = found * max(1, len(one.dictionary)) + one.indices.to_numpy(zero_copy_only=False)
        found = np.unique(found, return_inverse=True)[1].astype(np.int64)  # small again, whatever comes next
    return found


def check_names(product: Product, names: Sequence[str]) -> None:
    """Refuse a product with two columns of the same name. Raises BadProduct: it has."""
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise BadProduct(
            product.name, f"column {twice} would stand for two things", "Rename the product or the column in its SQL"
        )
