"""The contract of operators, and what they share: plain types, windows made of panes, bronze's order.

An operator says how Spark aggregates a product's events into partial rows, and merges partial rows in the driver.
Merging is associative and commutative, and merging nothing changes nothing. So any split of the events into batches, in
any order, gives the same rows.

A pane is as long as the greatest common divisor of a window's length and slide, so that each sliding window is a whole
number of panes (Li et al., "No pane, no gain", SIGMOD Record 2005). Spark aggregates panes, each event once; only the
few partial rows are then given to the many windows that they lie in.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct

WINDOW_START = "window_start"
WINDOW_END = "window_end"
TIMESTAMP = pa.timestamp("us", "UTC")
ORDER = ("bronze_at", "topic", "partition", "offset")
"""Bronze's order of events: these columns of a row, in turn."""
EVENT_AT = "_at"  # an event's time in rows of :func:`ordered_sql`

_SELECT = re.compile(r"\s*SELECT\b", re.IGNORECASE)


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
    schema: pa.Schema = None
    fold: Mapping[str, str] = MappingProxyType({})
    counts: str | None = None

    @abstractmethod
    def partial_sql(self) -> str:
        """Spark SQL over the source's view: one partial row a unit (or a key) of a batch."""

    def whole_sql(self) -> str:
        """The same over all events of a source at once: it may leave out rows that :meth:`merge` would."""
        return self.partial_sql()

    def describe(self, partial: pa.Schema) -> None:
        """Learn the types that Spark gives the columns of :meth:`partial_sql`."""
        self.schema = pa.schema(plain_fields(partial))

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
        tables = [table.select(self.schema.names).cast(self.schema) for table in (old, partial) if table is not None]
        return pa.concat_tables(tables)

    def agrees(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether two different results of the same events can both be true.

        Only where rows depend, within the errors that they state, on how the events fell into batches.
        """
        return False


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


# --- rows


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


def among(rows: pa.Table, others: pa.Table, columns: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """Which of ``rows`` are equal in ``columns`` to one of ``others``; without columns all are, if there is one."""
    if not columns:
        return np.full(rows.num_rows, others.num_rows > 0)
    both = pa.concat_tables([rows.select(columns), others.select(columns).cast(rows.select(columns).schema)])
    numbers = codes(both, columns)
    return np.asarray(np.isin(numbers[: rows.num_rows], numbers[rows.num_rows :]))


def times(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.int64]:
    """Timestamps as microseconds since the epoch."""
    micros = pc.cast(pc.cast(column, TIMESTAMP), pa.int64())
    return np.asarray(micros.to_numpy(zero_copy_only=False), dtype=np.int64)


def in_bronze_order(rows: pa.Table, ties: tuple[str, ...] = ()) -> pa.Table:
    """Rows of :func:`ordered_sql` in bronze's order; rows of one event by ``ties``."""
    return rows.sort_by([(f"_{name}", "ascending") for name in ORDER] + [(name, "ascending") for name in ties])


def check_names(product: Product, names: Sequence[str]) -> None:
    """Refuse a product with two columns of the same name. Raises BadProduct: it has."""
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise BadProduct(
            product.name, f"column {twice} would stand for two things", "Rename the product or the column in its SQL"
        )


# --- SQL


def input_sql(product: Product) -> str:
    """The rows that the operator takes in: the product's SQL, or all events of its source."""
    return product.sql.strip().rstrip(";") or f"SELECT * FROM `{product.source}`"  # noqa: S608 - a checked pipeline


def ordered_sql(product: Product, values: str, where: str = "") -> str:
    """Spark SQL of the rows that :func:`in_bronze_order` sorts: ``by``, :data:`EVENT_AT`, ``values``, bronze's order.

    Args:
        values: columns to select, each behind a comma.
        where: further conditions, each behind ``AND``; rows without a time are left out.

    Raises:
        BadProduct: the product's SQL is not one plain SELECT from the source.
    """
    text = input_sql(product)
    if len(re.findall(r"\bSELECT\b", text, re.IGNORECASE)) != 1 or not _SELECT.match(text):
        raise BadProduct(
            product.name,
            f"{product.operator} needs bronze's order, so its SQL must be one plain SELECT from the source",
        )
    added = ", ".join(f"`{name}` AS `_{name}`" for name in ORDER)
    rows = _SELECT.sub(f"SELECT {added},", text, count=1)
    by = "".join(f"`{name}`, " for name in product.by)
    order = ", ".join(f"`_{name}`" for name in ORDER)
    return in_time(
        product,
        f"SELECT {by}`{product.time}` AS {EVENT_AT}{values}, {order} "  # noqa: S608 - a checked pipeline
        f"FROM ({rows}) WHERE `{product.time}` IS NOT NULL{where}",
    )


def windowed(product: Product, columns: str, *, where: str = "", group: Sequence[str] = (), source: str = "") -> str:
    """Spark SQL that aggregates the product's input over its panes and groups.

    Args:
        columns: what to select beside the window's bounds and the groups.
        where: condition on the input; by default the item is not null.
        source: what to select from; by default the product's input.
    """
    pane = math.gcd(product.window_ms, product.slide_ms)
    by = [f"`{name}`" for name in product.by]
    select = ", ".join([f"window.start AS {WINDOW_START}", f"window.end AS {WINDOW_END}", *by, columns])
    grouped = ", ".join([f"window(`{product.time}`, '{pane} milliseconds')", *by, *group])
    return in_time(
        product,
        f"SELECT {select} FROM ({source or input_sql(product)}) "  # noqa: S608 - a checked pipeline
        f"WHERE {where or f'`{product.item}` IS NOT NULL'} GROUP BY {grouped}",
    )


def in_time(product: Product, sql: str) -> str:
    """The query over events that arrived within the product's lateness, if it has one; ``skew`` counts the others."""
    if product.lateness_ms is None or product.operator == "skew":
        return sql
    # Within its own definition the name still means the source's view.
    return (
        f"WITH `{product.source}` AS (SELECT * FROM `{product.source}` "  # noqa: S608 - a checked pipeline
        f"WHERE unix_millis(received_at) - unix_millis(event_time) <= {product.lateness_ms}) SELECT * FROM ({sql})"
    )


# --- sliding windows


def spread(panes: pa.Table, window_ms: int, slide_ms: int, *, end: str | None = WINDOW_END) -> pa.Table:
    """The rows of panes, each once for every sliding window that the pane lies in.

    Args:
        panes: rows with a pane's start in the column ``window_start``, which becomes the window's.
        slide_ms: between the starts of two windows, which are multiples of it since the epoch, as Spark's are.
        end: column that gets the window's end; None: there is none.
    """
    begins = panes[WINDOW_START].cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    window, slide = window_ms * 1_000, slide_ms * 1_000
    back = np.arange(math.ceil(window / slide), dtype=np.int64) * slide
    starts = (begins // slide * slide)[:, None] - back[None, :]
    row, column = np.nonzero(starts + window > begins[:, None])
    windows = starts[row, column]
    rows = panes.take(pa.array(row))
    columns = {name: rows[name] for name in rows.schema.names}
    columns[WINDOW_START] = pa.array(windows).cast(TIMESTAMP)
    if end is not None:
        columns[end] = pa.array(windows + window).cast(TIMESTAMP)
    return pa.table(columns)


def spread_and_merged(
    panes: pa.Table,
    window_ms: int,
    slide_ms: int,
    merge: Callable[[pa.Table | None, pa.Table], pa.Table],
    *,
    most: int,
    end: str | None = WINDOW_END,
) -> pa.Table:
    """The same in bounded memory: of many panes, as a build from bronze has, the windows' rows are merged in between.

    Args:
        merge: merges rows of windows into those there are; takes None for none.
        most: rows that are made at once.
    """
    step = max(1, most // math.ceil(window_ms / slide_ms))
    if panes.num_rows <= step:
        return spread(panes, window_ms, slide_ms, end=end)
    panes = panes.sort_by(WINDOW_START)
    rows: pa.Table | None = None
    for at in range(0, panes.num_rows, step):
        rows = merge(rows, spread(panes.slice(at, step), window_ms, slide_ms, end=end))
    return rows
