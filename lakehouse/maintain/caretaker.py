"""Care of a whole lake: by ``millrace maintain``, and by a driver for tables that none of its queries writes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lakehouse.contract.lake import PROPERTY_DECLARATION, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.errors import LakehouseError, TableBusy
from lakehouse.gold.state_store import store_of
from lakehouse.gold.store import ProductStore
from lakehouse.load.staging import refresh
from lakehouse.lock import WriterLocks
from lakehouse.maintain.backlog import Ask, RetentionWatch
from lakehouse.maintain.care import (
    CHECKPOINT_EVERY,
    FOLD_ROWS,
    LARGE,
    LOOK_EVERY_S,
    MANY_BRONZE_FILES,
    MANY_FILES,
    SWEEP_EVERY_S,
    Maintenance,
    checkpoint_log,
    compact_bronze,
    compact_product,
    end_retention,
    leading,
    vacuum_table,
)
from lakehouse.quality.notes import note_unknown_fields

log = logging.getLogger(__name__)

_FOLD_ROWS_OFFLINE = 50_000_000  # nobody waits


@dataclass(frozen=True, slots=True)
class TableCare:
    """The care of one table.

    Attributes:
        said: what was done, in words; empty: nothing was due.
        busy: its writer runs, and takes care of it.
    """

    table: str
    said: str = ""
    busy: bool = False


def maintain(
    lake: Lake,
    pipeline: Pipeline,
    *,
    everything: bool = False,
    fold_rows: int = _FOLD_ROWS_OFFLINE,
    bronze: bool = True,
) -> Iterator[TableCare]:
    """Take care of each table once, with its writer's lock; a table whose writer runs is left to that writer.

    Args:
        everything: compact and checkpoint all that can be, whether it is worth while or not.
        fold_rows: a table of partials with more rows is not folded.
        bronze: also of bronze, where a turn may take minutes.

    Raises:
        LakehouseError: another process takes care of the lake now.
    """
    with leading(lake) as first:
        if not first:
            raise LakehouseError("another process looks after this lake at this moment; try again later")
        for table in lake.tables():
            if table.layer == "bronze" and not bronze:
                continue
            try:
                with WriterLocks(lake, [table.name]):
                    yield TableCare(table.name, ", ".join(_care_of(lake, pipeline, table, everything, fold_rows)))
            except TableBusy:
                yield TableCare(table.name, busy=True)
            except Exception as error:  # the other tables need care too
                log.warning("care of %s failed", table.name, exc_info=True)
                yield TableCare(table.name, f"failed: {str(error).splitlines()[0]}")


def _care_of(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool, fold_rows: int) -> Iterator[str]:
    if table.layer == "bronze":
        yield from _care_of_bronze(lake, pipeline, table, everything)
    elif (product := pipeline.products.get(table.name)) is not None:
        store = store_of(product, table, pipeline.name)
        if _is_redeclared(pipeline, product, store):
            yield "left as it is: its declaration has changed, and its driver builds it again when it starts"
        elif done := compact_product(store, many=2 if everything else MANY_FILES, fold_rows=fold_rows):
            yield done
    if done := checkpoint_log(lake, table, every=1 if everything else CHECKPOINT_EVERY):
        yield done
    if removed := vacuum_table(lake, table, locked=True):
        yield f"{removed} files deleted"


def _care_of_bronze(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool) -> Iterator[str]:
    source = pipeline.sources.get(table.name)
    if source is not None and (fresh := note_unknown_fields(lake, source)):
        yield f"fields that the schema lacks: {', '.join(fresh[:10])}"
    if fewer := compact_bronze(lake, table, target=LARGE, many=2 if everything else MANY_BRONZE_FILES):
        yield f"{fewer} files fewer"
    keep = source.bronze_retention if source is not None else ""
    if keep and (days := end_retention(lake, table, duration_ms(keep))):
        yield f"{len(days)} days past their retention removed"


def _is_redeclared(pipeline: Pipeline, product: Product, store: ProductStore) -> bool:
    """Whether the table names another declaration than the pipeline's: its rows may fold differently."""
    found = store.delta().metadata().configuration.get(PROPERTY_DECLARATION)
    declared = product_declaration(product, pipeline.sources[product.source])
    if product in pipeline.joins:
        declared += source_declaration(pipeline.sources[product.right])
    return bool(found) and found != declared


class Caretaker:
    """A thread of the driver that takes care of tables without a running writer, and watches the topics' retention.

    Products and joins take care of their tables between two batches (:class:`~lakehouse.maintain.care.Maintenance`).
    This thread helps a driver whose sources are quiet, a driver of bronze alone, and tables with another writer or
    none: staging copies, ``loads``, removed products, products of a stage that does not run. It also refreshes staging
    copies on their schedules.

    Args:
        ask: asks the broker; None: the driver has none.
        now: monotonic seconds.
    """

    def __init__(
        self, lake: Lake, pipeline: Pipeline, ask: Ask | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._lake = lake
        self._now = now
        self._maintenance = Maintenance(lake, now)
        self._watch = RetentionWatch(lake, ask, now) if ask is not None else None
        self._staged: dict[str, float] = {}
        self.declare(pipeline)
        self._rounded = now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caretaker", daemon=True)

    def declare(self, pipeline: Pipeline) -> None:
        """Follow another pipeline from the next turn on."""
        self._pipeline = pipeline
        self._maintenance.sources = pipeline.sources
        if self._watch is not None:
            self._watch.sources = pipeline.sources

    def __enter__(self) -> Caretaker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Finish the current work."""
        self._maintenance.close()

    def turn(self) -> list[str]:
        """Look once; returns what was done to tables without a running writer."""
        said: list[str] = []
        if self._watch is not None:
            self._watch.turn()
        said += self._staging()
        if self._now() - self._rounded >= SWEEP_EVERY_S:
            try:
                for done in maintain(self._lake, self._pipeline, fold_rows=FOLD_ROWS, bronze=False):
                    if done.said:
                        said.append(f"{done.table}: {done.said}")
                        log.info("care of %s, which has no running writer: %s", done.table, done.said)
                self._rounded = self._now()
            except LakehouseError as error:  # another process takes care now: try again at the next turn
                log.debug("%s", error)
        elif not self._maintenance.looked_lately():
            self._maintenance.after_batch()
        return said

    def _staging(self) -> Iterator[str]:
        """Refresh the copies that are due; at the start of the driver all with a schedule are."""
        now = self._now()
        for copy in self._pipeline.staging.values():
            due = self._staged.get(copy.name, -math.inf) + duration_ms(copy.every) / 1000 if copy.every else math.inf
            if now < due or copy.product not in {table.name for table in self._lake.tables()}:
                continue
            self._staged[copy.name] = now
            try:
                done = refresh(self._lake, self._pipeline, copy)
            except Exception:  # the other copies are due too; this one is again after its pause
                log.warning("staging table %s is not refreshed", copy.name, exc_info=True)
            else:
                if done.changed:
                    yield f"{copy.name}: {done.rows} rows of {done.product} version {done.product_version}"

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            try:
                self.turn()
            except Exception:  # care must never end the driver; it is tried again
                log.warning("care of the lake failed", exc_info=True)
