"""All of bronze at a version: for a new product, a lost index, and the proof of a replay.

:func:`build` reads it at once in Spark. :func:`slices` gives it in parts, for callers that fetch more rows than the
driver's memory takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from lakehouse.contract.lake import FILE_TOPIC
from lakehouse.contract.pipeline import Source
from lakehouse.contract.storage import LakePath, spark_uri
from lakehouse.operators.base import Operator
from lakehouse.silver.avro import decoded
from lakehouse.silver.conform import MISFIT, conform, misfits, payload_columns, payload_schema
from lakehouse.silver.quarantine import COLUMNS as QUARANTINE_COLUMNS

_SLICE_BYTES = 64 << 20
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}


def build(spark: SparkSession, bronze: LakePath, source: Source, version: int) -> DataFrame:
    """Every conformed event of the bronze table at ``version``, exactly once: of several copies the first in bronze."""
    rows = spark.read.format("delta").option("versionAsOf", version).load(spark_uri(bronze))
    events = conform(rows, source)
    order = Window.partitionBy("dedupe_key").orderBy("bronze_at", "topic", "partition", "offset")
    if source.dedupe_horizon_ms:
        since = F.unix_micros("bronze_at") - F.lag(F.unix_micros("bronze_at")).over(order)
        counts = F.coalesce(since > source.dedupe_horizon_ms * 1000, F.lit(True))
        return events.withColumn("counts", counts).where("counts").drop("counts")
    return events.withColumn("copy", F.row_number().over(order)).where("copy = 1").drop("copy")


def clock_of(valid: DataFrame) -> int | None:
    """The clock's value by these events (:class:`~lakehouse.gold.mark.BatchMark`); None without events."""
    newest = valid.agg(F.max(F.unix_micros(F.least("event_time", "received_at")))).collect()[0][0]
    return None if newest is None else int(newest)


def kafka_ends(spark: SparkSession, bronze: LakePath, version: int) -> dict[str, int]:
    """``TOPIC/PARTITION`` to the offset behind the last one that bronze holds at a version; files have none."""
    rows = spark.read.format("delta").option("versionAsOf", version).load(spark_uri(bronze))
    ends = rows.groupBy("topic", "partition").agg(F.max("offset").alias("end"))
    ends = ends.where(~F.col("topic").startswith(FILE_TOPIC))
    return {f"{row['topic']}/{row['partition']}": row["end"] + 1 for row in ends.collect()}


def run_partial(valid: DataFrame, view: str, operator: Operator) -> pa.Table:
    """The operator's SQL over valid events, which it sees under the name ``view``."""
    valid.createOrReplaceTempView(view)
    return valid.sparkSession.sql(operator.whole_sql()).toArrow()


def rejected_columns(events: DataFrame, source: Source) -> DataFrame:
    """The rejected among conformed events with all their columns, as :func:`rejects_with_fields` takes them."""
    misfit = F.col("reason") == MISFIT
    payload = F.expr("make_valid_utf8(payload)")  # with U+FFFD where it is not; bronze has the bytes
    if source.format == "avro":
        payload = F.coalesce(decoded(F.col("payload"))["text"], F.base64("payload"))
    return (
        events.where(F.col("reason").isNotNull())
        .withColumn("taken", F.when(misfit, F.to_json(F.struct(*payload_columns(source)))))
        .withColumn("payload", payload)
        .select(*QUARANTINE_COLUMNS.names, "taken")
    )


def rejects_with_fields(rows: pa.Table, source: Source) -> pa.Table:
    """Quarantine's rows: the reason names the fields that do not fit the schema."""
    # Here and not in Spark: so many expressions take long to plan, and few rows need them.
    schema = payload_schema(source)
    columns = (rows[name].to_pylist() for name in ("reason", "payload", "taken"))
    reasons = [
        f"{reason}: {misfits(payload, taken, schema, source.unwrap_path)}" if taken else reason
        for reason, payload, taken in zip(*columns, strict=True)
    ]
    index = rows.schema.get_field_index("reason")
    return rows.set_column(index, "reason", pa.array(reasons, pa.string())).drop_columns("taken")


def rejected_rows(events: DataFrame, source: Source) -> pa.Table:
    """The rejected among conformed events, as quarantine keeps them."""
    return rejects_with_fields(rejected_columns(events, source).toArrow(), source)


def slices(spark: SparkSession, bronze: LakePath, source: Source, version: int, width: Column) -> Iterator[DataFrame]:
    """Conformed rows of the bronze table at ``version``, an event as often as it is there; at least one slice.

    Slices are whole days, or of a large day whole commits, or of a large commit some of its events with all their
    copies. So the dedupe index finds the same first copies slice by slice as all at once.

    Args:
        width: about how many bytes the caller fetches of a row; may name bronze's columns.
    """
    rows = spark.read.format("delta").option("versionAsOf", version).load(spark_uri(bronze))
    most = _slice_bytes(spark)
    days = _packed(rows, F.col("date"), width, most)
    if not days:
        yield conform(rows, source)
    for first_day, last_day, size in days:
        of_days = rows.where(F.col("date").between(F.lit(first_day), F.lit(last_day)))
        if size <= most:
            yield conform(of_days, source)
            continue
        for first, last, size_of in _packed(of_days, F.unix_micros("bronze_at"), width, most):
            times = (F.timestamp_micros(F.lit(time)) for time in (first, last))
            events = conform(of_days.where(F.col("bronze_at").between(*times)), source)
            yield from _shared_out(events, -(-size_of // most))


def _shared_out(events: DataFrame, parts: int) -> Iterator[DataFrame]:
    """The events in so many parts, copies of one in the same."""
    if parts == 1:
        yield events
        return
    events = events.persist()
    try:
        for part in range(parts):
            yield events.where(F.pmod(F.xxhash64("dedupe_key"), F.lit(parts)) == part)
    finally:
        events.unpersist()


def _packed(rows: DataFrame, by: Column, width: Column, most: int) -> list[tuple[Any, Any, int]]:
    """Ranges of ``by``, both ends included, with their bytes: ``most`` at the most, or a single value."""
    sizes = rows.groupBy(by.alias("at")).agg(F.sum(width).alias("bytes")).orderBy("at").collect()
    packed: list[tuple[Any, Any, int]] = []
    for at, size in sizes:
        if packed and packed[-1][2] + size <= most:
            packed[-1] = (packed[-1][0], at, packed[-1][2] + size)
        else:
            packed.append((at, at, size))
    return packed


def _slice_bytes(spark: SparkSession) -> int:
    """Bytes of a slice: less than Spark lets a driver fetch."""
    allowed = byte_size(spark.sparkContext.getConf().get("spark.driver.maxResultSize", "1g") or "1g")
    return min(_SLICE_BYTES, allowed // 2) if allowed else _SLICE_BYTES


def byte_size(text: str) -> int:
    """Bytes of a size as Spark writes it, such as ``48m``; a plain number is bytes."""
    digits = text.lower().rstrip("bkmgt")
    return int(digits) << _UNITS.get(text[len(digits) : len(digits) + 1].lower(), 0)
