"""Care of tables while they are written: checkpoints of their logs, old files and old log entries removed.

Runs in the writer's own process, between batches, so that it never conflicts with a commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from deltalake import DeltaTable

from lakehouse.contract.lake import Lake, TableRef

log = logging.getLogger(__name__)

CHECKPOINT_EVERY = 200  # commits
VACUUM_EVERY_S = 600.0
PRODUCT_HOURS = 6  # how long a subscriber's position in a product lives


class Maintenance:
    """Looks after all tables of a lake, a little at a time."""

    def __init__(self, lake: Lake, now: Callable[[], float] = time.monotonic) -> None:
        self._lake = lake
        self._now = now
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="maintenance")
        self._running: Future[None] | None = None
        self._looked = now()
        self._vacuumed = now()
        self._checkpoints: dict[str, int] = {}

    def after_batch(self) -> None:
        """To be called between batches; returns at once."""
        if self._running is not None and not self._running.done():
            return
        if self._now() - self._looked >= 5.0:
            self._looked = self._now()
            self._running = self._worker.submit(self._look)

    def close(self) -> None:
        """Finish what is being done."""
        self._worker.shutdown(cancel_futures=True)

    def _look(self) -> None:
        for table in self._lake.tables():
            try:
                self._checkpoint(table)
            except Exception:  # care must never stop the writer; it is tried again
                log.warning("maintenance of %s failed", table.name, exc_info=True)
        if self._now() - self._vacuumed >= VACUUM_EVERY_S:
            self._vacuumed = self._now()
            for table in self._lake.tables():
                if table.layer != "bronze":
                    DeltaTable(str(table.path)).vacuum(
                        retention_hours=PRODUCT_HOURS, dry_run=False, enforce_retention_duration=False
                    )

    def _checkpoint(self, table: TableRef) -> None:
        """A log checkpoint every :data:`CHECKPOINT_EVERY` versions, so that opening the table stays quick."""
        newest = _newest_version(table)
        if newest - self._checkpoints.setdefault(table.name, _newest_checkpoint(table)) < CHECKPOINT_EVERY:
            return
        delta = DeltaTable(str(table.path))
        delta.create_checkpoint()
        delta.cleanup_metadata()
        self._checkpoints[table.name] = delta.version()


def _newest_version(table: TableRef) -> int:
    return max((int(p.stem) for p in (table.path / "_delta_log").glob("[0-9]*.json")), default=0)


def _newest_checkpoint(table: TableRef) -> int:
    return max(
        (int(p.name.split(".")[0]) for p in (table.path / "_delta_log").glob("*.checkpoint*.parquet")), default=0
    )
