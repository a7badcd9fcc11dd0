"""The contract of operators whose rows are a state that later events go on from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import TIMESTAMP, Operator

ORDER = ("bronze_at", "topic", "partition", "offset")
"""Bronze's order of events: these columns of a row, in turn."""

_SELECT = re.compile(r"\s*SELECT\b", re.IGNORECASE)


class Keeps(Operator, Protocol):
    """An operator whose table holds rows that are *live* (a later event may change them) and rows that are *settled*.

    Live rows are few, and the store has them in memory. Settled rows stay as they are in files of their own, except
    that :meth:`reach` may call some back for an event that came very late.

    Attributes:
        ends: timestamp column by which a row's age is told, for retention and for finding settled rows.
    """

    ends: str

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        """The rows that ``held`` become.

        Args:
            held: rows of the product's schema: all that are live, and any others.
            partial: what :meth:`partial_sql` gave for a batch.
            clock: newest event time so far, this batch included, in microseconds since the epoch.
        """

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """Which of the product's rows are live at ``clock``, given all of them or all that were live before."""

    def reach(self, partial: pa.Table, clock: int | None) -> int | None:
        """Microseconds since the epoch: settled rows whose :attr:`ends` is later may have to be called back.

        None where all rows that the batch can change are live still. ``clock`` is that of the batch before.
        """

    def called_back(self, rows: pa.Table, partial: pa.Table) -> npt.NDArray[np.bool_]:
        """Which settled rows the batch may change."""

    def comparable(self, rows: pa.Table, horizon: int) -> npt.NDArray[np.bool_]:
        """Rows that are certain to be whole although everything that ended before ``horizon`` may be gone."""


def stateful_operator(product: Product) -> Operator:
    """The operator of a product whose ``operator`` is one of :data:`~lakehouse.contract.pipeline.product.STATEFUL`.

    Raises:
        BadProduct: its SQL or its aggregates are not of a kind that can be kept.
    """
    from lakehouse.stateful.count_window import CountWindow
    from lakehouse.stateful.drift import Drift
    from lakehouse.stateful.join import Join
    from lakehouse.stateful.sessions import Sessions

    kinds: dict[str, Callable[[Product], Operator]] = {
        "sessions": Sessions,
        "count_window": CountWindow,
        "drift": Drift,
        "join": Join,
    }
    return kinds[product.operator](product)


def keeps(operator: Operator) -> bool:
    """Whether an operator is one of :class:`Keeps`."""
    return hasattr(operator, "advance")


def input_sql(product: Product) -> str:
    """The rows that the operator takes in: the product's SQL, or all events of its source."""
    return product.sql.strip().rstrip(";") or f"SELECT * FROM `{product.source}`"  # noqa: S608 - a checked pipeline


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


def codes(rows: pa.Table, columns: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """A number for each row, equal for rows that are equal in ``columns``; null is equal to null."""
    found = np.zeros(rows.num_rows, dtype=np.int64)
    for name in columns:
        one = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        one = one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one
        found = found * (len(one.dictionary) + 1) + one.indices.to_numpy(zero_copy_only=False)
        found = np.unique(found, return_inverse=True)[1].astype(np.int64)  # small again, whatever comes next
    return found


def among(rows: pa.Table, others: pa.Table, columns: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which of ``rows`` are equal in ``columns`` to one of ``others``; without columns all are, where there is one."""
    if not columns:
        return np.full(rows.num_rows, others.num_rows > 0)
    both = pa.concat_tables([rows.select(columns), others.select(columns).cast(rows.select(columns).schema)])
    numbers = codes(both, columns)
    return np.asarray(np.isin(numbers[: rows.num_rows], numbers[rows.num_rows :]))


def in_bronze_order(rows: pa.Table, ties: tuple[str, ...] = ()) -> pa.Table:
    """Rows of :func:`ordered_input` in bronze's order; rows of one event by ``ties``."""
    return rows.sort_by([(f"_{name}", "ascending") for name in ORDER] + [(name, "ascending") for name in ties])
