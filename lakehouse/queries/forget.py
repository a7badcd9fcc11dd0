"""Clearing away what a query that was added leaves; no Spark."""

from __future__ import annotations

import shutil

from lakehouse.bronze.readers import reader_file
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import PROPERTY_PIPELINE, Lake
from lakehouse.contract.queries import OWNER, Declared, QuerySpec


def query_name(name: str) -> str:
    """Name of an added query's set of products (and its index)."""
    return f"query-{name}"


def forget(lake: Lake, name: str, *, drop: bool) -> None:
    """Remove a query's note as a reader, its index, state and declaration; with ``drop`` its table too.

    The declaration goes last: it says that the query is removed, so that after a crash the next driver begins again.
    The caller holds the table's lock.
    """
    reader_file(lake, query_name(name)).unlink(missing_ok=True)
    crash_point("forget.after_reader")
    index = lake.state / "seen" / query_name(name)
    shutil.rmtree(index, ignore_errors=True)
    index.with_suffix(".declaration").unlink(missing_ok=True)
    crash_point("forget.after_index")
    if drop and is_ours(lake, name):
        shutil.rmtree(lake.table("gold", name).path, ignore_errors=True)
    crash_point("forget.after_table")
    Declared(lake, QuerySpec).remove(name)


def is_ours(lake: Lake, name: str) -> bool:
    """Whether there is a table of this name that an added query made."""
    from deltalake import DeltaTable

    table = lake.table("gold", name)
    return table.exists() and DeltaTable(str(table.path)).metadata().configuration.get(PROPERTY_PIPELINE) == OWNER
