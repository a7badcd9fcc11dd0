"""An example pipeline on a lake of its own: bronze written directly, from its scene, while the driver runs."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from lakehouse.bronze.table import COLUMNS, create
from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source, load_pipeline
from lakehouse.contract.settings import conf_dir, load_settings
from lakehouse.gold.store import ProductStore
from lakehouse.replay import verify
from lakehouse.stages import Stages
from tests.lakehouse.lakes import driving, eventually

Event = tuple[str, dict[str, Any]]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
START_MS = 1_767_268_800_000  # noon of 1 January 2026


def at(ms: int) -> datetime:
    """A time in milliseconds since the epoch as Delta holds it."""
    return EPOCH + timedelta(milliseconds=ms)


class Example:
    """A lake and the pipeline that runs on it.

    Args:
        folder: for the lake.
        name: of the shipped pipeline, or the folder of another one.
        repeats: the share of events that come a second time.
        layers: that the driver keeps.
        lake: another place for it.
    """

    def __init__(
        self,
        folder: Path,
        name: str | Path,
        repeats: float = 0.05,
        layers: tuple[str, ...] = ("silver", "gold"),
        lake: Lake | None = None,
    ) -> None:
        pipeline = name if isinstance(name, Path) else conf_dir() / "pipelines" / name
        self.lake = lake or Lake(folder / "lake")
        places = {"lake": self.lake.root, "work": str(self.lake.state)}
        self.settings = load_settings({}, **places, pipeline=str(pipeline), spark__rehearse=False)
        self.pipeline: Pipeline = load_pipeline(pipeline)
        self._offsets: dict[tuple[str, int], int] = {}
        self._commits = 0
        self._rng = random.Random(7)
        self._repeats = repeats
        self._stages = Stages(bronze=False, layers=layers)
        for source in self.pipeline.sources:
            create(self.lake.bronze(source))

    def write(self, events: Iterable[Event], late_ms: int = 50) -> None:
        """One commit of bronze for each source that has events, in their order, some of them twice."""
        rows: dict[str, list[dict[str, Any]]] = {}
        self._commits += 1
        for source, payload in events:
            for _ in range(1 + (self._rng.random() < self._repeats)):
                rows.setdefault(source, []).append(self._row(source, payload, late_ms))
        for source, some in rows.items():
            table = pa.Table.from_pylist(some, schema=COLUMNS)
            write_deltalake(str(self.lake.bronze(source).path), table, mode="append")

    def write_in_files(self, parts: list[list[Event]]) -> None:
        """One commit of bronze with a file for each part; the later a part stands, the earlier in bronze's order."""
        self._commits += 1
        rows = [self._row(name, payload, 50) for part in reversed(parts) for name, payload in part]
        days = [number for number, part in enumerate(parts) for _ in part]
        for row, day in zip(rows, reversed(days), strict=True):
            row["date"] += timedelta(days=day)  # a partition of the table, so a file
        table = pa.Table.from_pylist(rows, schema=COLUMNS)
        write_deltalake(str(self.lake.bronze(rows[0]["source"]).path), table, mode="append")

    def _row(self, name: str, payload: dict[str, Any], late_ms: int) -> dict[str, Any]:
        source = self.pipeline.sources[name]
        assert source.event_id_template is not None
        partition, key = self.partition(source, payload), self._key(source, payload)
        offset = self._offsets[name, partition] = self._offsets.get((name, partition), -1) + 1
        body = json.dumps(payload).encode()
        received_at = at(payload["at"] + late_ms)
        bronze_at = at(START_MS + 1000 * self._commits)
        return {
            "event_id": source.event_id_template.render(payload),
            "source": name,
            "tenant": "default",
            "received_at": received_at,
            "collector": "n1",
            "fingerprint": fingerprint(body),
            "suspect": False,
            "headers": [],
            "key": key.encode(),
            "payload": body,
            "topic": source.topic,
            "partition": partition,
            "offset": offset,
            "broker_time": received_at,
            "origin": "stream",
            "bronze_at": bronze_at,
            "date": bronze_at.date(),
        }

    def partition(self, source: Source, payload: dict[str, Any]) -> int:
        """The Kafka partition that the event would lie in."""
        return int(fingerprint(self._key(source, payload).encode())[:2], 16) % source.partitions

    def _key(self, source: Source, payload: dict[str, Any]) -> str:
        assert source.key_template is not None
        return source.key_template.render(payload) or ""

    @contextlib.contextmanager
    def running(self, spark: SparkSession) -> Iterator[threading.Thread]:
        """The driver's queries over bronze in this process; whatever ended them is raised."""
        with driving(spark, self.settings, None, self._stages, "") as driver:
            yield driver

    def wait(self, thread: threading.Thread, *, alive: bool = True) -> None:
        """Wait until every product holds all of bronze; or, with ``alive`` false, until the driver has ended."""
        if not alive:
            thread.join(400)
            return
        ends = {name: dict(self._ends(name)) for name in self.pipeline.sources}
        eventually(lambda: all(self._reached(p, ends) for p in self.pipeline.products.values()), 400, thread.is_alive)

    def _ends(self, source: str) -> Iterator[tuple[str, int]]:
        topic = self.pipeline.sources[source].topic
        for (name, partition), last in self._offsets.items():
            if name == source:
                yield f"{topic}/{partition}", last + 1

    def _reached(self, product: Product, ends: dict[str, dict[str, int]]) -> bool:
        mark = ProductStore(product, self.lake.table(product.layer, product.name), self.pipeline.name).mark()
        wanted = {**ends[product.source], **ends.get(product.right, {})}
        return mark is not None and all(mark.through.get(place, 0) >= end for place, end in wanted.items())

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a product's table."""
        layer = self.pipeline.products[name].layer if name in self.pipeline.products else "gold"
        found: list[dict[str, Any]] = DeltaTable(str(self.lake.table(layer, name).path)).to_pyarrow_table().to_pylist()
        return found

    def clock(self, name: str) -> int | None:
        """The newest event time that the product knows of, microseconds since the epoch."""
        product = self.pipeline.products[name]
        mark = ProductStore(product, self.lake.table(product.layer, name), self.pipeline.name).mark()
        return mark.clock if mark else None

    def verified(self, spark: SparkSession) -> dict[str, bool]:
        """What ``replay`` says of each table."""
        return {found.table: found.equal for found in verify(spark, self.settings, self.pipeline)}


def parts(events: list[Event], sizes: Iterable[int]) -> Iterator[list[Event]]:
    """The events in pieces of these sizes, the last with all that are left."""
    rest = events
    for size in sizes:
        yield rest[:size]
        rest = rest[size:]
    yield rest
