"""Plots of figures over time, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair


def plot_lines(path: Path, titles: Sequence[str], rows: Sequence[dict[str, Any]], across: str = "minutes") -> None:
    """One panel a title, below each other.

    Args:
        rows: one dot each: ``panel`` (a title), ``line``, ``value``, and the field ``across``.
        across: of the horizontal axis.
    """
    panels = []
    for title in titles:
        data = altair.Data(values=[row for row in rows if row["panel"] == title])
        chart = altair.Chart(data, title=title, width=640, height=110).mark_line(point=across != "minutes")
        x = altair.X(across, type="quantitative", title=across)
        y = altair.Y("value", type="quantitative", title=None)
        panels.append(chart.encode(x, y, altair.Color("line", type="nominal", title=None)))
    altair.vconcat(*panels).resolve_scale(color="independent").save(str(path))
