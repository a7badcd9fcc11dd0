"""Clearing away what a query that was added leaves; no Spark."""

from __future__ import annotations

import shutil

from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import PROPERTY_PIPELINE, Lake
from lakehouse.contract.queries import OWNER, Declared, QuerySpec


def query_name(name: str) -> str:
    """Name of the streaming query (and its checkpoint and index) of an added query."""
    return f"query-{name}"


def forget(lake: Lake, name: str, *, drop: bool) -> None:
    """Remove a query's checkpoint, index, state and declaration; its table too, where ``drop`` says so.

    The declaration goes last: it says that the query is removed, so that after a crash the next driver begins again.
    The caller holds the table's lock.
    """
    shutil.rmtree(lake.checkpoint(query_name(name)), ignore_errors=True)
    crash_point("forget.after_checkpoint")
    shutil.rmtree(lake.state / "seen" / query_name(name), ignore_errors=True)
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
