"""Bronze in slices, for who fetches more rows than a driver's memory takes: one after the other, in bronze's order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.contract.pipeline import Source
from lakehouse.silver.conform import conform

_MOST = 64 << 20  # bytes of a slice
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}


def slices(spark: SparkSession, bronze: Path, source: Source, version: int, width: Column) -> Iterator[DataFrame]:
    """Conformed rows of the bronze table at ``version``, an event as often as it is there; at least one slice.

    Slices are whole days, or of a large day whole commits, or of a large commit some of its events with all their
    copies. So whoever judges one after the other finds the same copies first as who judges all at once.

    Args:
        width: about how many bytes the caller fetches of a row; may name bronze's columns.
    """
    rows = spark.read.format("delta").option("versionAsOf", version).load(str(bronze))
    most = _most(spark)
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


def _most(spark: SparkSession) -> int:
    """Bytes of a slice: what Spark lets a driver fetch is more, unless it has been set lower."""
    allowed = byte_size(spark.sparkContext.getConf().get("spark.driver.maxResultSize", "1g") or "1g")
    return min(_MOST, allowed // 2) if allowed else _MOST


def byte_size(text: str) -> int:
    """Bytes of a size as Spark writes it, such as ``48m``; a plain number is bytes."""
    digits = text.lower().rstrip("bkmgt")
    return int(digits) << _UNITS.get(text[len(digits) : len(digits) + 1].lower(), 0)
