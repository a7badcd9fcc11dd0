"""The query that keeps one join: both bronze tables in, pairs found in an index of what came before, one product out.

Steps of one micro-batch, and what a crash after each of them means (each has a crash point):

1. Spark writes to its checkpoint which files of both tables the batch holds. Crash: the same batch runs again.
2. The index of seen events says which rows are first copies. Crash: judging again gives the same answer.
3. They are entered in the index of the join, under the batch's number. Crash: entering again tells the same changes.
4. The product is committed with the batch's number in the same commit. Crash: the batch runs again and is skipped.
5. Spark notes in its checkpoint that the batch is done.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from lakehouse.bronze.horizon import seen_index
from lakehouse.bronze.seen import JUDGED, SeenIndex
from lakehouse.bronze.table import touch
from lakehouse.checkpoint import Checkpoint, forget, offset_behind, version_of
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.settings import Settings
from lakehouse.counts import count_batch
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.gold.stateful import store_of
from lakehouse.gold.store import BatchMark, ProductStore
from lakehouse.maintain.care import Maintenance
from lakehouse.silver.conform import conform
from lakehouse.slices import slices
from lakehouse.stateful.join import Join
from lakehouse.stateful.joinbuild import Sides, changes_sql, event_schema, joined_build, side_rows
from lakehouse.stateful.joinindex import LEFT, RIGHT, Change, JoinIndex
from lakehouse.writer import BatchWriter, Marks, RunningQuery

log = logging.getLogger(__name__)
_ENTRY_BYTES = 256  # of a fetched event, about, beside its payload


def query_name(product: str) -> str:
    """Name of a join's streaming query (and its checkpoint and indexes)."""
    return f"join-{product}"


def start_join(spark: SparkSession, settings: Settings, pipeline: Pipeline, product: Product) -> RunningQuery:
    """Start the query that keeps a join; both bronze tables must exist."""
    lake = Lake(settings.lake)
    name = query_name(product.name)
    sides = Sides(product, pipeline.sources[product.source], pipeline.sources[product.right])
    declaration = product_declaration(product, sides.left) + source_declaration(sides.right)
    store = store_of(product, lake.table(product.layer, product.name), pipeline.name, declaration)
    care = Maintenance(lake, pipeline=pipeline)
    schemas = (event_schema(spark, sides, 0), event_schema(spark, sides, 1))
    writer = JoinWriter(lake, sides, schemas, store, care)
    start = _Start(lake, writer, declaration).catch_up(spark)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)

    def rows(source: Source, version: int, number: int) -> DataFrame:
        stream = (
            spark.readStream.format("delta")
            .option("startingVersion", version)
            .option("maxBytesPerTrigger", settings.spark.max_bytes_per_trigger)
            .option("ignoreDeletes", "true")
            .load(str(lake.bronze(source.name).path))
        )
        return side_rows(conform(stream, source), sides, number)

    query = (
        rows(sides.left, start[0], 0)
        .unionByName(rows(sides.right, start[1], 1))
        .writeStream.queryName(name)
        .option("checkpointLocation", str(lake.checkpoint(name)))
        .trigger(processingTime=f"{product.trigger_ms} milliseconds")
        .foreachBatch(writer)
        .start()
    )
    return RunningQuery(query, writer)


class JoinWriter(BatchWriter):
    """Takes one micro-batch of both sides after another into a join's index and product."""

    def __init__(
        self,
        lake: Lake,
        sides: Sides,
        schemas: tuple[StructType, StructType],
        store: ProductStore,
        maintenance: Maintenance,
    ) -> None:
        super().__init__()
        assert isinstance(store.operator, Join)
        self.sides = sides
        self._schemas = schemas
        self.store = store
        self.operator: Join = store.operator
        self.folder = lake.checkpoint(query_name(store.product.name))
        self.tables = (lake.bronze(sides.left.name).path, lake.bronze(sides.right.name).path)
        self.seen_folder = lake.state / "seen" / query_name(store.product.name)
        self.index_folder = index_folder(lake, store.product.name)
        self.seen = self._open_seen()
        self.index = JoinIndex(self.index_folder, store.product)
        self.positions: list[str] = ["", ""]
        self._maintenance = maintenance
        self._ids = [str(DeltaTable(str(path)).metadata().id) for path in self.tables]
        self.marks = Marks()
        self._query = ""
        self.marks.go_on_from(store.mark())
        self._empty: pa.Table | None = None

    @property
    def query(self) -> str:
        """The streaming query's id, once it runs."""
        self._query = self._query or Checkpoint.read(self.folder).query
        return self._query

    def close_files(self) -> None:
        """See :class:`~lakehouse.writer.BatchWriter`."""
        self._maintenance.close()
        for seen in self.seen:
            seen.close()
        self.index.close()

    def clear(self) -> None:
        """Forget what was seen and remembered."""
        for seen in self.seen:
            seen.close()
        self.index.close()
        forget(self.seen_folder)
        forget(self.index_folder)
        self.seen = self._open_seen()
        self.index = JoinIndex(self.index_folder, self.store.product)

    def offsets(self, batch: int) -> list[str]:
        """Both Delta sources' offsets behind a batch (JSON); where Spark names none, where the source began."""
        found = list(self.positions)
        for line in (self.folder / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()[2:]:
            if line != "-":
                found[self._ids.index(json.loads(line)["reservoirId"])] = line
        return found

    def take(self, events: DataFrame, batch: int) -> None:
        """See :class:`~lakehouse.writer.BatchWriter`."""
        place = f"{self.query}/{batch}"
        rows = events.toArrow()
        valid = rows.filter(pc.invert(rows["rejected"]))
        first = pa.concat_tables([self._first(valid, side, place) for side in (LEFT, RIGHT)])
        crash_point("join.after_judge")
        changes = self.index.enter(first, batch, place)
        crash_point("join.after_index")
        mark = self.marks.of(self.query, batch, position_of(self.offsets(batch)), rows, first)
        if not self.store.holds(self.query, batch):
            gained = self._partial(events, [change for change in changes if change.sign > 0])
            lost = [change for change in changes if change.sign < 0]
            partial = self.operator.signed(gained, self._partial(events, lost) if lost else None)
            crash_point("join.before_commit")
            self.store.apply(partial, mark)
            crash_point("join.after_commit")
        retention = self.store.product.retention_ms
        if retention is not None and self.marks.clock is not None:
            self.index.forget(self.marks.clock - 1000 * (retention + self.store.product.within_ms))
        refused = rows.num_rows - valid.num_rows
        count_batch(self.folder.name, rows.num_rows, copies=valid.num_rows - first.num_rows, rejected=refused)
        self._maintenance.after_batch([self.store])

    def enter(self, valid: pa.Table, side: int, batch: int, place: str) -> None:
        """Enter events of one side in its index of seen events, and the first copies in that of the join."""
        self.index.enter(self._first(valid, side, place), batch, place, changes=False)

    def _first(self, valid: pa.Table, side: int, place: str) -> pa.Table:
        """First copies of one side."""
        rows = valid.filter(pc.equal(valid["side"], side))
        return rows.filter(pa.array(self.seen[side].judge(rows.select(JUDGED), place).first))

    def _open_seen(self) -> tuple[SeenIndex, SeenIndex]:
        return (
            seen_index(self.seen_folder / "left", self.sides.left),
            seen_index(self.seen_folder / "right", self.sides.right),
        )

    def _partial(self, events: DataFrame, changes: Sequence[Change]) -> pa.Table:
        if not changes and self._empty is not None:
            return self._empty
        found = changes_sql(events.sparkSession, self.sides, self.operator, changes, self._schemas)
        self._empty = found.slice(0, 0)
        return found


class _Start:
    """Brings a join to where its checkpoint stands, or to the end of bronze where there is none."""

    def __init__(self, lake: Lake, writer: JoinWriter, declaration: str) -> None:
        self._writer = writer
        self._file = writer.index_folder.with_suffix(".json")
        self._declaration = declaration

    def catch_up(self, spark: SparkSession) -> tuple[int, int]:
        """Build what the checkpoint does not cover; returns the versions to stream from where there is none."""
        writer = self._writer
        done = Checkpoint.read(writer.folder)
        noted = self._noted()
        if done.batch < 0 or noted is None:
            return self._anew(spark)
        writer.positions = [offset_behind(version) for version in noted]
        writer.positions = writer.offsets(done.batch)
        mark = writer.store.mark()
        place = f"{done.query}/{done.batch}"
        no_product = mark is None or mark.query != done.query or bool(writer.store.outdated())
        no_index = not all(_reaches(found.position(), place) for found in (writer.index, *writer.seen))
        if no_product or no_index:
            versions = [version_of(position) for position in writer.positions]
            if versions[0] is None or versions[1] is None:
                return self._anew(spark)
            through = (versions[0], versions[1])
            self._build(spark, through, done.query, done.batch, product=no_product, index=no_index)
        return noted[0] + 1, noted[1] + 1

    def _anew(self, spark: SparkSession) -> tuple[int, int]:
        writer = self._writer
        forget(writer.folder)
        starts = (touch(writer.tables[0]), touch(writer.tables[1]))
        through = (starts[0] - 1, starts[1] - 1)
        writer.positions = [offset_behind(version) for version in through]
        log.info("building join %s from bronze", writer.store.product.name)
        self._build(spark, through, "build", -1, product=True, index=True)
        self._file.write_text(json.dumps({"declaration": self._declaration, "through": through}), encoding="utf-8")
        return starts

    def _build(
        self, spark: SparkSession, through: tuple[int, int], query: str, batch: int, *, product: bool, index: bool
    ) -> None:
        writer = self._writer
        with joined_build(spark, writer.sides, writer.tables, through) as build:
            if index:
                writer.clear()
                for side in (LEFT, RIGHT):
                    self._fill(spark, side, through[side], batch, f"{query}/{batch}")
            writer.marks.through = dict(build.through)
            writer.marks.clock = build.clock()
            if product:
                number = batch if batch >= 0 else sum(through)
                place = position_of(writer.positions)
                mark = BatchMark(query, number, place, dict(writer.marks.through), clock=writer.marks.clock)
                writer.store.replace(build.partial(writer.operator), mark)

    def _fill(self, spark: SparkSession, side: int, version: int, batch: int, place: str) -> None:
        """Enter one side in both indexes; the positions last, so that what a crash breaks off is done again."""
        writer, valid = self._writer, F.col("reason").isNull()
        width = F.lit(_ENTRY_BYTES) + F.coalesce(F.octet_length("payload"), F.lit(0))
        rows = pa.table({})
        for events in slices(spark, writer.tables[side], writer.sides.source(side), version, width):
            rows = side_rows(events.where(valid), writer.sides, side).toArrow()
            writer.enter(rows, side, batch, "")
        writer.enter(rows.slice(0, 0), side, batch, place)

    def _noted(self) -> tuple[int, int] | None:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return tuple(found["through"]) if found["declaration"] == self._declaration else None


def index_folder(lake: Lake, product: str) -> Path:
    """Where a join's index lies."""
    return lake.state / "joins" / product


def position_of(offsets: Sequence[str]) -> str:
    """Both sources' offsets as the one text that a commit carries: the left one's, the right one's inside of it."""
    left, right = (json.loads(offset) for offset in offsets)
    return json.dumps({**left, "right": right}, separators=(",", ":"))


def versions_of(position: str) -> tuple[int, int] | None:
    """The bronze versions of both sides that a commit's position ends with, or None inside of a version."""
    left, right = version_of(position), version_of(json.dumps(json.loads(position)["right"]))
    return None if left is None or right is None else (left, right)


def _reaches(position: str, place: str) -> bool:
    """Whether an index at ``position`` holds the batch ``place``, both ``QUERY/BATCH``."""
    query, _, batch = position.rpartition("/")
    wanted, _, number = place.rpartition("/")
    return query == wanted and int(batch) >= int(number)
