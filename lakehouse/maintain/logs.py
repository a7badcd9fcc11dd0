"""Care of a table's log: checkpoints, so that opening stays quick; entries that nobody was promised removed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from deltalake import DeltaTable

from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.maintain.bronze import may_clean

CHECKPOINT_EVERY = 200  # commits
_INTERVAL = re.compile(r"(?:interval\s+)?(.+)", re.IGNORECASE)
_WEEK_MS = 7 * 86_400_000


def checkpoint(lake: Lake, table: TableRef) -> bool:
    """Write a log checkpoint and remove old entries; makes no commit. False where the old entries had to stay."""
    delta = DeltaTable(str(table.path))
    delta.create_checkpoint()
    if table.layer == "bronze" and not may_clean(lake, table, kept_ms(delta, "logRetentionDuration") / 1000):
        return False
    delta.cleanup_metadata()
    return True


def kept_ms(delta: DeltaTable, what: str) -> int:
    """How long the table keeps its ``logRetentionDuration`` or ``deletedFileRetentionDuration``, in milliseconds."""
    text = delta.metadata().configuration.get(f"delta.{what}", "")
    match = _INTERVAL.fullmatch(text.strip())
    try:
        return duration_ms(match[1]) if match else _default(what)
    except ValueError:
        return _default(what)


def _default(what: str) -> int:
    return 30 * 86_400_000 if what == "logRetentionDuration" else _WEEK_MS


def newest_version(table: TableRef) -> int:
    """The newest version in the log, without opening the table; -1 for none."""
    return max(_versions(table), default=-1)


def oldest_version(table: TableRef) -> int:
    """The oldest version whose log entry is there; -1 for none."""
    return min(_versions(table), default=-1)


def _versions(table: TableRef) -> Iterator[int]:
    try:
        with os.scandir(table.path / "_delta_log") as entries:  # there may be many thousands
            for entry in entries:
                if len(entry.name) == 25 and entry.name.endswith(".json"):
                    yield int(entry.name[:20])
    except FileNotFoundError:
        return


def newest_checkpoint(table: TableRef) -> int:
    """Version of the newest log checkpoint; 0 for none."""
    found = (table.path / "_delta_log").glob("*.checkpoint*.parquet")
    return max((int(p.name.split(".")[0]) for p in found), default=0)
