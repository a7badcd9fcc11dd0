"""Care of bronze beside its writers: compaction, and days that its retention ends.

Commits of bronze take turns by a lock in the lake (:mod:`lakehouse.bronze.clock`): Spark's own look for the next
version and its renaming of the commit file into place are two steps, and on a local file system a commit that another
process made between them would be overwritten.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime

from deltalake import CommitProperties, DeltaTable

from lakehouse.bronze.clock import BronzeClock
from lakehouse.bronze.table import progress
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.maintain.readers import readers_of, unread_since

log = logging.getLogger(__name__)

SMALL = 8 << 20  # bytes; while the pipeline runs, files up to this size are put together
LARGE = 128 << 20  # the same for days that are over, when nobody writes: a turn may then take minutes
MANY = 64  # small files of one day before it is worth while
_DATE = re.compile(r"(?:^|/)date=(\d{4}-\d{2}-\d{2})/")


def compact(lake: Lake, table: TableRef, *, target: int = SMALL, many: int = MANY) -> int:
    """Put the small files of each day together; returns how many files became fewer.

    Rows stay as they are, and the commits say ``dataChange = false``: streams pass them over.
    """
    removed = 0
    for day, count in sorted(_small_files(table, target).items()):
        if count < many:
            continue
        with bronze_turn(lake, table) as properties:
            began = time.monotonic()
            found = DeltaTable(str(table.path)).optimize.compact(
                partition_filters=[("date", "=", day)], target_size=target, commit_properties=properties
            )
            took = time.monotonic() - began
        removed += int(found["numFilesRemoved"]) - int(found["numFilesAdded"])
        log.info("bronze %s, %s: %d files into %d in %.2f s", table.name, day, count, found["numFilesAdded"], took)
    return removed


@contextmanager
def bronze_turn(lake: Lake, table: TableRef) -> Iterator[CommitProperties]:
    """The turn to commit to bronze; gives what the commit must say: how far the table is, as before."""
    with BronzeClock(lake, table).turn() as bronze_at:
        reached = replace(progress(table), bronze_at=bronze_at)
        yield CommitProperties(custom_metadata={"userMetadata": reached.to_metadata()})


def _small_files(table: TableRef, target: int) -> Counter[str]:
    """How many files below ``target`` bytes each day has."""
    adds = DeltaTable(str(table.path)).get_add_actions(flatten=True)
    paths, sizes = adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist()
    found: Counter[str] = Counter()
    for path, size in zip(paths, sizes, strict=True):
        day = _DATE.search(path)
        if day and size < target:
            found[day[1]] += 1
    return found


def end_retention(lake: Lake, table: TableRef, keep_ms: int, *, now: Callable[[], float] = time.time) -> list[date]:
    """Remove whole days that are older than the source's ``bronze_retention``; returns them.

    Nothing is removed while a query has not read everything before the end of those days. What was derived from them
    stays; it can no longer be derived again, so a product that is built again starts with the days that are left.
    """
    end = datetime.fromtimestamp(now() - keep_ms / 1000, UTC).date()
    days = [date.fromisoformat(day) for day in _small_files(table, 1 << 62)]
    old = sorted(day for day in days if day < end)
    if not old:
        return []
    last_moment = datetime(end.year, end.month, end.day, tzinfo=UTC).timestamp()
    for reader in readers_of(lake, table):
        waiting = unread_since(table, reader, now)
        if waiting is not None and now() - waiting <= last_moment:
            log.warning(
                "bronze %s: %s days are past their retention, and stay until %s has read them (%s says how far it is)",
                *(table.name, len(old), reader.query, reader.place),
            )
            return []
    with bronze_turn(lake, table) as properties:
        delta = DeltaTable(str(table.path))
        if delta.metadata().configuration.get("delta.appendOnly") == "true":
            delta.alter.set_table_properties({"delta.appendOnly": "false"}, raise_if_not_exists=False)
        delta.delete(f"date < '{end.isoformat()}'", commit_properties=properties)
    log.warning("bronze %s: %d days before %s are past their retention and were removed", table.name, len(old), end)
    return old


def may_clean(lake: Lake, table: TableRef, keep_s: float) -> bool:
    """Whether versions and files older than ``keep_s`` may go: no query has still to read one of them."""
    waiting = [unread_since(table, reader) for reader in readers_of(lake, table)]
    return all(age is None or age < keep_s / 2 for age in waiting)
