"""A micro-batch's events computed once, for all that read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame


@contextmanager
def kept(events: DataFrame) -> Iterator[DataFrame]:
    """The same events, computed by the first who reads them and kept until the end of the block.

    With the driver as the only executor they are kept as the rows that they are (``localCheckpoint``): a copy of the
    bytes, where Spark's cache takes each row apart into columns and every reader puts it together again. On a cluster,
    where an executor may be lost with what it keeps, it is the cache, which is computed again.
    """
    if not (events.sparkSession.sparkContext.master or "").startswith("local"):
        events.persist()
        try:
            yield events
        finally:
            events.unpersist()
        return
    rows = events.localCheckpoint(eager=False)
    try:
        yield rows
    finally:
        rows._jdf.queryExecution().logical().rdd().unpersist(False)
