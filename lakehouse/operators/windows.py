"""Windows: the SQL that sorts events into them, and sliding ones made of panes.

A pane is as long as the greatest common divisor of a window's length and slide, so that each sliding window is a whole
number of panes (Li et al., "No pane, no gain", SIGMOD Record 2005). Spark aggregates panes, each event once; only the
few partial rows are then given to the many windows that they lie in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START
from lakehouse.operators.sql import WINDOW

_MOST = 1_000_000  # rows that are made at once


def pane_ms(window_ms: int, slide_ms: int) -> int:
    """Length of a pane in milliseconds."""
    return math.gcd(window_ms, slide_ms)


def input_sql(product: Product) -> str:
    """The rows that the operator takes in: the product's SQL, or all events of its source."""
    return product.sql.strip().rstrip(";") or f"SELECT * FROM `{product.source}`"  # noqa: S608 - a checked pipeline


def windowed(product: Product, columns: str, *, where: str = "", group: Sequence[str] = (), source: str = "") -> str:
    """Spark SQL that aggregates the product's input over its panes and groups.

    Args:
        columns: what to select beside the window's bounds and the groups.
        where: condition on the input; by default the item is not null.
        source: what to select from; by default the product's input.
    """
    pane = pane_ms(product.window_ms, product.slide_ms)
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


def spread(
    panes: pa.Table, window_ms: int, slide_ms: int, *, start: str = WINDOW_START, end: str | None = WINDOW_END
) -> pa.Table:
    """The rows of panes, each once for every sliding window that the pane lies in.

    Args:
        panes: rows with a pane's start in the column ``start``.
        slide_ms: between the starts of two windows, which are multiples of it since the epoch, as Spark's are.
        start: column with the pane's start, then the window's.
        end: the same with its end; None: there is none.
    """
    begins = panes[start].cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    window, slide = window_ms * 1_000, slide_ms * 1_000
    back = np.arange(math.ceil(window / slide), dtype=np.int64) * slide
    starts = (begins // slide * slide)[:, None] - back[None, :]
    row, column = np.nonzero(starts + window > begins[:, None])
    windows = starts[row, column]
    rows = panes.take(pa.array(row))
    columns = {name: rows[name] for name in rows.schema.names}
    columns[start] = pa.array(windows).cast(TIMESTAMP)
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
    """
    step = max(1, most // math.ceil(window_ms / slide_ms))
    if panes.num_rows <= step:
        return spread(panes, window_ms, slide_ms, end=end)
    panes = panes.sort_by(WINDOW_START)
    rows: pa.Table | None = None
    for at in range(0, panes.num_rows, step):
        rows = merge(rows, spread(panes.slice(at, step), window_ms, slide_ms, end=end))
    assert rows is not None
    return rows


@dataclass(frozen=True, slots=True)
class Sliding:
    """A query over sliding windows of a plain SQL aggregate, asked of Spark as one over panes.

    ``GROUP BY window(event_time, '30 minutes', '5 seconds')`` makes Spark aggregate each event 360 times. If the query
    says no more of its window than its start and end, panes of five seconds give the same rows.

    Attributes:
        slide_ms: between the starts of two.
        end: column with the window's end; None: there is none.
    """

    sql: str
    window_ms: int
    slide_ms: int
    end: str | None

    @classmethod
    def found_in(cls, select: exp.Select, text: str) -> Sliding | None:
        """The query's sliding windows; None: it has none, or says something of them that panes could not."""
        call = _only_window(select)
        if call is None or len(call.expressions) != 3 or not all(e.is_string for e in call.expressions[1:]):
            return None
        length, slide = (str(e.this) for e in call.expressions[1:])
        columns = {column.this.name.lower(): column for column in _of_window(select)}
        outer = {id(item.unalias()): item.alias_or_name for item in select.expressions}
        if len(_of_window(select)) != len(columns) or any(id(column) not in outer for column in columns.values()):
            return None
        try:
            window_ms, slide_ms = duration_ms(length), duration_ms(slide)
        except ValueError:
            return None
        pattern = rf",\s*(['\"]){re.escape(length)}\1\s*,\s*(['\"]){re.escape(slide)}\2\s*\)"
        pane = pane_ms(window_ms, slide_ms) if slide_ms else 0
        sql, replaced = re.subn(pattern, f", '{pane} milliseconds')", text)
        names = {name: outer[id(column)] for name, column in columns.items()}
        if replaced != 1 or not 0 < slide_ms < window_ms or names.get("start") != WINDOW_START:
            return None
        return cls(sql, window_ms, slide_ms, names.get("end"))

    def spread(self, panes: pa.Table, merge: Callable[[pa.Table | None, pa.Table], pa.Table]) -> pa.Table:
        """Partial rows of windows, of those of panes."""
        return spread_and_merged(panes, self.window_ms, self.slide_ms, merge, most=_MOST, end=self.end)


def slides(select: exp.Select) -> bool:
    """Whether an event may lie in several of the query's windows."""
    return any(len(call.expressions) > 2 for call in _windows(select))


def _windows(select: exp.Select) -> list[exp.Anonymous]:
    return [call for call in select.find_all(exp.Anonymous) if call.name.lower() == WINDOW]


def _only_window(select: exp.Select) -> exp.Anonymous | None:
    calls = _windows(select)
    group = select.args["group"]
    return calls[0] if len(calls) == 1 and any(call is calls[0] for call in group.expressions) else None


def _of_window(select: exp.Select) -> list[exp.Column]:
    """Columns of the window, or the window itself."""
    return [c for c in select.find_all(exp.Column) if c.table.lower() == "window" or c.name.lower() == "window"]
