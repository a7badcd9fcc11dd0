"""Bronze to products: one streaming query a source keeps all its products.

Steps of one micro-batch, and what a crash after each of them means (each has a crash point):

1. Spark writes to its checkpoint which bronze files the batch holds. Crash: the same batch runs again.
2. The batch is parsed and cached; the index of seen events says which rows are first copies, and is made durable.
   Crash: judging again gives the same answer.
3. Each product merges its partial rows and commits them with the batch's number in the same commit. Crash in the
   middle: the batch runs again; products that hold it skip it.
4. Spark notes in its checkpoint that the batch is done.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.batch import build, copies, rejected_rows, run_partial
from lakehouse.bronze.horizon import seen_index
from lakehouse.bronze.query import SMALL_BATCH
from lakehouse.bronze.seen import SeenIndex
from lakehouse.bronze.table import touch
from lakehouse.contract.expectations import WARN
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import FILE_TOPIC, Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.gold.stateful import store_of
from lakehouse.gold.store import BatchMark, ProductStore, later
from lakehouse.maintain import Maintenance
from lakehouse.narrow import narrowed
from lakehouse.pace import Pace
from lakehouse.quality.watch import Watch, warned_rows
from lakehouse.running import RunningQuery
from lakehouse.silver.conform import conform
from lakehouse.silver.quarantine import Quarantine
from lakehouse.stateful.whole import before, inside, takes_in_order, whole_versions

log = logging.getLogger(__name__)

_JUDGED = ("dedupe_key", "topic", "partition", "offset", "bronze_at", "received_at", "event_time")
_FEW = 500  # duplicates named one by one in a filter; more are joined


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a streaming query's checkpoint folder says.

    Attributes:
        query: its id; empty for a query that never ran.
        batch: the last batch that is done, -1 for none.
        bronze: the Delta source's offset behind that batch (JSON); empty for none.
    """

    query: str
    batch: int
    bronze: str

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """The state of the checkpoint in ``folder``."""
        try:
            query = json.loads((folder / "metadata").read_text(encoding="utf-8"))["id"]
        except (OSError, ValueError, KeyError):
            return cls("", -1, "")
        done = [int(p.name) for p in (folder / "commits").glob("[0-9]*") if p.name.isdigit()]
        if not done:
            return cls(query, -1, "")
        return cls(query, max(done), offset_of(folder, max(done)))


def offset_of(checkpoint: Path, batch: int) -> str:
    """The Delta source's offset behind a batch (JSON), from the query's write-ahead log."""
    return (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[-1]


def version_of(offset: str) -> int | None:
    """The bronze version that an offset ends with, or None where it lies inside a version."""
    found = json.loads(offset)
    return int(found["reservoirVersion"]) - 1 if int(found["index"]) < 0 else None


def _place(offset: str) -> tuple[int, int]:
    """An offset as something that sorts in bronze's order."""
    if not offset:
        return (-1, 0)
    found = json.loads(offset)
    return int(found["reservoirVersion"]), int(found["index"])


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
    """
    lake = Lake(settings.lake)
    folder = lake.checkpoint(name)
    table = lake.bronze(source.name)
    judged = _Judged(lake.state / "seen" / name, source)
    if judged.otherwise():
        log.warning("the declaration of source %s has changed: its products are built from bronze again", source.name)
        _forget(folder)  # in this order: a crash in between says the same again
        crash_point("rebuild.after_forget")
        _forget(judged.folder)
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
            _forget(folder)
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
        query = (
            narrowed(conform(rows, source), source, products)  # planned once for the whole query
            .writeStream.queryName(name)
            .option("checkpointLocation", str(folder))
            .trigger(processingTime=f"{trigger_ms} milliseconds")
            .foreachBatch(writer)
            .start()
        )
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
        _forget(folder)
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
    behind = _place(writer.seen.position()) < _place(done.bronze)
    if absent or restore_rejected or writer.watch.restore or behind:
        version_done = version_of(done.bronze)
        if version_done is None:  # the checkpoint stands inside a bronze version: leave it and build all, once
            return _catch_up(spark, bronze, source, writer, Checkpoint("", -1, ""), folder, restore_rejected)
        writer.rebuild(spark, bronze, version_done, absent, done, restore_rejected)
    return 0


class _Judged:
    """By which declaration of its source an index of seen events was made: which copy counts depends on it."""

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self._file = folder / "declaration"
        self._declaration = source_declaration(source)
        self._warned = json.dumps(source.expected(WARN), sort_keys=True)

    def otherwise(self) -> bool:
        """Whether it was made by another one; an index that says nothing was just made, or is absent."""
        return self._noted()[0] not in ("", self._declaration)

    def warned_otherwise(self) -> bool:
        """Whether other events were noted as warnings until now than would be."""
        return self._noted()[-1] != self._warned

    def note(self) -> None:
        """The index now follows the declaration."""
        self._file.write_text(f"{self._declaration}\n{self._warned}", encoding="utf-8")

    def _noted(self) -> list[str]:
        return self._file.read_text(encoding="utf-8").split("\n") if self._file.is_file() else ["", "{}"]


def _forget(folder: Path) -> None:
    """Remove a checkpoint that never finished a batch, or that is given up."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


class LiveWriter:
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
        self._query = ""
        self._busy = threading.Lock()
        self._through: dict[str, int] = {}
        self._clock: int | None = None
        for store in stores:
            mark = store.mark()
            if mark is not None:
                self._through = {**mark.through, **self._through}
                self._clock = later(self._clock, mark.clock)

    def __call__(self, events: DataFrame, batch: int) -> None:
        with self._busy:  # Spark does not wait for us when it stops the query
            self._take(events, batch)

    def close(self) -> None:
        """Wait for the batch in hand, and close the files."""
        with self._busy:
            self._maintenance.close()
            self.seen.close()

    def _take(self, events: DataFrame, batch: int) -> None:
        self._query = self._query or Checkpoint.read(self._checkpoint).query
        offset = offset_of(self._checkpoint, batch)
        events.persist()
        try:
            rejected = F.col("reason").isNotNull().alias("rejected")
            rows = events.select(*_JUDGED, rejected, *self.watch.columns).toArrow()
            verdict = self.seen.judge(rows, offset)
            crash_point("live.after_judge")
            first = rows.filter(pa.array(verdict.first))
            first = self._of_first(first)
            self.watch.check(first)
            fresh = _without(events, rows.filter(pa.array(~verdict.first))) if verdict.duplicates else events
            if self.watch.warned(first):
                assert self.watch.warnings is not None
                self.watch.warnings.apply(warned_rows(fresh), self._query, batch)
            self._commit(fresh, self._mark(rows, first, batch, offset), bool(pc.any(first["rejected"]).as_py()))
        finally:
            events.unpersist()
        self._pace.suit(events.sparkSession, rows.num_rows)
        self._maintenance.after_batch(self.stores)

    def _commit(self, fresh: DataFrame, mark: BatchMark, rejected: bool) -> None:
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
        _side_by_side([partial(keep, store) for store in self.stores if store not in later_on])
        if later_on:
            whole = whole_versions(fresh, self.source, self._bronze, begins, mark.bronze, self.seen)
            self._counted(whole).createOrReplaceTempView(self.source.name)
            reached = replace(mark, bronze=before(mark.bronze))
            _side_by_side([partial(keep, store, reached) for store in later_on])
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

    def _mark(self, rows: pa.Table, first: pa.Table, batch: int, offset: str) -> BatchMark:
        """What the batch's commits say; moves on how far in Kafka the products reach."""
        ends = rows.group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist()
        for end in ends:
            if end["topic"].startswith(FILE_TOPIC):
                continue  # thousands of files; COMMIT_BRONZE says that they are in
            place = f"{end['topic']}/{end['partition']}"
            self._through[place] = max(self._through.get(place, 0), end["offset_max"] + 1)
        valid = first.filter(pc.invert(first["rejected"]))
        times = pc.cast(valid["received_at"], pa.int64()).to_numpy()
        self._clock = later(self._clock, newest(valid))
        return BatchMark(
            self._query,
            batch,
            offset,
            dict(self._through),
            len(times),
            int(times.min()) // 1000 if len(times) else None,
            int(times.max()) // 1000 if len(times) else None,
            self._clock,
        )

    def rebuild(
        self,
        spark: SparkSession,
        bronze: Path,
        version: int,
        stores: list[ProductStore],
        done: Checkpoint | None = None,
        restore_rejected: bool = False,
    ) -> None:
        """Build products, and the index where it is empty, from bronze up to ``version``."""
        whole = build(spark, bronze, self.source, version)
        events = whole.events.persist()
        try:
            rejected = F.col("reason").isNotNull().alias("rejected")
            rows = events.select(*_JUDGED, rejected, *self.watch.columns).toArrow()
            self.watch.check(rows)
            offset = done.bronze if done else json.dumps({"reservoirVersion": version + 1, "index": -1})
            again = copies(spark, bronze, self.source, version) if self.source.dedupe_horizon else None
            self.seen.judge(rows if again is None else again.select(*_JUDGED).toArrow(), offset)
            ends = spark.read.format("delta").option("versionAsOf", version).load(str(bronze))
            ends = ends.groupBy("topic", "partition").agg(F.max("offset").alias("end"))
            ends = ends.where(~F.col("topic").startswith(FILE_TOPIC))
            through = {f"{r['topic']}/{r['partition']}": r["end"] + 1 for r in ends.collect()}
            self._clock = newest(self._of_first(rows.filter(pc.invert(rows["rejected"]))))
            number = done.batch if done else version
            mark = BatchMark(done.query if done else "build", number, offset, through, clock=self._clock)
            valid = self._counted(events)
            for store in stores:
                store.replace(run_partial(valid, self.source.name, store.operator), mark)
                crash_point("rebuild.after_first_replace")
            # A query that goes on keeps it already, and knows which batches it holds.
            if self.quarantine is not None and (done is None or restore_rejected):
                self.quarantine.replace(rejected_rows(events, self.source), self.source.name)
            if self.watch.warnings is not None and (done is None or restore_rejected or self.watch.restore):
                self.watch.warnings.replace(warned_rows(events), self.source.name)
            self._through.update(through)
        finally:
            events.unpersist()


def newest(valid: pa.Table) -> int | None:
    """The clock's value by these events (:class:`~lakehouse.gold.store.BatchMark`), or None where there are none."""
    happened, arrived = (pc.cast(valid[name], pa.int64()) for name in ("event_time", "received_at"))
    found = pc.max(pc.min_element_wise(happened, arrived)).as_py()
    return None if found is None else int(found)


def _without(events: DataFrame, copies: pa.Table) -> DataFrame:
    """Events less those at the coordinates of ``copies``."""
    places = copies.select(["topic", "partition", "offset"])
    if places.num_rows > _FEW:
        other = events.sparkSession.createDataFrame(places)
        return events.join(F.broadcast(other), ["topic", "partition", "offset"], "left_anti")
    condition = F.lit(False)
    for (topic, partition), offsets in _grouped(places).items():
        here = (F.col("topic") == topic) & (F.col("partition") == partition)
        condition = condition | (here & F.col("offset").isin(offsets))
    return events.where(~condition)


def _grouped(places: pa.Table) -> dict[tuple[str, int], list[int]]:
    grouped: dict[tuple[str, int], list[int]] = {}
    for row in places.to_pylist():
        grouped.setdefault((row["topic"], row["partition"]), []).append(row["offset"])
    return grouped


def _side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run the tasks at once in threads with Spark's local properties; the first error is raised after all ended."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the query's own thread
            errors.append(error)

    threads = [InheritableThread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
