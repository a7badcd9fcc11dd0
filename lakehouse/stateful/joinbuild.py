"""The rows of a join: what goes into its index, pairs as its SQL sees them, and the same as a batch job of Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from pyspark.sql.window import Window

from lakehouse.batch import build, clock_of
from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.lake import FILE_TOPIC
from lakehouse.contract.pipeline import Product, Source
from lakehouse.silver.conform import ENVELOPE_COLUMNS, conform, payload_schema
from lakehouse.stateful.join import VIEW, Join
from lakehouse.stateful.joinindex import LEFT, Change

_JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "allowNonNumericNumbers": "true"}
_PLACES = ("dedupe_key", "topic", "partition", "offset", "bronze_at", "received_at", "event_time")


@dataclass(frozen=True, slots=True)
class Sides:
    """The two sources of a join.

    Attributes:
        product: the join.
        left: its left source.
        right: its right source.
    """

    product: Product
    left: Source
    right: Source

    def source(self, side: int) -> Source:
        """The source of a side."""
        return self.left if side == LEFT else self.right


def side_rows(events: DataFrame, sides: Sides, side: int) -> DataFrame:
    """Conformed events of one side as :meth:`~lakehouse.stateful.joinindex.JoinIndex.enter` takes them."""
    return events.select(
        F.lit(side).alias("side"),
        *_PLACES,
        F.col("event_time").alias("at"),
        F.col("reason").isNotNull().alias("rejected"),
        _join_key(sides.product, side).alias("join_key"),
        F.to_json(_event(events, sides, side), _JSON).alias("body"),
    )


def changes_sql(
    spark: SparkSession, sides: Sides, operator: Join, changes: Sequence[Change], schemas: Sequence[StructType]
) -> pa.Table:
    """What the join's SQL makes of these pairs, whatever their sign.

    Args:
        schemas: of both sides, by :func:`event_schema`.
    """
    columns = {"left": [c.left for c in changes], "right": [c.right for c in changes]}
    pairs = spark.createDataFrame(pa.table(columns, schema=pa.schema([("left", pa.string()), ("right", pa.string())])))
    shown = [
        F.from_json(name, schemas[side], _JSON).alias(sides.source(side).name)
        for side, name in enumerate(("left", "right"))
    ]
    pairs.select(*shown).coalesce(1).createOrReplaceTempView(VIEW)
    return spark.sql(operator.partial_sql()).toArrow()


@dataclass(frozen=True, slots=True)
class JoinBuild:
    """Both sides of a join at a version of bronze each, every event once.

    Attributes:
        sides: the sources.
        left: its valid events.
        right: its valid events.
        through: ``TOPIC/PARTITION`` to the offset behind the last one that bronze holds.
    """

    sides: Sides
    left: DataFrame
    right: DataFrame
    through: dict[str, int]

    def partial(self, operator: Join) -> pa.Table:
        """What the join's SQL gives for all pairs."""
        product, names = self.sides.product, (self.sides.left.name, self.sides.right.name)
        left, right = (
            events.select(
                _event(events, self.sides, side).alias(names[side]),
                _join_key(product, side).alias(f"key{side}"),
                F.unix_micros("event_time").alias(f"at{side}"),
                F.col("dedupe_key").alias(f"id{side}"),
            )
            for side, events in enumerate((self.left, self.right))
        )
        fits = (
            (F.col("key0") == F.col("key1"))
            & (F.col("at1") >= F.col("at0"))
            & (F.col("at1") <= F.col("at0") + product.within_ms * 1000)
        )
        pairs = left.join(right, fits, "left" if product.kind == "left_outer" else "inner")
        if product.match == "first":
            order = Window.partitionBy("id0").orderBy("at1", "id1")
            pairs = pairs.withColumn("nth", F.row_number().over(order)).where("nth = 1")
        pairs.select(*(F.col(f"`{name}`") for name in names)).createOrReplaceTempView(VIEW)
        return pairs.sparkSession.sql(operator.partial_sql()).toArrow()

    def clock(self) -> int | None:
        """See :class:`~lakehouse.gold.store.BatchMark`."""
        left, right = (events.select("event_time", "received_at") for events in (self.left, self.right))
        return clock_of(left.union(right))


@contextmanager
def joined_build(
    spark: SparkSession, sides: Sides, tables: Sequence[Path], versions: Sequence[int]
) -> Iterator[JoinBuild]:
    """Both sides at these versions of bronze; kept in memory meanwhile."""
    built = [build(spark, tables[side], sides.source(side), versions[side]).events.persist() for side in (0, 1)]
    try:
        through = {place: end for side in (0, 1) for place, end in _ends(tables[side], versions[side]).items()}
        left, right = (events.where(F.col("reason").isNull()) for events in built)
        yield JoinBuild(sides, left, right, through)
    finally:
        for events in built:
            events.unpersist()


def _ends(table: Path, version: int) -> dict[str, int]:
    found: dict[str, int] = {}
    rows = DeltaTable(str(table), version=version).to_pyarrow_dataset()
    for batch in rows.to_batches(columns=["topic", "partition", "offset"]):
        ends = pa.table(batch).group_by(["topic", "partition"]).aggregate([("offset", "max")]).to_pylist()
        for end in ends:
            if end["topic"].startswith(FILE_TOPIC):
                continue  # as Marks.of has it
            place = f"{end['topic']}/{end['partition']}"
            found[place] = max(found.get(place, 0), end["offset_max"] + 1)
    return found


def _join_key(product: Product, side: int) -> Column:
    """16 bytes, equal where the columns are; null, which is equal to nothing, where one of them is null."""
    columns = [F.col(f"`{pair[side]}`").cast("string") for pair in product.columns_on]
    known = F.lit(True)
    for column in columns:
        known = known & column.isNotNull()
    return F.when(known, F.unhex(F.md5(F.to_json(F.array(*columns)).cast("binary"))))


def _columns(events_columns: Sequence[str], sides: Sides, side: int) -> list[str]:
    """Columns of a side that the SQL sees: those that it reads, of payload and envelope."""
    source = sides.source(side)
    wanted = Join(sides.product).columns(source.name)
    offered = [*payload_schema(source).fieldNames(), *ENVELOPE_COLUMNS]
    lower = {name.lower() for name in wanted} if wanted is not None else None
    found = [name for name in offered if name in events_columns and (lower is None or name.lower() in lower)]
    return found or ["event_id"]


def _event(events: DataFrame, sides: Sides, side: int) -> Column:
    return F.struct(*(F.col(f"`{name}`") for name in _columns(events.columns, sides, side)))


def event_schema(spark: SparkSession, sides: Sides, side: int) -> StructType:
    """Types of the columns of one side that the SQL sees."""
    events = conform(spark.createDataFrame(COLUMNS.empty_table()), sides.source(side))
    return events.select(*(F.col(f"`{name}`") for name in _columns(events.columns, sides, side))).schema
