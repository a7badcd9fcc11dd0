"""Whole versions of bronze, for products that depend on bronze's order.

A micro-batch is bounded in bytes, so it may end between two files of one version, whose rows are not in bronze's order
from file to file. Products for which the order matters take the rows of a version when its last file has come: what a
batch before had of it is read from bronze again.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakehouse.bronze.seen import JUDGED, SeenIndex
from lakehouse.contract.pipeline import Source
from lakehouse.operators import Operator
from lakehouse.silver.conform import conform


def takes_in_order(operator: Operator) -> bool:
    """Whether the operator's rows depend on bronze's order."""
    return bool(getattr(operator, "in_order", False))


def inside(offset: str) -> int | None:
    """The version that a Delta source's offset (JSON) lies inside of, or None where it lies between two."""
    if not offset:
        return None
    found = json.loads(offset)
    return int(found["reservoirVersion"]) if int(found["index"]) >= 0 else None


def before(offset: str) -> str:
    """The offset's last place between two versions, as an offset."""
    version = inside(offset)
    return offset if version is None else json.dumps({"reservoirVersion": version, "index": -1})


def whole_versions(
    fresh: DataFrame, source: Source, bronze: Path, begins: str, ends: str, seen: SeenIndex
) -> DataFrame:
    """Events of the versions that a batch completes.

    Args:
        fresh: the batch's events, first copies only.
        bronze: folder of the bronze table.
        begins, ends: the Delta source's offsets before and behind the batch.
        seen: the index that has judged this batch and those before.
    """
    begun, unfinished = inside(begins), inside(ends)
    if begun is not None and begun == unfinished:
        return fresh.where(F.lit(False))
    if begun is not None:
        fresh = fresh.where(F.unix_micros("bronze_at") > _bronze_at(bronze, begun))
        fresh = fresh.unionByName(_first_of(fresh, source, bronze, begun, seen))
    if unfinished is not None:
        fresh = fresh.where(F.unix_micros("bronze_at") < _bronze_at(bronze, unfinished))
    return fresh


def _first_of(fresh: DataFrame, source: Source, bronze: Path, version: int, seen: SeenIndex) -> DataFrame:
    """First copies among all events of a version."""
    files = [str(file) for file in _files(bronze, version)]
    events = conform(fresh.sparkSession.read.parquet(*files), source)
    rows = events.select(*JUDGED).toArrow()
    keys = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
    places = rows.filter(pa.array(seen.counted(rows))).select(keys.names).cast(keys)
    first = fresh.sparkSession.createDataFrame(places)
    return events.join(F.broadcast(first), keys.names, "left_semi").select(*fresh.columns)


def _bronze_at(bronze: Path, version: int) -> int:
    """When a version was committed, microseconds since the epoch: its rows say so, and all the same."""
    column = pq.read_table(_files(bronze, version)[0], columns=["bronze_at"], partitioning=None)["bronze_at"]
    return int(pc.max(pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64())).as_py())


def _files(bronze: Path, version: int) -> list[Path]:
    log = (bronze / "_delta_log" / f"{version:020d}.json").read_text(encoding="utf-8")
    adds = [action["add"] for action in map(json.loads, log.splitlines()) if "add" in action]
    return [bronze / unquote(add["path"]) for add in adds]
