"""What Prometheus is told of this process's queries: the events that they took, and which of them run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

EVENTS = Counter(
    "millrace_lakehouse_events",
    "Events that a query took: all, and further copies and refused ones among them",
    ["query", "what"],
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
