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

from serve.client import Change, Message, TableView

_BAR = 32
_PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of a moment.

    Attributes:
        sent: events sent by the player.
        acknowledged: events that the collector has acknowledged.
        in_log: events that Kafka has not acknowledged yet.
    """

    sent: int
    acknowledged: int
    in_log: int


class Board:
    """Top ten, rates and latency, redrawn a few times a second; plain lines where there is no terminal."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
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
        rows = sorted(self._latest(), key=lambda row: row["rank"])
        table = Table(box=None, padding=(0, 1), show_header=False)
        table.add_column(justify="right", style="dim")
        table.add_column(max_width=34, overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right", style="bold")
        table.add_column(style="cyan", no_wrap=True)
        most = max((row["count"] for row in rows), default=1)
        for row in rows:
            bar = "█" * max(1, round(_BAR * row["count"] / most))
            table.add_row(str(row["rank"]), Text(str(row["item"])), f"{row['count']:,}", bar)
        when = rows[0]["window_start"][11:16] + " UTC" if rows else "waiting for the first result"
        return Group(Text(f"Top topics, minute of {when}", style="bold"), table, Text(self._line(), style="dim"))

    def _latest(self) -> list[Mapping[str, Any]]:
        rows = list(self._view.rows.values())
        newest = max((row["window_start"] for row in rows), default=None)
        return [row for row in rows if row["window_start"] == newest]
