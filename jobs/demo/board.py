"""The demo's live figures in a terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lakehouse.contract.pipeline import Product
from serve.client import Change, Message, TableView

_BAR = 32
_ROWS, _COLUMNS = 10, 6
_PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of a moment.

    Attributes:
        in_log: events that Kafka has not acknowledged yet.
    """

    sent: int
    acknowledged: int
    in_log: int


class Board:
    """A product's newest rows, rates and latency, a few times a second; plain lines where there is no terminal.

    Args:
        product: whose rows are shown, best ten of a ``top_n`` with bars.
        url: of the dashboard; it stays on the screen.
    """

    def __init__(self, console: Console, product: Product, url: str, *, quiet: bool = False) -> None:
        self._product = product
        self._url = url
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._quiet = quiet
        self._view = TableView()
        self._figures = Figures(0, 0, 0)
        self._history: deque[tuple[float, int]] = deque(maxlen=40)
        self._ages: deque[float] = deque(maxlen=60)
        self._events = 0
        self._printed = 0.0

    def __enter__(self) -> Board:
        if self._live is not None and not self._quiet:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def pushed(self, message: Message, now_ms: float) -> None:
        """Take one message of the subscription."""
        self._view.apply(message)
        if isinstance(message, Change):
            self._events += message.events or 0
            if message.oldest_at is not None and message.newest_at is not None:
                self._ages.append(now_ms - (message.oldest_at + message.newest_at) / 2)

    def show(self, figures: Figures) -> None:
        """Redraw with new counts."""
        self._figures = figures
        self._history.append((time.monotonic(), figures.sent))
        if self._quiet:
            return
        if self._live is not None:
            self._live.update(self._render())
        elif time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(self._line())

    def _line(self) -> str:
        ages = sorted(self._ages)
        age = f"{ages[len(ages) // 2]:,.0f} ms" if ages else "–"
        return (
            f"sent {self._figures.sent:,} ({self._rate():,.0f}/s)   acknowledged {self._figures.acknowledged:,}   "
            f"in the log {self._figures.in_log:,}   in gold {self._events:,}   receipt to dashboard {age} (median)"
        )

    def _rate(self) -> float:
        if len(self._history) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._history[0], self._history[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def _render(self) -> RenderableType:
        rows = self._latest()
        window = rows[0].get("window_start") if rows else None
        when = f", {window[11:19]} UTC" if isinstance(window, str) else "" if rows else ": waiting for the first result"
        title = Text(f"{self._product.name.replace('_', ' ').capitalize()}{when}", style="bold")
        table = self._ranking(rows) if self._product.operator == "top_n" else _plain(rows)
        address = Text.assemble("Dashboard ", (self._url, f"bold link {self._url}"))
        return Group(address, title, table, Text(self._line(), style="dim"))

    def _ranking(self, rows: list[Mapping[str, Any]]) -> Table:
        rows = sorted(rows, key=lambda row: row["rank"])
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column(justify="right", style="dim")
        table.add_column(max_width=34, overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan", no_wrap=True)
        most = max((row["count"] for row in rows), default=1)
        for row in rows:
            bar = "█" * max(1, round(_BAR * row["count"] / most))
            table.add_row(str(row["rank"]), Text(str(row["item"])), f"{row['count']:,}", bar)
        return table

    def _latest(self) -> list[Mapping[str, Any]]:
        rows = list(self._view.rows.values())
        newest = max((str(row.get("window_start", "")) for row in rows), default="")
        return [row for row in rows if str(row.get("window_start", "")) == newest]


def _plain(rows: list[Mapping[str, Any]]) -> Table:
    names = [name for name in (rows[0] if rows else {}) if not name.startswith("window_")][:_COLUMNS]
    numbers = [name for name in names if isinstance(rows[0][name], int | float)]
    if numbers:
        rows = sorted(rows, key=lambda row: -(row[numbers[0]] or 0))
    table = Table(*names, box=None, padding=(0, 1))
    for row in rows[:_ROWS]:
        table.add_row(*[Text(f"{row[n]:,}" if isinstance(row[n], int) else str(row[n])) for n in names])
    return table
