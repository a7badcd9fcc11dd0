"""Kafka to bronze: the records of a source's topic as bronze rows, and their appends to the table.

A micro-batch is one commit that names the end offsets, so bronze says by itself how far it is. After a crash the same
batch comes again, and the rows that the offsets cover are dropped. A lost checkpoint is no loss: the query then starts
from the offsets that bronze names. They count for the topic that bronze took them from; a topic that began anew is
refused.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce
from operator import add, and_
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.bronze.readers import batch_ends, newest_batch
from lakehouse.bronze.table import COLUMNS, UNLIKE, BronzeClock, Progress, create, progress
from lakehouse.contract import envelope as names
from lakehouse.contract.deltalog import AddedFile, DeltaLog, TableGone
from lakehouse.contract.errors import crash_point
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import LakePath, file_sizes, spark_uri, write_parquet
from lakehouse.errors import TableBusy, TopicReplaced
from lakehouse.prepared import Selections, selected

_LAST_MICROS = 253_370_764_800_000_000  # the year 9999; anybody may send a header
_MOST_WEIGHT = 1e6
RECORDS_PER_TASK = 25_000
"""Records of one partition that one task reads, so that a long batch of few partitions has a task for every core."""

RECORDS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""Columns of Spark's Kafka source."""

_WITH_DICTIONARY = sorted({*COLUMNS.names} - {*UNLIKE, "date"})


def read_topic(
    spark: SparkSession, settings: Settings, source: Source, *, bootstrap: str, accept_loss: bool = False
) -> tuple[DataFrame, BronzeWriter]:
    """The source's topic from where bronze ends, and the writer that goes on there; the topic must exist.

    Args:
        bootstrap: ``host:port`` of the broker.
        accept_loss: go on where Kafka no longer holds what bronze has not taken.

    Raises:
        TopicReplaced: the topic began anew, so that its offsets no longer say what bronze has.
    """
    lake = Lake.of(settings)
    table = lake.bronze(source.name)
    create(table)
    done = progress(table)
    checkpoint = lake.checkpoint(f"bronze-{source.name}")
    options = {"bootstrap.servers": bootstrap, **settings.kafka.security.for_java()}
    topic_id, ends = topic_now(spark, source.topic, options)
    check_topic(source, topic_id, ends, done)
    done = replace(done, topics={**done.topics, source.topic: topic_id})
    if is_outdated(checkpoint, source.topic, done.offsets):
        shutil.rmtree(checkpoint, ignore_errors=True)  # bronze itself says how far it is
    records = (
        spark.readStream.format("kafka")
        .option("subscribe", source.topic)
        .option("startingOffsets", starting_offsets(source.topic, len(ends), done.offsets))
        .option("includeHeaders", "true")
        .option("failOnDataLoss", str(not accept_loss).lower())
        .option("maxOffsetsPerTrigger", settings.spark.max_offsets_per_trigger)
        .option("maxRecordsPerPartition", RECORDS_PER_TASK)
        .option("kafkaConsumer.pollTimeoutMs", "60000")
        .option("fetchOffset.numRetries", "30")
        .option("fetchOffset.retryIntervalMs", "500")
        .option("kafka.default.api.timeout.ms", "60000")
        .options(**{f"kafka.{name}": value for name, value in options.items()})
        .load()
    )
    return records, BronzeWriter(table, done, BronzeClock(lake, table))


def topic_now(spark: SparkSession, topic: str, options: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """A topic as the broker has it now.

    Args:
        options: of Kafka's Java client, which asks.

    Returns:
        Its id, which another topic of the same name has not; ``TOPIC/PARTITION`` to the offset behind the last record,
        of all partitions.
    """
    jvm = spark._jvm
    assert jvm is not None
    properties = jvm.java.util.Properties()
    for name, value in options.items():
        properties.setProperty(name, value)
    kafka = jvm.org.apache.kafka
    admin = kafka.clients.admin.AdminClient.create(properties)
    try:
        described = admin.describeTopics(jvm.java.util.Collections.singletonList(topic)).allTopicNames().get()[topic]
        wanted = jvm.java.util.HashMap()
        places = [kafka.common.TopicPartition(topic, number) for number in range(len(described.partitions()))]
        for place in places:
            wanted[place] = kafka.clients.admin.OffsetSpec.latest()
        found = admin.listOffsets(wanted).all().get()
        ends = {f"{topic}/{place.partition()}": int(found[place].offset()) for place in places}
        return described.topicId().toString(), ends
    finally:
        admin.close()


def check_topic(source: Source, topic_id: str, ends: Mapping[str, int], done: Progress) -> None:
    """Refuse to go on by offsets that count another topic's records.

    Args:
        topic_id, ends: of the source's topic now (:func:`topic_now`).
        done: how far bronze is. Where its commits name no id of the topic, only offsets that went back tell.

    Raises:
        TopicReplaced: it was made again, or a partition of it ends before what bronze has taken.
    """
    known = done.topics.get(source.topic, topic_id)
    if known != topic_id:
        raise TopicReplaced(source.name, source.topic, f"its id was {known} and is {topic_id}")
    for place, taken in sorted(done.offsets.items()):
        if place.rpartition("/")[0] == source.topic and ends.get(place, 0) < taken:
            detail = f"{place} ends at offset {ends.get(place, 0)}, and bronze has taken {taken}"
            raise TopicReplaced(source.name, source.topic, detail)


def is_outdated(checkpoint: Path, topic: str, taken: Mapping[str, int]) -> bool:
    """Whether a query's newest batch, done or not, is of another topic, or ends before what bronze has taken.

    The latter is so once another machine has gone on. Kafka need not have those records any more.

    Args:
        taken: ``TOPIC/PARTITION`` to the next offset.
    """
    batch = newest_batch(checkpoint, "offsets")
    planned = batch_ends(checkpoint, batch) if batch is not None else {}
    return any(place.rpartition("/")[0] != topic or taken.get(place, 0) > end for place, end in planned.items())


def starting_offsets(topic: str, partitions: int, offsets: Mapping[str, int]) -> str:
    """Spark's ``startingOffsets``: what bronze says, the earliest for a partition it does not know.

    Args:
        partitions: that the topic has now: Spark wants each of them named, and no other.
        offsets: ``TOPIC/PARTITION`` to the next offset.
    """
    if not offsets:
        return "earliest"
    known = {int(place.rpartition("/")[2]): end for place, end in offsets.items() if place.startswith(f"{topic}/")}
    return json.dumps({topic: {str(number): known.get(number, -2) for number in range(partitions)}})


class BronzeWriter:
    """Appends one micro-batch after another to a bronze table. One instance is the table's only stream writer.

    Args:
        table: where to; it exists.
        done: how far it is.
        clock: by which it and batch loaders take turns.
    """

    def __init__(self, table: TableRef, done: Progress, clock: BronzeClock) -> None:
        self._clock = clock
        self._table = table
        self._log = DeltaLog(table.path)
        self._done = done
        self._may_overlap = True
        self._version = self._log.opened_to_append().version()
        self._ends: Mapping[str, int] = {}

    def events_of(self, ends: Mapping[str, int]) -> int:
        """How many events a batch has, at the most, that bronze has not taken.

        Raises:
            TopicReplaced: an offset went back.
        """
        for place, end in ends.items():
            if end < self._ends.get(place, 0):
                detail = f"{place} ended at offset {self._ends[place]}, and now at {end}"
                raise TopicReplaced(self._table.name, place.rpartition("/")[0], detail)
        self._ends = ends
        done = self._done.offsets
        return sum(max(0, end - done.get(place, 0)) for place, end in ends.items())

    def unknown(self, places: pa.Table) -> pa.Array:
        """Which rows, by ``topic``, ``partition`` and ``offset``, the offsets do not cover yet."""
        fresh = pa.array([True] * places.num_rows, pa.bool_())
        for place, end in self._done.offsets.items() if self._may_overlap else ():
            topic, _, partition = place.rpartition("/")
            here = pc.and_(pc.equal(places["topic"], topic), pc.equal(places["partition"], int(partition)))
            fresh = pc.and_(fresh, pc.invert(pc.and_(here, pc.less(places["offset"], end))))
        return fresh.combine_chunks() if isinstance(fresh, pa.ChunkedArray) else fresh

    def without_known(self, rows: DataFrame) -> DataFrame:
        """Rows that the offsets do not cover yet."""
        return without_known(rows, self._done.offsets) if self._may_overlap else rows

    def append(self, rows: pa.Table, ends: Mapping[str, int]) -> tuple[int, pa.Table]:
        """Append a small batch; returns the commit's version, and the rows as the table has them.

        Args:
            rows: all columns but ``bronze_at`` and ``date``.
        """
        with self._clock.turn() as bronze_at:
            at = pa.scalar(bronze_at, pa.timestamp("us", "UTC"))
            whole = rows.append_column("bronze_at", pa.repeat(at, rows.num_rows))
            whole = whole.append_column("date", pa.repeat(at.cast(pa.date32()), rows.num_rows))
            whole = whole.select(COLUMNS.names).cast(COLUMNS)
            folder = self._folder(bronze_at)
            folder.mkdir(parents=True, exist_ok=True)
            name = f"part-{uuid.uuid4()}.zstd.parquet"
            data = whole.drop_columns(["date"])
            size = write_parquet(folder / name, data, compression="zstd", use_dictionary=_WITH_DICTIONARY)
            file = AddedFile(f"{folder.name}/{name}", _day(bronze_at), True, size, f'{{"numRecords":{rows.num_rows}}}')
            return self._commit([file], ends, bronze_at), whole

    def append_frame(self, rows: DataFrame, ends: Mapping[str, int]) -> tuple[int, int]:
        """Append a long batch, whose files Spark writes in parallel; returns the commit's version and ``bronze_at``."""
        with self._clock.turn() as bronze_at:
            folder = self._folder(bronze_at) / f"stream-{bronze_at}"
            whole = rows.withColumn("bronze_at", constant_time(bronze_at))
            whole = whole.select([name for name in COLUMNS.names if name != "date"])
            whole.write.parquet(spark_uri(folder))
            files = [
                AddedFile(f"{folder.parent.name}/{folder.name}/{name}", _day(bronze_at), True, size)
                for name, size in file_sizes(folder, "part-*.parquet").items()
            ]
            return self._commit(files, ends, bronze_at), bronze_at

    def _folder(self, bronze_at: int) -> LakePath:
        return self._table.path / f"date={_day(bronze_at)['date']}"

    def _commit(self, files: Sequence[AddedFile], ends: Mapping[str, int], bronze_at: int) -> int:
        done = self._done.offsets
        offsets = {**done, **{place: max(end, done.get(place, 0)) for place, end in ends.items()}}
        reached = replace(self._done, offsets=offsets, bronze_at=bronze_at)
        crash_point("bronze.before_append")
        while not self._log.append(self._version + 1, added=files, info={"userMetadata": reached.to_metadata()}):
            self._pass_over_others()
        self._version += 1
        crash_point("bronze.after_append")
        # A batch from before a crash may be in already, in whole or in part; once one is not, no later one is.
        self._may_overlap = any(end < done.get(place, 0) for place, end in ends.items())
        self._done = reached
        return self._version

    def _pass_over_others(self) -> None:
        """Learn of the commits that loaders and care have made meanwhile.

        Raises:
            TableBusy: another driver has appended, although this one holds the writer's lock.
            TableGone: the log is gone.
        """
        newest = self._log.newest(self._version)
        if newest == self._version:
            raise TableGone(self._table.name, f"the log has no version {newest}")
        for version, info in self._log.infos(newest_first=True):
            if version <= self._version:
                break
            taken = Progress.from_metadata(info.get("userMetadata") or "")
            if taken and any(end > self._done.offsets.get(place, 0) for place, end in taken.offsets.items()):
                raise TableBusy(self._table.name, self._table.path)
        self._version = newest


def _day(bronze_at: int) -> dict[str, str | None]:
    """The partition of a commit."""
    return {"date": datetime.fromtimestamp(bronze_at / 1e6, UTC).date().isoformat()}


def constant_time(micros: int) -> Column:
    """A time, microseconds since the epoch, in a way that a compiled query is not compiled again for another one.

    Spark writes numbers into the code that it generates, and texts beside it. A text alone it would turn into a number
    beforehand; one with nothing of a row's topic behind it, it does not.
    """
    text = F.concat(F.lit(str(micros)), F.substring("topic", 1, 0))
    return F.timestamp_micros(text.cast("bigint"))


def first_rows(records: pa.Table, count: int) -> pa.Array:
    """Which are the first ``count`` records of one topic, about: of each partition the same share, so that none runs
    ahead of the others.
    """
    partitions = records["partition"].to_numpy()
    chosen = np.zeros(records.num_rows, np.bool_)
    for partition in np.unique(partitions):
        here = np.flatnonzero(partitions == partition)
        chosen[here[: -(-len(here) * count // records.num_rows)]] = True
    return pa.array(chosen)


def without_known(rows: DataFrame, offsets: Mapping[str, int]) -> DataFrame:
    """Rows that the offsets do not cover yet."""
    if not offsets:
        return rows
    place = F.concat_ws("/", F.col("topic"), F.col("partition").cast("string"))
    ends = F.create_map(*[part for item in offsets.items() for part in (F.lit(item[0]), F.lit(item[1]))])
    return rows.where(F.col("offset") >= F.coalesce(ends[place], F.lit(0)))


def to_bronze(records: DataFrame, *, source: str, tenant: str) -> DataFrame:
    """Kafka records as bronze rows, all but the time of the commit; see :func:`bronze_columns`."""
    return selected(records, bronze_columns(source=source, tenant=tenant))


def bronze_columns(*, source: str, tenant: str, checks_text: bool = True) -> Selections:
    """The selections that make bronze rows of Kafka records, all but the time of the commit.

    A record without our headers gets its envelope from the broker: its coordinates as id (marked with ``@``), the
    broker's time as time of receipt. The records are of :data:`RECORDS`.

    Args:
        source, tenant: for records that do not say them.
        checks_text: a header that is not UTF-8 is null; otherwise the caller has to look at those that every event has.
    """
    envelope = {name: _header(name, checks_text or name not in names.ALWAYS) for name in names.HEADER_NAMES}
    known = reduce(add, (F.when(F.col("h")[name].isNull(), 0).otherwise(1) for name in names.HEADER_NAMES))
    others = F.when(F.size("h") > known, F.map_filter("h", lambda name, _: ~name.isin(*names.HEADER_NAMES)))
    others = F.coalesce(others, F.create_map())
    coordinates = F.concat_ws("/", F.concat(F.lit("@"), "topic"), "partition", "offset")
    micros = envelope[names.RECEIVED_AT].cast("bigint")
    weight = envelope[names.WEIGHT].cast("double")  # anybody may send a header
    received_at = F.when(micros.between(0, _LAST_MICROS), F.timestamp_micros(micros))
    columns = {
        "event_id": F.coalesce(envelope[names.EVENT_ID], coordinates),
        "source": F.coalesce(envelope[names.SOURCE], F.lit(source)),
        "tenant": F.coalesce(envelope[names.TENANT], F.lit(tenant)),
        "received_at": F.coalesce(received_at, F.col("timestamp")),
        "collector": F.coalesce(envelope[names.COLLECTOR], F.lit("@broker")),
        "fingerprint": F.coalesce(envelope[names.FINGERPRINT], F.concat(F.lit("md5:"), F.md5("value"))),
        "suspect": envelope[names.SUSPECT].isNotNull(),
        "reject": envelope[names.REJECT],
        "headers": others.cast("map<string,binary>"),
        "key": F.col("key"),
        "payload": F.col("value"),
        "topic": F.col("topic"),
        "partition": F.col("partition"),
        "offset": F.col("offset"),
        "broker_time": F.col("timestamp"),
        "origin": F.lit("stream"),
        "weight": F.coalesce(F.when(weight.between(1, _MOST_WEIGHT), weight), F.lit(1.0)),
    }
    return [
        ["*", _is_plain().alias("plain")],
        ["*", F.when(~F.col("plain"), F.map_from_entries("headers")).alias("h")],
        [column.alias(name) for name, column in columns.items()],
    ]


def _is_plain() -> Column:
    """Whether a record has an ordinary event's headers and no more, each in its place.

    Most have. The map ``h`` of all others' headers costs more than the rest of a row.
    """
    headers = F.col("headers")
    in_place = [F.get(headers, F.lit(n))["key"] == name for n, name in enumerate(names.ALWAYS)]
    return F.coalesce(reduce(and_, in_place, F.size(headers) == len(names.ALWAYS)), F.lit(False))


def _header(name: str, checked: bool) -> Column:
    """Value of a header as text; null where the record has none of this name, or, if ``checked``, no UTF-8."""
    found = F.col("h")[name]
    if name in names.ALWAYS:
        in_place = F.get("headers", F.lit(names.ALWAYS.index(name)))["value"]
        found = F.when(F.col("plain"), in_place).otherwise(found)
    text = found.cast("string")
    return F.try_validate_utf8(text) if checked else text  # readers of bronze take text for valid
