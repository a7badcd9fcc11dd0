"""Windows that the events themselves begin and end: sessions, and windows of so many events."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import Fold
from lakehouse.errors import BadProduct
from lakehouse.operators.aggregate import fold_of
from lakehouse.operators.base import (
    EVENT_AT,
    TIMESTAMP,
    StatefulOperator,
    among,
    codes,
    in_bronze_order,
    in_time,
    input_sql,
    ordered_sql,
    plain_fields,
    plain_type,
    times,
)

START, END, EXPIRES, CLOSED = "session_start", "session_end", "expires_at", "closed"
LIST = "list"  # the fold of a column of lists: the greatest elements of all
NUMBER, FIRST, LAST, EVENTS, COMPLETE = "number", "first_at", "last_at", "events", "complete"
_SESSION = "_session"


class Sessions(StatefulOperator):
    """One row a session: ``by``, ``session_start``, ``session_end`` (its last event), ``closed``, aggregates.

    By the wall clock there is ``expires_at`` too.

    Events of one key that follow each other within a gap. A batch's events are put into partial sessions by Spark
    (``session_window``); a partial session and those that are held become one where they overlap when each is drawn out
    by the gap; an event that is just the gap later begins another. That is associative and commutative, so a late event
    goes into its session, and may make one of two. A session is closed when the newest event time so far is the gap, or
    more, behind its last event: a matter of events alone, so that a replay closes the same ones.
    """

    ends = END

    def __init__(self, product: Product) -> None:
        self._product = product
        self._aggregates = aggregates_of(product, lists=True)
        self._lists = [a.name for a in self._aggregates if a.fold == LIST]
        self._gap = product.gap_ms * 1000
        self._own = {EXPIRES: TIMESTAMP, CLOSED: pa.bool_()} if product.clock == "wall" else {CLOSED: pa.bool_()}
        self.key = (*product.by, START)
        self.counts = next((a.name for a in self._aggregates if a.sql.replace(" ", "").lower() == "count(*)"), None)

    def partial_sql(self) -> str:
        time, by = f"`{self._product.time}`", "".join(f"`{name}`, " for name in self._product.by)
        columns = "".join(f", {a.sql} AS `{a.name}`" for a in self._aggregates)
        return in_time(
            self._product,
            f"SELECT {by}min({time}) AS {START}, max({time}) AS {END}{columns} "  # noqa: S608 - a checked pipeline
            f"FROM ({input_sql(self._product)}) WHERE {time} IS NOT NULL "
            f"GROUP BY {by}session_window({time}, '{self._gap - 1} microseconds')",  # Spark's ends belong to it
        )

    def describe(self, partial: pa.Schema) -> None:
        fields = plain_fields(partial)
        at = partial.get_field_index(END) + 1
        self.schema = pa.schema([*fields[:at], *(pa.field(*own) for own in self._own.items()), *fields[at:]])

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        if CLOSED not in partial.schema.names:
            self.describe(partial.schema)
        schema = pa.schema([f for f in self.schema if f.name not in self._own])
        rows = partial.select(schema.names).cast(schema)
        untouched = schema.empty_table()
        if held is not None and held.num_rows:
            touched = among(held, rows, self._product.by)
            untouched = held.filter(pa.array(~touched)).select(schema.names)
            rows = pa.concat_tables([held.filter(pa.array(touched)).select(schema.names), rows])
        return self.at(pa.concat_tables([untouched, self._merged(rows)]), clock)

    def at(self, rows: pa.Table, clock: int | None) -> pa.Table:
        expires = times(rows[END]) + self._gap
        closed = np.zeros(len(expires), dtype=bool) if clock is None else expires <= clock
        own = {EXPIRES: pa.array(expires).cast(TIMESTAMP), CLOSED: pa.array(closed)}
        columns = [own[name] if name in own else rows[name] for name in self.schema.names]
        return pa.table(columns, self.schema.names).cast(self.schema)

    def _merged(self, rows: pa.Table) -> pa.Table:
        """Sessions of rows that are partial sessions."""
        starts, ends, keys = times(rows[START]), times(rows[END]), codes(rows, self._product.by)
        sessions = np.empty(rows.num_rows, dtype=np.int64)
        session, key, reach = -1, -1, 0
        for i in np.lexsort((ends, starts, keys)).tolist():
            if keys[i] != key or starts[i] >= reach:
                session, key, reach = session + 1, keys[i], ends[i] + self._gap
            sessions[i], reach = session, max(reach, ends[i] + self._gap)
        how = {START: "min", END: "max", **{a.name: a.fold for a in self._aggregates if a.fold != LIST}}
        numbered = rows.drop_columns(self._lists).append_column(_SESSION, pa.array(sessions))
        merged = Fold((_SESSION,), how).arrow(numbered)
        for name in self._lists:
            found = greatest(rows[name], sessions, self._product.n)
            merged = merged.append_column(name, found.take(merged[_SESSION].combine_chunks()))
        return merged.select(rows.schema.names)

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """Sessions are kept at hand for another gap after they closed: most of what is late comes in that time."""
        if clock is None:
            return np.ones(rows.num_rows, dtype=bool)
        return np.asarray(times(rows[END]) + 2 * self._gap > clock)

    def reach(self, partial: pa.Table, clock: int | None) -> int | None:
        if clock is None or not partial.num_rows:
            return None
        earliest = int(times(partial[START]).min()) - self._gap
        return earliest if earliest < clock - 2 * self._gap else None

    def called_back(self, rows: pa.Table, partial: pa.Table) -> npt.NDArray[np.bool_]:
        near = (times(rows[END]) > int(times(partial[START]).min()) - self._gap) & (
            times(rows[START]) < int(times(partial[END]).max()) + self._gap
        )
        return near & among(rows, partial, self._product.by)

    def comparable(self, rows: pa.Table, horizon: int) -> npt.NDArray[np.bool_]:
        """A session that begins within the gap behind the horizon may have lost its beginning."""
        return np.asarray(times(rows[START]) > horizon + self._gap)


class CountWindow(StatefulOperator):
    """One row a window: ``by``, ``number`` from 0, ``first_at``, ``last_at``, ``events``, ``complete``, aggregates.

    An event's window is its ordinal among the events of its key, in bronze's order, divided by the size. Bronze only
    grows, so an ordinal never changes, whenever and in whatever batch the event is counted.

    The newest window of a key is live. Events are numbered in the driver: a batch's rows go through it, and a build's.
    """

    ends = LAST

    def __init__(self, product: Product) -> None:
        self._product = product
        self._aggregates = aggregates_of(product)
        self._how = {FIRST: "min", LAST: "max", EVENTS: "sum", **{a.name: a.fold for a in self._aggregates}}
        self.key = (*product.by, NUMBER)
        self.counts = EVENTS

    def partial_sql(self) -> str:
        return ordered_sql(self._product, "".join(f", {a.row} AS `{a.name}`" for a in self._aggregates))

    def describe(self, partial: pa.Schema) -> None:
        by = [pa.field(name, plain_type(partial.field(name).type)) for name in self._product.by]
        own = [
            pa.field(NUMBER, pa.int64()),
            pa.field(FIRST, TIMESTAMP),
            pa.field(LAST, TIMESTAMP),
            pa.field(EVENTS, pa.int64()),
            pa.field(COMPLETE, pa.bool_()),
        ]
        values = [pa.field(a.name, _summed(partial.field(a.name).type, a.fold)) for a in self._aggregates]
        self.schema = pa.schema([*by, *own, *values])

    def advance(self, held: pa.Table | None, partial: pa.Table, clock: int | None) -> pa.Table:
        if COMPLETE in partial.schema.names:  # rows of the product itself: nothing to number
            return partial
        self.describe(partial.schema)
        held = self.schema.empty_table() if held is None else held.select(self.schema.names).cast(self.schema)
        rows = in_bronze_order(partial, tuple(a.name for a in self._aggregates))
        numbered = rows.select([*self._product.by, *(a.name for a in self._aggregates)])
        numbered = numbered.append_column(NUMBER, pa.array(self._numbers(held, rows)))
        at = pc.cast(rows[EVENT_AT], TIMESTAMP)
        numbered = numbered.append_column(FIRST, at).append_column(LAST, at)
        numbered = numbered.append_column(EVENTS, pa.array(np.ones(rows.num_rows, dtype=np.int64)))
        wanted = pa.schema([f for f in self.schema if f.name != COMPLETE])
        merged = Fold(self.key, self._how).arrow(
            pa.concat_tables([held.select(wanted.names), numbered.select(wanted.names).cast(wanted)])
        )
        complete = pc.equal(merged[EVENTS], self._product.size)
        return merged.append_column(COMPLETE, complete).select(self.schema.names).cast(self.schema)

    def _numbers(self, held: pa.Table, rows: pa.Table) -> npt.NDArray[np.int64]:
        """The window of each row, which are in bronze's order, behind the events that are held."""
        size, by = self._product.size, self._product.by
        before = np.asarray(pc.add(pc.multiply(held[NUMBER], size), held[EVENTS]).to_numpy(), dtype=np.int64)
        if by:
            schema = held.select(by).schema
            both = codes(pa.concat_tables([held.select(by), rows.select(by).cast(schema)]), by)
        else:
            both = np.zeros(held.num_rows + rows.num_rows, dtype=np.int64)
        known, keys = both[: held.num_rows], both[held.num_rows :]
        base = np.zeros(int(both.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(base, known, before)
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        begins = np.searchsorted(sorted_keys, sorted_keys, side="left")
        ordinal = np.empty(len(keys), dtype=np.int64)
        ordinal[order] = np.arange(len(keys)) - begins
        return np.asarray((base[keys] + ordinal) // size)

    def live(self, rows: pa.Table, clock: int | None) -> npt.NDArray[np.bool_]:
        """The newest window of each key."""
        keys = codes(rows, self._product.by)
        numbers = rows[NUMBER].to_numpy()
        newest = np.full(int(keys.max(initial=-1)) + 1, -1, dtype=np.int64)
        np.maximum.at(newest, keys, numbers)
        return np.asarray(numbers == newest[keys])


def _summed(kind: pa.DataType, how: str) -> pa.DataType:
    """What a column of this type is after folding, as Spark has it."""
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if how != "sum":
        return kind
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 10), kind.scale)
    return pa.float64()


@dataclass(frozen=True, slots=True)
class DeclaredAggregate:
    """One declared aggregate."""

    name: str
    sql: str
    row: str  # the same for a single row: folded over rows it gives what `sql` gives
    fold: str  # `sum`, `min` or `max`; of a list LIST


def greatest(lists: pa.ChunkedArray, groups: npt.NDArray[np.int64], most: int) -> pa.Array:
    """A list for each group, numbered from 0: the greatest elements of its lists, greatest first.

    Elements compare as in Spark's ``sort_array``: structs by their fields in turn, null before everything.
    """
    found: list[list[object]] = [[] for _ in range(int(groups.max(initial=-1)) + 1)]
    for group, elements in zip(groups.tolist(), lists.to_pylist(), strict=True):
        found[group] += elements or ()
    return pa.array([heapq.nlargest(most, elements, key=_order) for elements in found], lists.type)


def _order(value: object) -> tuple[bool, Any]:
    if isinstance(value, dict):
        return True, [_order(field) for field in value.values()]
    return value is not None, value


def aggregates_of(product: Product, *, lists: bool = False) -> tuple[DeclaredAggregate, ...]:
    """The product's aggregates.

    Args:
        lists: whether ``collect_list`` is one.

    Raises:
        BadProduct: one of them does not parse, or cannot be put together from parts.
    """
    return tuple(_declared(product, name, text, lists) for name, text in product.aggregates.items())


def _declared(product: Product, name: str, text: str, lists: bool) -> DeclaredAggregate:
    try:
        tree = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.ParseError as error:
        problem = f"aggregate {name} does not parse: {str(error).splitlines()[0]}"
        raise BadProduct(product.name, problem, key=f"aggregates.{name}") from None
    if lists and isinstance(tree, exp.ArrayAgg) and not list(tree.this.find_all(exp.AggFunc, exp.Query, exp.Window)):
        return DeclaredAggregate(name, f"slice(sort_array({text}, false), 1, {product.n})", "", LIST)
    fold = fold_of(tree)
    several = isinstance(tree, exp.Count) and tree.expressions
    if fold is None or several or list(tree.find_all(exp.AggFunc, exp.Query, exp.Window)) != [tree]:
        raise BadProduct(
            product.name,
            f"aggregate {name} ({text}) cannot be put together from parts",
            "Use one of count, count_if, sum, min and max; keep sums and counts and divide when reading",
            key=f"aggregates.{name}",
        )
    return DeclaredAggregate(name, text, _row(tree), fold)


def _row(tree: exp.Expr) -> str:
    argument: str = tree.this.sql(dialect="spark")
    if isinstance(tree, exp.CountIf):
        return f"CAST(if(coalesce({argument}, false), 1, 0) AS BIGINT)"
    if isinstance(tree, exp.Count):
        one = "1" if isinstance(tree.this, exp.Star) else f"if(({argument}) IS NULL, 0, 1)"
        return f"CAST({one} AS BIGINT)"
    return argument
