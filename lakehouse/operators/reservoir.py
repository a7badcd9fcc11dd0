"""A uniform random sample of the events of a window.

Each event gets a priority, SHA-256 of the product's seed and the event's id; the ``n`` smallest of a window are its
sample (bottom-k, Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007). All events are as likely to
be drawn, without replacement; and unlike Vitter's reservoir, the draw does not depend on the order or the batches they
come in: a replay draws the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import WINDOW_END, WINDOW_START, plain_type
from lakehouse.operators.grouped import check_names
from lakehouse.operators.sql import parse
from lakehouse.operators.windows import input_sql, spread_and_merged, windowed

_MOST = 500_000  # rows that are made at once
_ID, _PRIORITY, _SEEN = "event_id", "priority", "seen"
_MULTIPLIES = (exp.Lateral, exp.Explode, exp.Inline, exp.Unnest, exp.SetOperation)
_GENERATORS = {"inline", "inline_outer", "explode_outer", "posexplode", "posexplode_outer", "stack", "json_tuple"}


class Reservoir:
    """``n`` rows a window: the columns of the input, and ``priority``.

    ``seen``, in the row of the smallest priority, is the number of events that the sample is drawn from.
    """

    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to
    counts: str | None = None
    schema: pa.Schema | None = None
    unit: tuple[str, ...] = (WINDOW_START,)

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
        drawable = f"(SELECT *, {priority} FROM {input_sql(self._product)})"  # noqa: S608 - a checked pipeline
        inner = windowed(self._product, drawn, where=f"`{_ID}` IS NOT NULL", source=drawable)
        return f"SELECT {columns}, inline(millrace_drawn) FROM ({inner})"  # noqa: S608 - a checked pipeline

    def describe(self, partial: pa.Schema) -> None:
        check_names(self._product, partial.names)
        self.schema = pa.schema([pa.field(field.name, plain_type(field.type)) for field in partial])

    def prepare(self, partial: pa.Table) -> pa.Table:
        # Spark says `seen` in each row of a pane; it counts once.
        first = np.zeros(partial.num_rows, bool)
        first[np.unique(_codes(partial, self._group), return_index=True)[1]] = True
        seen = pc.if_else(pa.array(first), partial[_SEEN], pa.scalar(None, pa.int64()))
        rows = partial.set_column(partial.schema.get_field_index(_SEEN), _SEEN, seen)
        if not self._product.slide:
            return rows
        return spread_and_merged(rows, self._product.window_ms, self._product.slide_ms, self.merge, most=_MOST)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        assert self.schema is not None, "describe() comes first"
        tables = [table.select(self.schema.names).cast(self.schema) for table in (old, partial) if table is not None]
        rows = pa.concat_tables(tables).combine_chunks()
        groups = _codes(rows, self._group)
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
        return found.set_column(found.schema.get_field_index(_SEEN), self.schema.field(_SEEN), totals)


def _codes(rows: pa.Table, names: list[str]) -> npt.NDArray[np.int64]:
    """A number from 0 for each combination of the columns' values."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in names:
        encoded = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return codes


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
        )
    named = {column.alias_or_name for column in tree.expressions} if isinstance(tree, exp.Select) else {"*"}
    if _ID not in named and "*" not in named:
        raise BadProduct(product.name, "it does not select event_id, by which events are drawn", "Select event_id")
    taken = {_PRIORITY, _SEEN, WINDOW_START, WINDOW_END} & named
    if taken:
        raise BadProduct(product.name, f"column {min(taken)} would stand for two things", "Rename it in the SQL")
