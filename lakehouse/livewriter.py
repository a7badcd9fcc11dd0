"""What the live query of a source does with a micro-batch: it keeps all products of the source.

Steps of one micro-batch, and what a crash after each of them means (each has a crash point):

1. Spark writes to its checkpoint which bronze files the batch holds. Crash: the same batch runs again.
2. The batch is parsed and kept; the index of seen events says which rows are first copies, and is made durable.
   Crash: judging again gives the same answer.
3. Each product merges its partial rows and commits them with the batch's number in the same commit. Crash in the
   middle: the batch runs again; products that hold it skip it.
4. Spark notes in its checkpoint that the batch is done.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.batch import build, clock_of, rejected_rows, run_partial
from lakehouse.bronze.query import SMALL_BATCH
from lakehouse.bronze.seen import JUDGED, SeenIndex
from lakehouse.checkpoint import Checkpoint, offset_behind, offset_of, place_of
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import FILE_TOPIC
from lakehouse.contract.pipeline import Source
from lakehouse.counts import count_batch
from lakehouse.gold.store import BatchMark, ProductStore
from lakehouse.judged import without
from lakehouse.kept import kept
from lakehouse.maintain import Maintenance
from lakehouse.pace import Pace
from lakehouse.quality.watch import Watch, warned_rows
from lakehouse.silver.quarantine import Quarantine
from lakehouse.slices import slices
from lakehouse.stateful.whole import before, inside, takes_in_order, whole_versions
from lakehouse.writer import BatchWriter, Marks, side_by_side

_READ = (*JUDGED, "received_at", "event_time")
_JUDGED_BYTES = 128  # of a row, about, as it is fetched to be judged


class LiveWriter(BatchWriter):
    """Merges one micro-batch after another into the products of a source."""

    def __init__(
        self,
        source: Source,
        stores: list[ProductStore],
        quarantine: Quarantine | None,
        seen: SeenIndex,
        checkpoint: Path,
        maintenance: Maintenance,
        watch: Watch,
        bronze: Path,
        pace: Pace,
        since: int = 0,
    ) -> None:
        super().__init__()
        self.source = source
        self._bronze = bronze
        self._since = since
        self.stores = stores
        self.quarantine = quarantine
        self.seen = seen
        self._checkpoint = checkpoint
        self._maintenance = maintenance
        self.watch = watch
        self._pace = pace
        self._marks = Marks(checkpoint)
        for store in stores:
            self._marks.go_on_from(store.mark())

    def close_files(self) -> None:
        """See :class:`BatchWriter`."""
        self._maintenance.close()
        self.seen.close()

    def take(self, events: DataFrame, batch: int) -> None:
        """See :class:`BatchWriter`."""
        offset = offset_of(self._checkpoint, batch)
        with kept(events) as events:
            rejected = F.col("reason").isNotNull().alias("rejected")
            rows = events.select(*_READ, rejected, *self.watch.columns).toArrow()
            verdict = self.seen.judge(rows, offset)
            crash_point("live.after_judge")
            first = rows.filter(pa.array(verdict.first))
            first = self._of_first(first)
            self.watch.check(first)
            fresh = without(events, rows.filter(pa.array(~verdict.first))) if verdict.duplicates else events
            if self.watch.warned(first):
                assert self.watch.warnings is not None
                self.watch.warnings.apply(warned_rows(fresh), self._marks.query, batch)
            counted = first.filter(pc.invert(first["rejected"]))
            mark = self._marks.of(batch, offset, rows, counted)
            self._commit(fresh, mark, rejected=counted.num_rows < first.num_rows)
        count_batch(
            self._checkpoint.name,
            rows.num_rows,
            copies=verdict.duplicates,
            rejected=first.num_rows - counted.num_rows,
        )
        self._pace.suit(events.sparkSession, rows.num_rows)
        self._maintenance.after_batch(self.stores)

    def _commit(self, fresh: DataFrame, mark: BatchMark, *, rejected: bool) -> None:
        crash_point("live.before_commit")
        valid = self._counted(fresh)
        if mark.events < SMALL_BATCH:
            valid = valid.coalesce(1)  # one task a product, and no shuffle
        valid.createOrReplaceTempView(self.source.name)
        if rejected and self.quarantine is not None:
            self.quarantine.apply(rejected_rows(fresh, self.source), mark.query, mark.batch)

        def keep(store: ProductStore, mark: BatchMark = mark) -> None:
            if not store.holds(mark.query, mark.batch):
                store.apply(valid.sparkSession.sql(store.operator.partial_sql()).toArrow(), mark)
                crash_point("live.after_first_commit")

        ordered = [store for store in self.stores if takes_in_order(store.operator)]
        begins = offset_of(self._checkpoint, mark.batch - 1) if ordered and mark.batch else ""
        later_on = ordered if inside(begins) is not None or inside(mark.bronze) is not None else []
        side_by_side([partial(keep, store) for store in self.stores if store not in later_on])
        if later_on:
            whole = whole_versions(fresh, self.source, self._bronze, begins, mark.bronze, self.seen)
            self._counted(whole).createOrReplaceTempView(self.source.name)
            reached = replace(mark, bronze=before(mark.bronze))
            side_by_side([partial(keep, store, reached) for store in later_on])
        crash_point("live.after_commits")

    def _counted(self, events: DataFrame) -> DataFrame:
        """The valid ones of first copies, from the time on from which they count."""
        valid = events.where(F.col("reason").isNull())
        return valid.where(F.unix_micros("bronze_at") > self._since) if self._since else valid

    def _of_first(self, rows: pa.Table) -> pa.Table:
        """The rows among first copies that count in these products."""
        if not self._since:
            return rows
        return rows.filter(pc.greater(pc.cast(rows["bronze_at"], pa.int64()), self._since))

    def rebuild(
        self,
        spark: SparkSession,
        bronze: Path,
        version: int,
        stores: list[ProductStore],
        done: Checkpoint | None = None,
        restore_rejected: bool = False,
    ) -> None:
        """Build products, and the index where it does not reach that far, from bronze up to ``version``."""
        whole = build(spark, bronze, self.source, version)
        events = whole.events.persist()
        try:
            self.watch.check_all(events)
            offset = done.bronze if done else offset_behind(version)
            if place_of(self.seen.position()) < place_of(offset):
                self._fill(spark, bronze, version, offset)
            ends = spark.read.format("delta").option("versionAsOf", version).load(str(bronze))
            ends = ends.groupBy("topic", "partition").agg(F.max("offset").alias("end"))
            ends = ends.where(~F.col("topic").startswith(FILE_TOPIC))
            through = {f"{r['topic']}/{r['partition']}": r["end"] + 1 for r in ends.collect()}
            valid = self._counted(events)
            self._marks.clock = clock_of(valid)
            number = done.batch if done else version
            mark = BatchMark(done.query if done else "build", number, offset, through, clock=self._marks.clock)
            for store in stores:
                store.replace(run_partial(valid, self.source.name, store.operator), mark)
                crash_point("rebuild.after_first_replace")
            # A query that goes on keeps it already, and knows which batches it holds.
            through_batch = (done.query, done.batch) if done else None
            if self.quarantine is not None and (done is None or restore_rejected):
                self.quarantine.replace(rejected_rows(events, self.source), self.source.name, through_batch)
            if self.watch.warnings is not None and (done is None or restore_rejected or self.watch.restore):
                self.watch.warnings.replace(warned_rows(events), self.source.name, through_batch)
            self._marks.through.update(through)
        finally:
            events.unpersist()

    def _fill(self, spark: SparkSession, bronze: Path, version: int, offset: str) -> None:
        """Enter all of bronze in the index; the position last, so that what a crash breaks off is done again."""
        rows = pa.table({})
        for events in slices(spark, bronze, self.source, version, F.lit(_JUDGED_BYTES)):
            rows = events.select(*JUDGED).toArrow()
            self.seen.judge(rows, "")
        self.seen.judge(rows.slice(0, 0), offset)
