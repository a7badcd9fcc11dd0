"""Products whose rows are rows of their input: the latest of each key, and a uniform sample of each window."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import LATEST, Fold
from lakehouse.contract.sql.spark import line_of
from lakehouse.errors import BadProduct
from lakehouse.operators.base import (
    WINDOW_END,
    WINDOW_START,
    Operator,
    check_names,
    codes,
    in_time,
    input_sql,
    spread_and_merged,
    windowed,
)
from lakehouse.operators.sql import parse

TIE = "tie"  # the column with the hash
_MOST = 500_000  # rows that are made at once
_ID, _PRIORITY, _SEEN = "event_id", "priority", "seen"
_MULTIPLIES = (exp.Lateral, exp.Explode, exp.Inline, exp.Unnest, exp.SetOperation)
_GENERATORS = {"inline", "inline_outer", "explode_outer", "posexplode", "posexplode_outer", "stack", "json_tuple"}


class Latest(Operator):
    """One row a key: the columns of the input, and ``tie``. The system of record.

    Of two rows with the same key and version the one with the greater 64-bit hash of its columns is kept: an arbitrary
    choice, but the same in every order, in every replay and after any repetition. Taking the maximum is associative,
    commutative and idempotent. A deletion is a row like any other, with a column of the user's own that says so.

    For many keys store it with ``storage = "append"``: a batch adds its own keys' latest rows, and readers and
    maintenance fold them (lakehouse.contract.rows). ``upsert`` rewrites the table with each batch: for small ones.
    """

    def __init__(self, product: Product) -> None:
        self._product = product
        self.key: tuple[str, ...] = product.by
        self.order: tuple[str, ...] = (product.version, TIE)

    def partial_sql(self) -> str:
        key = ", ".join(f"`{name}`" for name in self.key)
        version = f"`{self._product.version}`"
        there = " AND ".join(f"`{name}` IS NOT NULL" for name in (*self.key, self._product.version))
        rows = f"SELECT *, xxhash64(*) AS {TIE} FROM ({input_sql(self._product)}) WHERE {there}"  # noqa: S608 - a checked pipeline
        best = f"max_by(struct(*), struct({version}, {TIE})) AS millrace_latest"
        return f"SELECT inline(array(millrace_latest)) FROM (SELECT {best} FROM ({rows}) GROUP BY {key})"  # noqa: S608

    def describe(self, partial: pa.Schema) -> None:
        if absent := [name for name in (*self.key, self._product.version) if name not in partial.names]:
            raise BadProduct(self._product.name, f"its SQL has no column {absent[0]}", "Select it, or name another")
        if partial.names.count(TIE) > 1:
            raise BadProduct(self._product.name, f"its SQL has a column {TIE!r}", f"Call it otherwise: … AS {TIE}_of")
        super().describe(partial)
        self.fold = {name: LATEST for name in partial.names if name not in self.key}

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        return Fold(self.key, self.fold, self.order).arrow(self._stacked(old, partial))


class Reservoir(Operator):
    """``n`` rows a window, a uniform random sample: the columns of the input, and ``priority``.

    The priority of an event is SHA-256 of the product's seed and the event's id; the ``n`` smallest of a window are its
    sample (bottom-k, Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). All events are as likely
    to be drawn, without replacement. Unlike Vitter's reservoir, the draw does not depend on the order or the batches
    they come in: a replay draws the same.

    ``seen``, in the row of the smallest priority, is the number of events that the sample is drawn from.
    """

    unit = (WINDOW_START,)

    def __init__(self, product: Product) -> None:
        self._product = product
        self._group = [WINDOW_START, *product.by]
        self.key: tuple[str, ...] = (*self._group, _ID)
        _check(product)

    def partial_sql(self) -> str:
        by = ", ".join(f"`{name}`" for name in self._product.by)
        others = f"* EXCEPT ({by})" if by else "*"
        drawn = f"min_by(struct({others}), {_PRIORITY}, {self._product.n}) AS millrace_drawn, count(*) AS {_SEEN}"
        columns = ", ".join([WINDOW_START, WINDOW_END, *([by] if by else []), _SEEN])
        priority = f"substr(sha2(concat({self._product.seed}, ':', `{_ID}`), 256), 1, 32) AS {_PRIORITY}"
        drawable = f"SELECT *, {priority} FROM ({input_sql(self._product)})"  # noqa: S608 - a checked pipeline
        inner = windowed(self._product, drawn, where=f"`{_ID}` IS NOT NULL", source=drawable)
        return f"SELECT {columns}, inline(millrace_drawn) FROM ({inner})"  # noqa: S608 - a checked pipeline

    def describe(self, partial: pa.Schema) -> None:
        check_names(self._product, partial.names)
        super().describe(partial)

    def prepare(self, partial: pa.Table) -> pa.Table:
        # Spark says `seen` in each row of a pane; it counts once.
        first = np.zeros(partial.num_rows, bool)
        first[np.unique(codes(partial, self._group), return_index=True)[1]] = True
        seen = pc.if_else(pa.array(first), partial[_SEEN], pa.scalar(None, pa.int64()))
        rows = partial.set_column(partial.schema.get_field_index(_SEEN), _SEEN, seen)
        if not self._product.slide:
            return rows
        return spread_and_merged(rows, self._product.window_ms, self._product.slide_ms, self.merge, most=_MOST)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        rows = self._stacked(old, partial).combine_chunks()
        groups = codes(rows, self._group)
        seen = np.zeros(len(groups), np.int64)
        np.add.at(seen, groups, rows[_SEEN].fill_null(0).to_numpy())
        by_priority = pa.table({"group": groups, _PRIORITY: rows[_PRIORITY]})
        order = pc.sort_indices(by_priority, [("group", "ascending"), (_PRIORITY, "ascending")]).to_numpy()
        groups = groups[order]
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else groups
        place = np.arange(len(groups)) - np.repeat(first, np.diff(np.r_[first, len(groups)]))
        drawn = place < self._product.n
        found = rows.take(pa.array(order[drawn]))
        totals = pa.array(seen[groups[drawn]], mask=place[drawn] != 0)
        return found.set_column(found.schema.get_field_index(_SEEN), rows.schema.field(_SEEN), totals)


def _check(product: Product) -> None:
    """Refuse input that is not one row an event, each with its id."""
    tree = parse(product)
    many = next(iter(tree.find_all(*_MULTIPLIES)), None) or next(
        (call for call in tree.find_all(exp.Anonymous) if call.name.lower() in _GENERATORS), None
    )
    if many is not None:
        raise BadProduct(
            product.name,
            f"{many.sql(dialect='spark')} makes several rows of an event, and events are what is drawn",
            "Select one row an event",
            line=line_of(many),
        )
    named = {column.alias_or_name for column in tree.expressions} if isinstance(tree, exp.Select) else {"*"}
    if _ID not in named and "*" not in named:
        raise BadProduct(product.name, "it does not select event_id, by which events are drawn", "Select event_id")
    taken = {_PRIORITY, _SEEN, WINDOW_START, WINDOW_END} & named
    if taken:
        raise BadProduct(product.name, f"column {min(taken)} would stand for two things", "Rename it in the SQL")


ARRIVED = "arrived_at"
OWN = {"event_id": "event_id", "tenant": "tenant", ARRIVED: "bronze_at"}
"""Columns that each single event has beside those of its SELECT, and what they are called in a source."""


class EventRows(Operator):
    """Single events: the columns of a SELECT without GROUP BY, ``event_id``, ``tenant`` and ``arrived_at``.

    Rows are only added. ``arrived_at`` is the time of the bronze commit, which never goes back: so which events are the
    ``newest`` ones depends on bronze alone, and those of one commit stay or leave together.
    """

    key = ("event_id", "tenant")

    def __init__(self, product: Product) -> None:
        self._product = product
        tree = parse(product)
        source = tree.args.get("from_") or tree.args.get("from") if isinstance(tree, exp.Select) else None
        other = tree.find(exp.CTE, exp.Subquery, *_MULTIPLIES)
        if not isinstance(tree, exp.Select) or other or source is None or source.this.name != product.source:
            raise BadProduct(
                product.name,
                "single events are one SELECT … FROM its source WHERE …",
                "Leave out WITH, UNION, subqueries and what makes several rows of an event",
            )
        names = [column.alias_or_name for column in tree.selects]
        if any(column.is_star for column in tree.selects):
            raise BadProduct(product.name, "SELECT * takes in columns of the machinery", "Name the columns")
        for name in set(names) & OWN.keys():
            if tree.selects[names.index(name)].unalias() != exp.column(name) or name == ARRIVED:
                raise BadProduct(product.name, f"column {name} would stand for two things", "Rename it in the SQL")
        self._added = [f"`{column}` AS {name}" for name, column in OWN.items() if name not in names]

    def partial_sql(self) -> str:
        sql = self._product.sql
        end = sqlglot.tokenize(sql, dialect="spark")[0].end + 1  # behind SELECT
        added = ", ".join(self._added)
        return in_time(self._product, f"{sql[:end]} {added}, {sql[end:].strip().rstrip(';')}\n")

    def whole_sql(self) -> str:
        newest = f"SELECT *, rank() OVER (ORDER BY {ARRIVED} DESC) AS millrace_rank FROM ({self.partial_sql()})"  # noqa: S608 - a checked pipeline
        return f"SELECT * EXCEPT (millrace_rank) FROM ({newest}) WHERE millrace_rank <= {self._product.newest}"  # noqa: S608

    def describe(self, partial: pa.Schema) -> None:
        check_names(self._product, partial.names)
        super().describe(partial)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        rows = self._stacked(old, partial)
        if not rows.num_rows:
            return rows
        return rows.filter(pc.greater_equal(rows[ARRIVED], self.oldest(rows[ARRIVED])))

    def oldest(self, arrived: pa.ChunkedArray) -> pa.Scalar:
        """When the oldest event came that is kept, given when all came."""
        order = pc.sort_indices(arrived, sort_keys=[("", "descending")])
        return arrived[order[min(self._product.newest, len(arrived)) - 1].as_py()]
