"""What this process's queries count: the events that they took, which of them run, and what arrived too late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import Counter, Gauge

from lakehouse.contract.tomlfile import duration_ms

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

EVENTS = Counter(
    "millrace_lakehouse_events",
    "Events that a query took: all, and further copies and refused ones among them",
    ["query", "what"],
    registry=None,
)
TOO_LATE = Gauge(
    "millrace_lakehouse_too_late",
    "Events in bronze that arrived longer after their event time than a declared lateness",
    ["source", "lateness"],
    registry=None,
)

RUNNING: dict[str, StreamingQuery] = {}
"""Streaming queries by name. Each has a session of its own, so ``spark.streams`` of another does not list it."""


def count_batch(query: str, taken: int, *, copies: int = 0, rejected: int = 0) -> None:
    """Count a finished batch; one that runs again after a failure counts again.

    Args:
        query: name of the query and of its checkpoint.
        copies: further copies among them.
        rejected: refused first copies.
    """
    for what, count in (("taken", taken), ("copies", copies), ("rejected", rejected)):
        EVENTS.labels(query, what).inc(count)


class LateEvents:
    """Counts the events of a source that arrived too late, once each, by the lateness that they exceed.

    Args:
        source: name of the source.
        declared: latenesses of the source and of its products, e.g. ``10 minutes``.

    Attributes:
        totals: events in bronze by lateness; empty until :meth:`reset` gives those so far.
        through: bronze version up to which they are counted.
    """

    def __init__(self, source: str, declared: Iterable[str]) -> None:
        self._source = source
        self._limits = {text: duration_ms(text) for text in sorted(declared)}
        self.totals: dict[str, int] = {}
        self.through = -1

    @property
    def sql(self) -> dict[str, str]:
        """A Spark SQL aggregate over valid first copies for each lateness."""
        skew = "unix_millis(received_at) - unix_millis(event_time)"
        return {text: f"count_if({skew} > {limit})" for text, limit in self._limits.items()}

    def reset(self, totals: Mapping[str, int], through: int) -> bool:
        """Go on from these totals; False if they are of other latenesses: bronze must then be counted again."""
        if totals.keys() != self._limits.keys():
            return False
        self.totals, self.through = dict(totals), through
        self._tell()
        return True

    def take(self, version: int, counted: pa.Table) -> None:
        """Count the valid first copies of the next bronze versions; versions that are counted are passed over."""
        if version <= self.through or not self.totals:
            return
        self.through = version
        if not counted.num_rows:
            return
        arrived, happened = (
            pc.cast(counted[name], pa.int64()).to_numpy() // 1000 for name in ("received_at", "event_time")
        )
        for text, limit in self._limits.items():
            self.totals[text] += int((arrived - happened > limit).sum())
        self._tell()

    def _tell(self) -> None:
        for text, total in self.totals.items():
            TOO_LATE.labels(self._source, text).set(total)
