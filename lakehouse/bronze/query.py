"""Kafka to bronze: one streaming query a source, each micro-batch a plain append.

Steps of one micro-batch, and what a crash after each of them means:

1. Spark writes the batch's offsets to its checkpoint. Crash: the same batch runs again.
2. The rows are appended, the end offsets in the same commit. Crash: the batch runs again and is dropped, because
   bronze itself says that it has these offsets.
3. Spark notes in its checkpoint that the batch is done.

A lost checkpoint is no loss: the query then starts from the offsets that bronze names. They count for the topic that
bronze took them from: one that began anew is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import add, and_
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from lakehouse.bronze.clock import BronzeClock
from lakehouse.bronze.offsets import check_topic, planned_topics, starting_offsets, topic_now
from lakehouse.bronze.table import Progress, create, progress
from lakehouse.checkpoint import forget, offset_of
from lakehouse.contract import envelope as names
from lakehouse.contract.faults import crash_point
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings
from lakehouse.counts import count_batch
from lakehouse.errors import TopicReplaced
from lakehouse.pace import Pace

_LAST_MICROS = 253_370_764_800_000_000  # the year 9999; anybody may send a header
_MOST_WEIGHT = 1e6
SMALL_BATCH = 5_000  # events; below it one task is quicker than several, for a file as for an aggregate


def start_bronze(
    spark: SparkSession,
    settings: Settings,
    source: Source,
    *,
    bootstrap: str,
    accept_loss: bool = False,
    waiting: int = 0,
) -> StreamingQuery:
    """Start the query; the topic must exist.

    Args:
        bootstrap: ``host:port`` of the broker.
        accept_loss: go on where Kafka no longer holds what bronze has not taken.
        waiting: events that the topic has ready, as :func:`~lakehouse.bronze.offsets.events_waiting` counts them.

    Raises:
        TopicReplaced: the topic began anew, so that its offsets no longer say what bronze has.
    """
    lake = Lake(settings.lake)
    table = lake.bronze(source.name)
    create(table)
    done = progress(table)
    checkpoint = lake.checkpoint(f"bronze-{source.name}")
    options = {"bootstrap.servers": bootstrap, **settings.kafka.security.for_java()}
    topic = topic_now(spark, source.topic, options)
    check_topic(source, topic, done)
    done = replace(done, topics={**done.topics, topic.name: topic.id})
    if planned_topics(checkpoint) - {source.topic}:
        forget(checkpoint)  # the source had another topic; bronze itself says how far it is
    reader = (
        spark.readStream.format("kafka")
        .option("subscribe", source.topic)
        .option("startingOffsets", starting_offsets(source.topic, len(topic.ends), done.offsets))
        .option("includeHeaders", "true")
        .option("failOnDataLoss", str(not accept_loss).lower())
        .option("maxOffsetsPerTrigger", settings.spark.max_offsets_per_trigger)
        .option("kafkaConsumer.pollTimeoutMs", "60000")
        .option("fetchOffset.numRetries", "30")
        .option("fetchOffset.retryIntervalMs", "500")
        .option("kafka.default.api.timeout.ms", "60000")
        .options(**{f"kafka.{name}": value for name, value in options.items()})
    )
    pace = Pace(settings.spark.conf)
    writer = BronzeWriter(table, checkpoint, done, clock=BronzeClock(lake, table), pace=pace)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", f"bronze-{source.name}")
    # Planned once for the whole query; a batch adds what is the batch's own.
    rows = to_bronze(reader.load(), source=source.name, tenant=settings.tenant)
    query = (
        rows.writeStream.queryName(f"bronze-{source.name}")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime=f"{settings.spark.bronze_interval_ms} milliseconds")
        .foreachBatch(writer)
    )
    with pace.begun(spark, waiting):
        return query.start()


class BronzeWriter:
    """Appends one micro-batch after another to a bronze table. One instance is the table's only stream writer.

    Batch loaders may write at the same time: with a ``clock`` they and the stream take turns.
    """

    def __init__(
        self,
        table: TableRef,
        checkpoint: Path,
        done: Progress,
        now: Callable[[], float] = time.time,
        clock: BronzeClock | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._clock = clock
        self._pace = pace
        self._table = table
        self._checkpoint = checkpoint
        self._done = done
        self._now = now
        self._may_overlap = True
        self._before: Mapping[str, int] = {}

    def __call__(self, events: DataFrame, batch_id: int) -> None:
        ends = self._end_offsets(batch_id)
        for place, end in ends.items():
            if end < self._before.get(place, 0):
                detail = f"{place} ended at offset {self._before[place]}, and now at {end}"
                raise TopicReplaced(self._table.name, place.rpartition("/")[0], detail)
        self._before = ends
        done = self._done.offsets
        count = sum(max(0, end - done.get(place, 0)) for place, end in ends.items())
        if count <= 0:
            return
        with self._turn() as bronze_at:
            self._append(events, ends, count, bronze_at)
        count_batch(self._checkpoint.name, count)
        if self._pace is not None:
            self._pace.suit(events.sparkSession, count)

    @contextmanager
    def _turn(self) -> Iterator[int]:
        if self._clock is None:
            yield max(int(self._now() * 1e6), self._done.bronze_at + 1)
        else:
            with self._clock.turn() as bronze_at:
                yield bronze_at

    def _append(self, events: DataFrame, ends: Mapping[str, int], count: int, bronze_at: int) -> None:
        done = self._done.offsets
        at = F.timestamp_micros(_constant(bronze_at))
        rows = events.select("*", at.alias("bronze_at"), at.cast("date").alias("date"))
        if self._may_overlap:  # a batch from before the crash may be in already, in whole or in part
            rows = without_known(rows, done)
            self._may_overlap = any(end < done.get(place, 0) for place, end in ends.items())
        if count < SMALL_BATCH:
            rows = rows.coalesce(1)
        offsets = {**done, **{place: max(end, done.get(place, 0)) for place, end in ends.items()}}
        reached = replace(self._done, offsets=offsets, bronze_at=bronze_at)
        crash_point("bronze.before_append")
        rows.write.format("delta").mode("append").option("userMetadata", reached.to_metadata()).save(
            str(self._table.path)
        )
        crash_point("bronze.after_append")
        self._done = reached

    def _end_offsets(self, batch_id: int) -> dict[str, int]:
        """``TOPIC/PARTITION`` to the offset behind the batch's last one, from the query's own write-ahead log."""
        topics = json.loads(offset_of(self._checkpoint, batch_id))
        return {f"{topic}/{number}": end for topic, ends in topics.items() for number, end in ends.items()}


def _constant(number: int) -> Column:
    """The number, positive, in a way that a compiled query has no need to be compiled again for another one.

    Spark writes numbers into the code that it generates, and texts beside it. A text alone it would turn into a number
    beforehand; one with nothing of a row's topic behind it, it does not.
    """
    return F.concat(F.lit(str(number)), F.substring("topic", 1, 0)).cast("bigint")


def without_known(rows: DataFrame, offsets: Mapping[str, int]) -> DataFrame:
    """Rows that the offsets do not cover yet."""
    if not offsets:
        return rows
    place = F.concat_ws("/", F.col("topic"), F.col("partition").cast("string"))
    ends = F.create_map(*[part for item in offsets.items() for part in (F.lit(item[0]), F.lit(item[1]))])
    return rows.where(F.col("offset") >= F.coalesce(ends[place], F.lit(0)))


def to_bronze(records: DataFrame, *, source: str, tenant: str) -> DataFrame:
    """Kafka records as bronze rows, all but the time of the commit.

    A record without our headers gets its envelope from the broker: its coordinates as id (marked with ``@``), the
    broker's time as time of receipt.

    Args:
        records: ``key, value, headers, topic, partition, offset, timestamp`` as Spark's Kafka source gives them.
        source, tenant: for records that do not say them.
    """
    envelope = {name: _header(name) for name in names.HEADER_NAMES}
    known = reduce(add, (F.when(F.col("h")[name].isNull(), 0).otherwise(1) for name in names.HEADER_NAMES))
    others = F.when(F.size("h") > known, F.map_filter("h", lambda name, _: ~name.isin(*names.HEADER_NAMES)))
    others = F.coalesce(others, F.create_map())
    coordinates = F.concat_ws("/", F.concat(F.lit("@"), "topic"), "partition", "offset")
    micros = envelope[names.RECEIVED_AT].cast("bigint")
    weight = envelope[names.WEIGHT].cast("double")  # anybody may send a header
    received_at = F.when(micros.between(0, _LAST_MICROS), F.timestamp_micros(micros))
    marked = records.withColumn("plain", _is_plain())
    return marked.withColumn("h", F.when(~F.col("plain"), F.map_from_entries("headers"))).select(
        F.coalesce(envelope[names.EVENT_ID], coordinates).alias("event_id"),
        F.coalesce(envelope[names.SOURCE], F.lit(source)).alias("source"),
        F.coalesce(envelope[names.TENANT], F.lit(tenant)).alias("tenant"),
        F.coalesce(received_at, F.col("timestamp")).alias("received_at"),
        F.coalesce(envelope[names.COLLECTOR], F.lit("@broker")).alias("collector"),
        F.coalesce(envelope[names.FINGERPRINT], F.concat(F.lit("md5:"), F.md5("value"))).alias("fingerprint"),
        envelope[names.SUSPECT].isNotNull().alias("suspect"),
        envelope[names.REJECT].alias("reject"),
        others.cast("map<string,binary>").alias("headers"),
        F.col("key"),
        F.col("value").alias("payload"),
        F.col("topic"),
        F.col("partition"),
        F.col("offset"),
        F.col("timestamp").alias("broker_time"),
        F.lit("stream").alias("origin"),
        F.coalesce(F.when(weight.between(1, _MOST_WEIGHT), weight), F.lit(1.0)).alias("weight"),
    )


def _is_plain() -> Column:
    """Whether a record has an ordinary event's headers and no more, each in its place.

    Most have. The map ``h`` of all others' headers costs more than the rest of a row.
    """
    headers = F.col("headers")
    in_place = [F.get(headers, F.lit(n))["key"] == name for n, name in enumerate(names.ALWAYS)]
    return F.coalesce(reduce(and_, in_place, F.size(headers) == len(names.ALWAYS)), F.lit(False))


def _header(name: str) -> Column:
    """Value of a header as text; null where the record has none of this name."""
    found = F.col("h")[name]
    if name in names.ALWAYS:
        in_place = F.get("headers", F.lit(names.ALWAYS.index(name)))["value"]
        found = F.when(F.col("plain"), in_place).otherwise(found)
    return found.cast("string")
