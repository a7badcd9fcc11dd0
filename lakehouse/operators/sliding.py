"""Sliding windows of a plain SQL aggregate: asked of Spark as panes, and spread over the windows afterwards.

``GROUP BY window(event_time, '30 minutes', '5 seconds')`` makes Spark aggregate each event 360 times. Where the query
says no more of its window than its start and end, it gives the same rows when it is asked for panes of five seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.tomlfile import duration_ms
from lakehouse.operators import windows
from lakehouse.operators.base import WINDOW_START
from lakehouse.operators.sql import WINDOW

_MOST = 1_000_000  # rows that are made at once


@dataclass(frozen=True, slots=True)
class Sliding:
    """A query over sliding windows, as one over panes.

    Attributes:
        sql: the query that Spark is given.
        window_ms: length of a window.
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
        pane = windows.pane_ms(window_ms, slide_ms) if slide_ms else 0
        sql, replaced = re.subn(pattern, f", '{pane} milliseconds')", text)
        names = {name: outer[id(column)] for name, column in columns.items()}
        if replaced != 1 or not 0 < slide_ms < window_ms or names.get("start") != WINDOW_START:
            return None
        return cls(sql, window_ms, slide_ms, names.get("end"))

    def spread(self, panes: pa.Table, merge: Callable[[pa.Table | None, pa.Table], pa.Table]) -> pa.Table:
        """Partial rows of windows, of those of panes."""
        return windows.spread_and_merged(panes, self.window_ms, self.slide_ms, merge, most=_MOST, end=self.end)


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
