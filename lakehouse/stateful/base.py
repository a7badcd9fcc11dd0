"""The contract of operators whose rows are a state that later events go on from."""

from __future__ import annotations

import re
from abc import abstractmethod

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import TIMESTAMP, Operator, codes
from lakehouse.operators.windows import input_sql

ORDER = ("bronze_at", "topic", "partition", "offset")
"""Bronze's order of events: these columns of a row, in turn."""

_SELECT = re.compile(r"\s*SELECT\b", re.IGNORECASE)


class StatefulOperator(Operator):
    """An operator whose table holds rows that are *live* (a later event may change them) and rows that are *settled*.

    Live rows are few, and the store has them in memory. Settled rows stay as they are in files of their own, except
    that :meth:`reach` may call some back for an event that came very late.

    Attributes:
        ends: timestamp column that tells a row's age, for retention and for finding settled rows.
    """

    ends: str

    @abstractmethod
    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        """The rows that ``held`` become.

        Args:
            held: rows of the product's schema: all that are live, and any others.
            partial: what :meth:`partial_sql` gave for a batch, or rows of the product.
            clock: newest event time so far, this batch included, in microseconds since the epoch.
        """

    def at(self, rows: pa.Table, clock: int | None) -> pa.Table:
        """The same rows at another time."""
        return rows

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """The rows after these events, while no time has passed."""
        return self.advance(old, partial, None)

    @abstractmethod
    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """Which of the product's rows are live at ``clock``, given all of them or all that were live before."""

    def reach(self, partial: pa.Table, clock: int | None) -> int | None:
        """Microseconds since the epoch: settled rows whose :attr:`ends` is later may have to be called back.

        None if all rows that the batch can change are live still. ``clock`` is that of the batch before.
        """
        return None

    def called_back(self, rows: pa.Table, partial: pa.Table) -> npt.NDArray[np.bool_]:
        """Which settled rows the batch may change."""
        return np.zeros(rows.num_rows, dtype=bool)

    def comparable(self, rows: pa.Table, horizon: int) -> npt.NDArray[np.bool_]:
        """Rows that are certain to be whole although everything that ended before ``horizon`` may be gone."""
        return np.asarray(times(rows[self.ends]) > horizon)


def ordered_input(product: Product) -> str:
    """The same with the columns of :data:`ORDER`, named ``_bronze_at`` and so on.

    Raises:
        BadProduct: the SQL is not one plain SELECT from the source.
    """
    text = input_sql(product)
    if len(re.findall(r"\bSELECT\b", text, re.IGNORECASE)) != 1 or not _SELECT.match(text):
        raise BadProduct(
            product.name,
            f"{product.operator} needs bronze's order, so its SQL must be one plain SELECT from the source",
        )
    added = ", ".join(f"`{name}` AS `_{name}`" for name in ORDER)
    return _SELECT.sub(f"SELECT {added},", text, count=1)


def times(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.int64]:
    """Timestamps as microseconds since the epoch."""
    micros = pc.cast(pc.cast(column, TIMESTAMP), pa.int64())
    return np.asarray(micros.to_numpy(zero_copy_only=False), dtype=np.int64)


def among(rows: pa.Table, others: pa.Table, columns: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which of ``rows`` are equal in ``columns`` to one of ``others``; without columns all are, if there is one."""
    if not columns:
        return np.full(rows.num_rows, others.num_rows > 0)
    both = pa.concat_tables([rows.select(columns), others.select(columns).cast(rows.select(columns).schema)])
    numbers = codes(both, columns)
    return np.asarray(np.isin(numbers[: rows.num_rows], numbers[rows.num_rows :]))


def in_bronze_order(rows: pa.Table, ties: tuple[str, ...] = ()) -> pa.Table:
    """Rows of :func:`ordered_input` in bronze's order; rows of one event by ``ties``."""
    return rows.sort_by([(f"_{name}", "ascending") for name in ORDER] + [(name, "ascending") for name in ties])
