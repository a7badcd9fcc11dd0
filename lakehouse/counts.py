"""What the queries of this process have taken, for Prometheus: counted where a batch ends, served by the driver."""

from __future__ import annotations

from prometheus_client import Counter

EVENTS = Counter(
    "millrace_lakehouse_events",
    "Events that a query has taken in: all, and of those further copies and refused ones",
    ["query", "what"],
    registry=None,
)


def count_batch(query: str, taken: int, *, copies: int = 0, rejected: int = 0) -> None:
    """Count a batch that is done; one that runs again after a failure is counted again.

    Args:
        query: the query's name, which is that of its checkpoint.
        taken: events of the batch.
        copies: of those, further copies of events that were there before.
        rejected: of the first copies, those that were refused.
    """
    for what, count in (("taken", taken), ("copies", copies), ("rejected", rejected)):
        EVENTS.labels(query, what).inc(count)
