"""Keeps one join at a version of each of its two bronze tables.

The product's position is these two versions, in its own commit. Steps from one position to the next, and what a crash
after each of them means (each has a crash point):

1. The dedupe index of each side says which rows are first copies. Crash: the same versions are read and judged again.
2. They are entered in the index of the join under the step's number, the sum of both versions. Crash: entering the same
   rows again tells the same changes.
3. The product is committed with its new position in the same commit. Crash: the next step begins there.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import zip_longest
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType
from pyspark.sql.window import Window

from lakehouse.batch import build, byte_size, clock_of, kafka_ends, slices
from lakehouse.bronze.readers import id_of, note_reader
from lakehouse.bronze.seen import JUDGED, seen_index
from lakehouse.bronze.table import COLUMNS, changes, newest_version
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.pipeline.source import ENVELOPE_COLUMNS
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import LakePath, spark_uri
from lakehouse.counts import count_batch
from lakehouse.declaration import product_declaration, source_declaration
from lakehouse.errors import VersionsGone
from lakehouse.gold.mark import BatchMark, Marks
from lakehouse.gold.state_store import store_of
from lakehouse.live import BronzeFollower
from lakehouse.maintain.care import Maintenance
from lakehouse.operators.aggregate import VIEW, Join
from lakehouse.silver.conform import conform, payload_columns
from lakehouse.stateful.join_index import LEFT, RIGHT, JoinIndex, PairChange, index_folder

log = logging.getLogger(__name__)

Versions = tuple[int, int]
"""Of the left and of the right bronze table."""

_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "allowNonNumericNumbers": "true"}
_PLACES = ("dedupe_key", "topic", "partition", "offset", "bronze_at", "received_at", "event_time")
_TIMES = ("event_time", "received_at")
_ENTRY_BYTES = 256  # of a fetched event, about, beside its payload
_QUIET_S = 1_800.0  # commits without rows (compaction) are noted in the product this often


class LiveJoin(BronzeFollower):
    """Keeps a join up to date with both bronze tables, which must exist.

    Attributes:
        position: bronze versions that the product holds.
    """

    def __init__(self, spark: SparkSession, settings: Settings, pipeline: Pipeline, product: Product) -> None:
        super().__init__(Lake.of(settings), f"join-{product.name}", product.trigger_ms)
        lake = Lake.of(settings)
        self.position: Versions = (-1, -1)
        self._spark = spark
        self._lake = lake
        self._product = product
        self._seen_folder = lake.state / "seen" / self.name
        self._joined = JoinedSources(spark, pipeline, product)
        self._tables = (lake.bronze(product.source), lake.bronze(product.right))
        self._table_ids = [id_of(table) for table in self._tables]
        self._application = f"bronze-{'-'.join(self._table_ids)}"
        left, right = self._joined.sources
        declaration = product_declaration(product, left) + source_declaration(right)
        self._store = store_of(product, lake.table(product.layer, product.name), pipeline.name, declaration)
        self._no_pairs = self._joined.partial([])
        self._max_bytes = byte_size(settings.spark.max_bytes_per_trigger)
        self._maintenance = Maintenance()
        self._marks = Marks()
        self._committed_at = time.monotonic()
        self._open_indexes()

    # --- life

    def _catch_up(self) -> None:
        left, right = (DeltaTable(str(table.path)).version() for table in self._tables)
        held = self._held()
        if held is not None:
            try:
                self._go_on(held)
            except VersionsGone as gone:
                log.warning("%s", gone)
                held = None
        if held is None:
            self._build((left, right))
        self._note_readers()
        self._follow()

    def _follow(self) -> None:
        left, right = (newest_version(*pair) for pair in zip(self._tables, self.position, strict=True))
        if (left, right) != self.position:
            self._advance((left, right), self._max_bytes)
            self._maintenance.after_batch([self._store])

    def _close(self) -> None:
        self._close_indexes()

    # --- from one position to another

    def _advance(self, until: Versions, max_bytes: int) -> None:
        """Read bronze from the position up to a later one, with at most so many bytes of each side in one step."""
        found = [changes(*of, max_bytes) for of in zip(self._tables, self.position, until, strict=True)]
        for step in zip_longest(*found):
            left, right = (one.version if one else at for one, at in zip(step, self.position, strict=True))
            files = [one.files if one else () for one in step]
            if any(files) or time.monotonic() - self._committed_at > _QUIET_S:
                self._step((left, right), files)
            self.position = (left, right)
            self._note_readers()

    def _step(self, versions: Versions, files: Sequence[Sequence[str]]) -> None:
        """Bring the indexes and the product to these versions, given all data files that they added."""
        rows = pa.concat_tables([self._joined.read(files[side], side) for side in (LEFT, RIGHT)])
        valid = rows.filter(pc.invert(rows["rejected"]))
        first = pa.concat_tables([self._first_copies(valid, side, str(versions[side])) for side in (LEFT, RIGHT)])
        crash_point("join.after_judge")
        found = self._index.enter(first, sum(versions), _text(versions))
        crash_point("join.after_index")
        mark = self._marks.of(self._application, versions, rows, first)
        gained, lost = (self._pairs([change for change in found if change.sign == sign]) for sign in (1, -1))
        partial = self._joined.operator.signed(gained, lost)
        crash_point("join.before_commit")
        self._store.apply(partial, mark)
        self._committed_at = time.monotonic()
        crash_point("join.after_commit")
        if self._product.retention_ms is not None and self._marks.clock is not None:
            self._index.forget(self._marks.clock - 1000 * (self._product.retention_ms + self._product.within_ms))
        refused = rows.num_rows - valid.num_rows
        count_batch(self.name, rows.num_rows, copies=valid.num_rows - first.num_rows, rejected=refused)

    def _first_copies(self, valid: pa.Table, side: int, version: str) -> pa.Table:
        rows = valid.filter(pc.equal(valid["side"], side))
        return rows.filter(pa.array(self._seen[side].judge(rows.select(JUDGED), version)))

    def _pairs(self, found: Sequence[PairChange]) -> pa.Table:
        return self._joined.partial(found) if found else self._no_pairs

    def _note_readers(self) -> None:
        for side in (LEFT, RIGHT):
            name = f"{self.name}-{self._joined.sources[side].name}"
            note_reader(self._lake, name, self._table_ids[side], self.position[side] + 1)

    # --- restart and build

    def _held(self) -> Versions | None:
        """The position of the product; None: it has to be built."""
        mark = self._store.mark()
        if mark is None or mark.application != self._application:
            return None
        if why := self._store.outdated():
            log.warning("join %s is built from bronze again: %s", self._product.name, why)
            return None
        self._marks.go_on_from(mark)
        left, right = mark.versions
        return left, right

    def _go_on(self, held: Versions) -> None:
        """Make the indexes fit the product's position, and repeat the step that a crash broke off."""
        self.position = held
        noted = [int(seen.position() or -1) for seen in self._seen]
        judged = (noted[LEFT], noted[RIGHT])
        if min(judged[LEFT] - held[LEFT], judged[RIGHT] - held[RIGHT]) < 0 or self._index.position() not in (
            _text(held),
            _text(judged),
        ):
            self._fill(held)
        elif judged != held:
            self._advance(judged, 1 << 62)  # the same rows in one step again

    def _build(self, versions: Versions) -> None:
        """Build the product and the indexes from all of bronze. Crash: it is built again, or the indexes are filled."""
        log.info("building join %s from bronze", self._product.name)
        self._clear_indexes()  # first: an index of another declaration must not meet the new product
        crash_point("join.after_clear")
        paths = [table.path for table in self._tables]
        for path, version in zip(paths, versions, strict=True):
            self._marks.reached(kafka_ends(self._spark, path, version))
        partial, self._marks.clock = self._joined.build(paths, versions)
        through = dict(self._marks.through)
        mark = BatchMark(self._application, versions, through, clock=self._marks.clock)
        self._store.replace(partial, mark)
        crash_point("join.after_replace")
        self._fill(versions)
        self.position = versions

    def _fill(self, versions: Versions) -> None:
        """Enter all of bronze in the indexes; the positions last, so that what a crash breaks off is done again."""
        self._clear_indexes()
        rows = pa.table({})
        for side in (LEFT, RIGHT):
            for rows in self._joined.slices(self._tables[side].path, versions[side], side):
                self._index.enter(self._first_copies(rows, side, ""), sum(versions), "", changes=False)
            self._first_copies(rows.slice(0, 0), side, str(versions[side]))
        self._index.enter(rows.slice(0, 0), sum(versions), _text(versions), changes=False)

    def _open_indexes(self) -> None:
        left, right = self._joined.sources
        self._seen = [seen_index(self._seen_folder / "left", left), seen_index(self._seen_folder / "right", right)]
        self._index = JoinIndex(index_folder(self._lake, self._product.name), self._product)

    def _close_indexes(self) -> None:
        for seen in self._seen:
            seen.close()
        self._index.close()

    def _clear_indexes(self) -> None:
        self._close_indexes()
        for folder in (self._seen_folder, index_folder(self._lake, self._product.name)):
            shutil.rmtree(folder, ignore_errors=True)
        self._open_indexes()


def _text(versions: Versions) -> str:
    """A position as the index carries it."""
    return f"{versions[LEFT]},{versions[RIGHT]}"


class JoinedSources:
    """The two sources of a join in Spark: rows for its index, its pairs, and all of it as one batch job."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, product: Product) -> None:
        self.product = product
        self.sources = (pipeline.sources[product.source], pipeline.sources[product.right])
        self.operator = Join(product)
        self._spark = spark.newSession()  # another join's view has the same name
        nothing = self._spark.createDataFrame(COLUMNS.empty_table())
        self._events = [self._seen_by_sql(conform(nothing, source), source) for source in self.sources]

    def rows(self, events: DataFrame, side: int) -> pa.Table:
        """Conformed events of one side as :meth:`~lakehouse.stateful.join_index.JoinIndex.enter` takes them."""
        return events.select(
            F.lit(side).alias("side"),
            *_PLACES,
            F.col("event_time").alias("at"),
            F.col("reason").isNotNull().alias("rejected"),
            self._key(side).alias("join_key"),
            F.to_json(self._event(side), _JSON).alias("body"),
        ).toArrow()

    def read(self, files: Sequence[str], side: int) -> pa.Table:
        """The rows of data files of a bronze table."""
        schema = from_arrow_schema(pa.schema([field for field in COLUMNS if field.name != "date"]))
        bronze = (
            self._spark.read.schema(schema).parquet(*map(spark_uri, files))
            if files
            else self._spark.createDataFrame([], schema)
        )
        return self.rows(conform(bronze, self.sources[side]), side)

    def slices(self, bronze: LakePath, version: int, side: int) -> Iterator[pa.Table]:
        """The rows of all valid events at a version of bronze, in bronze's order."""
        width = F.lit(_ENTRY_BYTES) + F.coalesce(F.octet_length("payload"), F.lit(0))
        for events in slices(self._spark, bronze, self.sources[side], version, width):
            yield self.rows(events.where(F.col("reason").isNull()), side)

    def partial(self, changes: Sequence[PairChange]) -> pa.Table:
        """What the join's SQL makes of these pairs, whatever their sign."""
        sides = ("left", "right")
        texts = {side: pa.array([getattr(change, side) for change in changes], pa.string()) for side in sides}
        events = [
            F.from_json(side, kind, _JSON).alias(source.name)
            for side, kind, source in zip(sides, self._events, self.sources, strict=True)
        ]
        return self._aggregated(self._spark.createDataFrame(pa.table(texts)).select(*events).coalesce(1))

    def build(self, tables: Sequence[LakePath], versions: Sequence[int]) -> tuple[pa.Table, int | None]:
        """What the join's SQL makes of all pairs at these versions of bronze, and the clock there.

        It shares neither the index nor the steps with a running join, and so is the proof of it.
        """
        of_sides = zip(tables, self.sources, versions, strict=True)
        events = [build(self._spark, *of).where(F.col("reason").isNull()).persist() for of in of_sides]
        try:
            clock = clock_of(events[LEFT].select(*_TIMES).union(events[RIGHT].select(*_TIMES)))
            return self._aggregated(self._paired(events)), clock
        finally:
            for one in events:
                one.unpersist()

    def _paired(self, events: Sequence[DataFrame]) -> DataFrame:
        left, right = (
            one.select(
                self._event(side).alias(self.sources[side].name),
                self._key(side).alias(f"key{side}"),
                F.unix_micros("event_time").alias(f"at{side}"),
                F.col("dedupe_key").alias(f"id{side}"),
            )
            for side, one in enumerate(events)
        )
        within = F.col("at0") + self.product.within_ms * 1000
        fits = (F.col("key0") == F.col("key1")) & F.col("at1").between(F.col("at0"), within)
        pairs = left.join(right, fits, "left" if self.product.kind == "left_outer" else "inner")
        if self.product.match == "first":
            order = Window.partitionBy("id0").orderBy("at1", "id1")
            pairs = pairs.withColumn("nth", F.row_number().over(order)).where("nth = 1")
        return pairs.select(*(F.col(f"`{source.name}`") for source in self.sources))

    def _aggregated(self, pairs: DataFrame) -> pa.Table:
        pairs.createOrReplaceTempView(VIEW)
        return self._spark.sql(self.operator.partial_sql()).toArrow()

    def _seen_by_sql(self, events: DataFrame, source: Source) -> StructType:
        """Those columns of one side, of payload and envelope, that the SQL reads."""
        wanted = self.operator.columns(source.name)
        offered = [*payload_columns(source), *ENVELOPE_COLUMNS]
        names = [name for name in offered if wanted is None or name.lower() in wanted] or ["event_id"]
        return events.select(*(F.col(f"`{name}`") for name in names)).schema

    def _event(self, side: int) -> Column:
        return F.struct(*(F.col(f"`{name}`") for name in self._events[side].names))

    def _key(self, side: int) -> Column:
        """16 bytes, equal if the columns are; null, which is equal to nothing, if one of them is null."""
        columns = [F.col(f"`{pair[side]}`").cast("string") for pair in self.product.columns_on]
        known = reduce(and_, (column.isNotNull() for column in columns))
        return F.when(known, F.unhex(F.md5(F.to_json(F.array(*columns)).cast("binary"))))
