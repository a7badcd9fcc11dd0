"""Maintenance inside a running driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deltalake import DeltaTable

from lakehouse.contract.lake import LOADS, QUALITY, QUARANTINE, WARNINGS, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline
from lakehouse.errors import TableBusy
from lakehouse.gold.store import ProductStore
from lakehouse.lock import WriterLocks
from lakehouse.maintain import products
from lakehouse.maintain.bronze import bronze_turn, compact, end_retention, may_clean
from lakehouse.maintain.logs import CHECKPOINT_EVERY, checkpoint, kept_ms, since_checkpoint
from lakehouse.quality.unknown import note

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
TIDY_EVERY_S = 30.0
SWEEP_EVERY_S = 600.0
# Appended by several writers that retry: commits of care do not conflict with theirs.
_SHARED = (QUARANTINE, WARNINGS, QUALITY, LOADS)
_looks: dict[Path, float] = {}  # when one of this process looked at a lake last


class Maintenance:
    """Looks after the tables of a lake, a little at a time.

    What makes no commit, and bronze, is done in a thread beside the batches, by one process of the lake at a time.
    What makes a commit of a product is done by :meth:`after_batch` itself, in the thread of the product's writer.

    Args:
        lake: the lake.
        pipeline: what is declared of its sources: how long bronze keeps them, which fields their payloads have.
    """

    def __init__(self, lake: Lake, now: Callable[[], float] = time.monotonic, pipeline: Pipeline | None = None) -> None:
        self._lake = lake
        self._now = now
        self._sources = pipeline.sources if pipeline else {}
        self._retention = pipeline.bronze_retentions if pipeline else {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="maintenance")
        self._running: Future[None] | None = None
        self._looked = self._swept = now()
        self._tidied: dict[str, float] = {}
        self._removed: dict[str, float] = {}

    def after_batch(self, stores: Sequence[ProductStore] = ()) -> None:
        """To be called between batches by the writer of ``stores``; takes care of one of them at the most."""
        now = self._now()
        for store in stores:
            if self._care_of(store, now):
                break
        if self._running is not None and not self._running.done():
            return
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = _looks[self._lake.root] = now
            self._running = self._worker.submit(self._look)

    def looked_lately(self) -> bool:
        """Whether this process has looked at the lake within the time of two looks, by this or another instance."""
        return self._now() - _looks.get(self._lake.root, -LOOK_EVERY_S * 3) < LOOK_EVERY_S * 2

    def close(self) -> None:
        """Finish what is being done."""
        self._worker.shutdown(cancel_futures=True)

    def _care_of(self, store: ProductStore, now: float) -> bool:
        name = store.table.name
        try:
            if now - self._tidied.setdefault(name, now) >= TIDY_EVERY_S:
                self._tidied[name] = now
                return bool(products.tidy(store))
            if now - self._removed.setdefault(name, now) >= SWEEP_EVERY_S:
                self._removed[name] = now
                return products.sweep(store) > 0
        except Exception:  # care must never stop the writer; it is tried again
            log.warning("maintenance of %s failed", name, exc_info=True)
        return False

    def _look(self) -> None:
        with leading(self._lake) as first:
            if not first:
                return
            sweep_now = self._now() - self._swept >= SWEEP_EVERY_S
            for table in self._lake.tables():
                try:
                    self._log_of(table)
                    if table.layer == "bronze":
                        self._look_at_bronze(table, sweep_now)
                    if sweep_now and (table.layer == "bronze" or table.name in _SHARED):
                        sweep(self._lake, table)
                except Exception:  # as above
                    log.warning("maintenance of %s failed", table.name, exc_info=True)
            if sweep_now:
                self._swept = self._now()

    def _look_at_bronze(self, table: TableRef, sweep_now: bool) -> None:
        compact(self._lake, table)
        source = self._sources.get(table.name)
        if source is None or not sweep_now:
            return
        if fresh := note(self._lake, source):
            log.warning("payloads of %s have fields that the schema has not: %s", table.name, ", ".join(fresh[:10]))
        if table.name in self._retention:
            end_retention(self._lake, table, self._retention[table.name])

    def _log_of(self, table: TableRef) -> None:
        """A log checkpoint every :data:`CHECKPOINT_EVERY` versions."""
        if since_checkpoint(table) < CHECKPOINT_EVERY:
            return
        if not checkpoint(self._lake, table):
            log.warning("bronze %s keeps old versions: a query has still to read them (millrace tables)", table.name)


def sweep(lake: Lake, table: TableRef, *, locked: bool = False) -> int:
    """Delete files that no kept version needs; returns how many.

    Args:
        locked: the caller has the writer's lock; without it, only for tables whose writers retry, and bronze.
    """
    delta = DeltaTable(str(table.path))
    if table.layer == "bronze":
        cleanable = may_clean(lake, table, kept_ms(delta, "deletedFileRetentionDuration") / 1000)
        if not cleanable or not delta.vacuum(dry_run=True):
            return 0
        with bronze_turn(lake, table) as properties:
            return len(DeltaTable(str(table.path)).vacuum(dry_run=False, commit_properties=properties))
    if not locked and table.name not in _SHARED:
        return 0
    if table.name in _SHARED and len(delta.file_uris()) >= products.MANY_FILES:
        delta.optimize.compact(target_size=products.SMALL)
    return len(delta.vacuum(dry_run=False)) if delta.vacuum(dry_run=True) else 0


@contextmanager
def leading(lake: Lake) -> Iterator[bool]:
    """Whether this is the one process that looks after the lake at this moment."""
    with ExitStack() as held:
        try:
            held.enter_context(WriterLocks(lake, ["maintenance"]))
        except TableBusy:
            yield False
            return
        yield True
