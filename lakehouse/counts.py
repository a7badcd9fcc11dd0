"""Counters of the events that the queries of this process took, for Prometheus."""

from __future__ import annotations

from prometheus_client import Counter

EVENTS = Counter(
    "millrace_lakehouse_events",
    "Events that a query took: all, and further copies and refused ones among them",
    ["query", "what"],
    registry=None,
)


def count_batch(query: str, taken: int, *, copies: int = 0, rejected: int = 0) -> None:
    """Count a finished batch; one that runs again after a failure counts again.

    Args:
        query: name of the query and of its checkpoint.
        taken: events of the batch.
        copies: further copies among them.
        rejected: refused first copies.
    """
    for what, count in (("taken", taken), ("copies", copies), ("rejected", rejected)):
        EVENTS.labels(query, what).inc(count)
