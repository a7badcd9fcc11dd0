"""Care of a table's log: checkpoints, so that opening stays quick; entries that nobody was promised removed."""

from __future__ import annotations

import re

from deltalake import DeltaTable

from lakehouse.contract.deltalog import DeltaLog
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


def since_checkpoint(table: TableRef) -> int:
    """How many versions the log has after its newest checkpoint."""
    log = DeltaLog(table.path)
    return log.newest() - max(log.checkpoints(), default=0)
