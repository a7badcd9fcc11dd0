"""Windows: the SQL that sorts events into them, and sliding ones made of panes.

A pane is as long as the greatest common divisor of a window's length and slide, so that each sliding window is a whole
number of panes (Li et al., "No pane, no gain", SIGMOD Record 2005). Spark aggregates panes, each event once; only the
few partial rows are then given to the many windows that they lie in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START


def pane_ms(window_ms: int, slide_ms: int) -> int:
    """Length of a pane in milliseconds."""
    return math.gcd(window_ms, slide_ms)


def input_sql(product: Product) -> str:
    """The operator's input, as something to select from."""
    return f"({product.sql.strip().rstrip(';')})"


def windowed(product: Product, columns: str, *, where: str = "", group: Sequence[str] = (), source: str = "") -> str:
    """Spark SQL that aggregates the product's input over its panes and groups.

    Args:
        columns: what to select beside the window's bounds and the groups.
        where: condition on the input; by default the item is not null.
        group: more expressions to group by.
        source: what to select from; by default the product's input.
    """
    pane = pane_ms(product.window_ms, product.slide_ms)
    by = [f"`{name}`" for name in product.by]
    select = ", ".join([f"window.start AS {WINDOW_START}", f"window.end AS {WINDOW_END}", *by, columns])
    grouped = ", ".join([f"window(`{product.time}`, '{pane} milliseconds')", *by, *group])
    return in_time(
        product,
        f"SELECT {select} FROM {source or input_sql(product)} "  # noqa: S608 - a checked pipeline
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
        window_ms: length of a window.
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
        most: rows to make at once.
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
