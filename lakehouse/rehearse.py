"""A rehearsal before the first event: the driver plans, compiles and runs its queries once on a scratch lake.

A JVM is slow the first time it does anything. Without this the first dashboards would wait for it, many seconds; with
it the same seconds are spent before the driver says that it is ready.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from deltalake import write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, BooleanType, DataType, MapType, NumericType, StructType

from lakehouse.bronze.table import COLUMNS, create
from lakehouse.contract.faults import no_crash_points
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.live import start_live
from lakehouse.silver.conform import payload_schema

log = logging.getLogger(__name__)

BATCHES = 4
_LIMIT_S = 30.0


def rehearse(spark: SparkSession, settings: Settings, pipeline: Pipeline) -> float:
    """Run each source's live query over a few made-up rows below a temporary folder; returns the seconds it took.

    A failure is logged and otherwise ignored: the real run will say it better.
    """
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="millrace-rehearsal-"))
    try:
        with no_crash_points():
            for source in pipeline.sources.values():
                _play(spark, dataclasses.replace(settings, lake=folder), pipeline, source)
    except Exception:
        log.debug("the rehearsal failed", exc_info=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return time.monotonic() - began


def _play(spark: SparkSession, settings: Settings, pipeline: Pipeline, source: Source) -> None:
    table = Lake(settings.lake).bronze(source.name)
    create(table)
    payload = json.dumps(_sample(payload_schema(source))).encode()
    query = start_live(spark, settings, pipeline, source, pipeline.products_of(source.name), f"rehearsal-{source.name}")
    try:
        deadline = time.monotonic() + _LIMIT_S
        for batch in range(BATCHES):
            rows = [_row(source, batch * 10 + i, payload) for i in range(10)]
            made = pa.Table.from_pylist(rows, schema=COLUMNS)
            if batch % 2:  # as bronze is written; the others only have to be there quickly
                spark.createDataFrame(made).coalesce(1).write.format("delta").mode("append").save(str(table.path))
            else:
                write_deltalake(str(table.path), made, mode="append")
            query.query.processAllAvailable()
            if time.monotonic() > deadline:
                break
    finally:
        query.stop()


def _sample(kind: DataType) -> object:
    """A value of this type."""
    if isinstance(kind, StructType):
        return {field.name: _sample(field.dataType) for field in kind}
    if isinstance(kind, ArrayType):
        return [_sample(kind.elementType)]
    if isinstance(kind, MapType):
        return {"a": _sample(kind.valueType)}
    if isinstance(kind, BooleanType):
        return True
    return 1 if isinstance(kind, NumericType) else "a"


def _row(source: Source, number: int, payload: bytes) -> dict[str, object]:
    now = datetime.now(UTC)
    return {
        "event_id": f"{number // 2}",
        "source": source.name,
        "tenant": "rehearsal",
        "received_at": now,
        "collector": "rehearsal",
        "fingerprint": "",
        "suspect": False,
        "payload": payload,
        "topic": source.topic,
        "partition": 0,
        "offset": number,
        "broker_time": now,
        "origin": "stream",
        "bronze_at": now,
        "date": now.date(),
    }
