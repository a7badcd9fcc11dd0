"""Care of a whole lake by a process of its own, for lakes whose driver does not run.

It takes each table's writer lock; a table whose writer runs is left to that writer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from lakehouse.contract.lake import PROPERTY_DECLARATION, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.errors import LakehouseError, TableBusy
from lakehouse.gold.stateful import store_of
from lakehouse.gold.store import ProductStore
from lakehouse.lock import WriterLocks
from lakehouse.maintain.bronze import LARGE, MANY, compact, end_retention
from lakehouse.maintain.care import leading, sweep
from lakehouse.maintain.logs import CHECKPOINT_EVERY, checkpoint, since_checkpoint
from lakehouse.maintain.products import tidy
from lakehouse.quality.unknown import note

log = logging.getLogger(__name__)

_FOLD_ROWS = 50_000_000  # nobody waits


@dataclass(frozen=True, slots=True)
class Done:
    """What was done to one table.

    Attributes:
        table: its name.
        said: in words; empty: nothing was to be done.
        busy: its writer runs, and looks after it itself.
    """

    table: str
    said: str = ""
    busy: bool = False


def maintain(
    lake: Lake,
    pipeline: Pipeline,
    *,
    everything: bool = False,
    fold_rows: int = _FOLD_ROWS,
    bronze: bool = True,
) -> Iterator[Done]:
    """Look after each table once.

    Args:
        everything: put together and checkpoint whatever can be, not only where it is worth while.
        fold_rows: a table of partials with more rows is not folded.
        bronze: of bronze too, whose turns may then take minutes.

    Raises:
        LakehouseError: another process looks after the lake at this moment.
    """
    with leading(lake) as first:
        if not first:
            raise LakehouseError("another process looks after this lake at this moment; try again later")
        for table in lake.tables():
            if table.layer == "bronze" and not bronze:
                continue
            try:
                with WriterLocks(lake, [table.name]):
                    yield Done(table.name, ", ".join(_care_of(lake, pipeline, table, everything, fold_rows)))
            except TableBusy:
                yield Done(table.name, busy=True)
            except Exception as error:  # the other tables want care too
                log.warning("care of %s failed", table.name, exc_info=True)
                yield Done(table.name, f"failed: {str(error).splitlines()[0]}")


def _care_of(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool, fold_rows: int) -> Iterator[str]:
    if table.layer == "bronze":
        yield from _care_of_bronze(lake, pipeline, table, everything)
    elif (product := pipeline.products.get(table.name)) is not None:
        store = store_of(product, table, pipeline.name)
        if _otherwise(pipeline, product, store):
            yield "left as it is: it is declared otherwise now, and built again when its driver starts"
        elif done := tidy(store, many=2, fold_rows=fold_rows) if everything else tidy(store, fold_rows=fold_rows):
            yield done
    if since_checkpoint(table) >= (1 if everything else CHECKPOINT_EVERY):
        kept = checkpoint(lake, table)
        yield "log checkpoint" if kept else "log checkpoint (old versions stay: a query has still to read them)"
    if removed := sweep(lake, table, locked=True):
        yield f"{removed} files deleted"


def _otherwise(pipeline: Pipeline, product: Product, store: ProductStore) -> bool:
    """Whether the table says that it was made by another declaration than the pipeline's: its rows fold otherwise."""
    found = store.delta().metadata().configuration.get(PROPERTY_DECLARATION)
    declared = product_declaration(product, pipeline.sources[product.source])
    if product in pipeline.joins:
        declared += source_declaration(pipeline.sources[product.right])
    return bool(found) and found != declared


def _care_of_bronze(lake: Lake, pipeline: Pipeline, table: TableRef, everything: bool) -> Iterator[str]:
    source = pipeline.sources.get(table.name)
    if source is not None and (fresh := note(lake, source)):
        yield f"fields that the schema has not: {', '.join(fresh[:10])}"
    if fewer := compact(lake, table, target=LARGE, many=2 if everything else MANY):
        yield f"{fewer} files fewer"
    keep = pipeline.bronze_retentions.get(table.name)
    if keep is not None and (days := end_retention(lake, table, keep)):
        yield f"{len(days)} days past their retention removed"
