"""Bronze to products: one streaming query a source keeps all its products.

Here it is started: from its checkpoint, or from bronze where the checkpoint does not cover what it is to keep. What it
does with each micro-batch: :mod:`lakehouse.livewriter`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from lakehouse.bronze.horizon import seen_index
from lakehouse.bronze.table import touch
from lakehouse.checkpoint import Checkpoint, forget, place_of, version_of
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.declaration import product_declaration
from lakehouse.gold.stateful import store_of
from lakehouse.judged import Judged
from lakehouse.livewriter import LiveWriter
from lakehouse.maintain import Maintenance
from lakehouse.narrow import narrowed
from lakehouse.pace import Pace
from lakehouse.quality.watch import Watch
from lakehouse.running import RunningQuery
from lakehouse.silver.conform import conform
from lakehouse.silver.quarantine import Quarantine

log = logging.getLogger(__name__)


def start_live(
    spark: SparkSession,
    settings: Settings,
    pipeline: Pipeline,
    source: Source,
    products: Sequence[Product],
    name: str,
    *,
    keep_rejected: bool = True,
    restore_rejected: bool = False,
    since: int = 0,
    start_version: int = -1,
    trigger_ms: int = 0,
    waiting: int = 0,
) -> RunningQuery[LiveWriter]:
    """Start the query that keeps ``products`` of ``source``; bronze must exist.

    Products that the query's checkpoint does not cover (new ones, or kept by another query until now) are first built
    from bronze.

    Args:
        name: of the query and its checkpoint; one query of a name runs at a time.
        keep_rejected: this query is the one that keeps the source's rows of quarantine.
        restore_rejected: quarantine is not there (any more): fill in what the checkpoint covers.
        since: events of bronze commits up to this time count in none of these products (microseconds since the epoch).
        start_version: bronze version to stream from where no batch was ever done, for a query whose index of seen
            events holds all before it; -1: build from bronze.
        trigger_ms: at most one batch in so long; 0: one after the other.
        waiting: events that are about to come at once.
    """
    lake = Lake(settings.lake)
    folder = lake.checkpoint(name)
    table = lake.bronze(source.name)
    judged = Judged(lake.state / "seen" / name, source)
    if judged.otherwise():
        log.warning("the declaration of source %s has changed: its products are built from bronze again", source.name)
        forget(folder)  # in this order: a crash in between says the same again
        crash_point("rebuild.after_forget")
        forget(judged.folder)
    seen = seen_index(judged.folder, source)
    stores = [store_of(p, lake.table(p.layer, p.name), pipeline.name, product_declaration(p, source)) for p in products]
    quarantine = Quarantine(lake.quarantine()) if keep_rejected else None
    watch = Watch(lake, source, keep_warned=keep_rejected, again=judged.warned_otherwise())
    care = Maintenance(lake, pipeline=pipeline)
    pace = Pace(settings.spark.conf)
    writer = LiveWriter(source, stores, quarantine, seen, folder, care, watch, table.path, pace, since)
    try:
        done = Checkpoint.read(folder)
        if start_version >= 0 and not done.bronze and seen.position():
            forget(folder)
            start = start_version
        else:
            start = _catch_up(spark, table.path, source, writer, done, folder, restore_rejected)
        for kept in (quarantine, watch.warnings):
            if kept is not None:
                kept.create()  # only now: while one is absent, what the checkpoint covers has still to be filled in
        crash_point("rebuild.before_note")
        judged.note()
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
        rows = (
            spark.readStream.format("delta")
            .option("startingVersion", start)
            .option("maxBytesPerTrigger", settings.spark.max_bytes_per_trigger)
            .option("ignoreDeletes", "true")  # days that bronze's own retention ends, and nothing else
            .load(str(table.path))
        )
        events = narrowed(conform(rows, source), source, products)  # planned once for the whole query
        stream = (
            events.writeStream.queryName(name)
            .option("checkpointLocation", str(folder))
            .trigger(processingTime=f"{trigger_ms} milliseconds")
            .foreachBatch(writer)
        )
        with pace.begun(spark, waiting):
            query = stream.start()
    except BaseException:
        writer.close()  # a query that could not start may be started again in this process
        raise
    return RunningQuery(query, writer)


def _catch_up(
    spark: SparkSession,
    bronze: Path,
    source: Source,
    writer: LiveWriter,
    done: Checkpoint,
    folder: Path,
    restore_rejected: bool,
) -> int:
    """Build what the checkpoint does not cover; returns the bronze version to stream from where there is none."""
    if not done.bronze:
        forget(folder)
        start = touch(bronze)
        if start > 1 or any(store.mark() for store in writer.stores):
            log.info("building %d products of %s from bronze", len(writer.stores), source.name)
            writer.rebuild(spark, bronze, start - 1, writer.stores)
        return start
    absent = [store for store in writer.stores if (mark := store.mark()) is None or mark.query != done.query]
    for store in writer.stores:
        if store not in absent and (why := store.outdated()):
            log.warning("product %s is built from bronze again: %s", store.product.name, why)
            absent.append(store)
    behind = place_of(writer.seen.position()) < place_of(done.bronze)
    if absent or restore_rejected or writer.watch.restore or behind:
        version_done = version_of(done.bronze)
        if version_done is None:  # the checkpoint stands inside a bronze version: leave it and build all, once
            return _catch_up(spark, bronze, source, writer, Checkpoint("", -1, ""), folder, restore_rejected)
        writer.rebuild(spark, bronze, version_done, absent, done, restore_rejected)
    return 0
