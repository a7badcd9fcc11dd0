"""Example offers: feed files loaded while the stream runs on the same table, against plain Python."""

from __future__ import annotations

import gzip
import json
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from ingest.simulate.scenes import Payload, feed_rows, offer, write_feeds
from jobs.local.broker import ensure_topics
from lakehouse.bronze.table import progress
from lakehouse.contract.envelope import Envelope, fingerprint
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.settings import Settings, conf_dir, load_settings
from lakehouse.gold.store import ProductStore
from lakehouse.load.commit import write_rows
from lakehouse.load.files import find
from lakehouse.load.loader import load
from lakehouse.load.staging import refresh
from lakehouse.load.worker import LoadJob
from lakehouse.replay import verify
from lakehouse.stages import Stages
from serve.sql.statement import run_sql
from tests.lakehouse.lakes import Sent, driving, ends, eventually, produce

pytestmark = [pytest.mark.spark, pytest.mark.broker]
SEED, START_MS = 5, 1_790_000_000_000
MERCHANTS, OFFERS, ROUNDS = 10, 30, 3
SHOWN = ("merchant", "offer", "version", "title", "price", "available", "deleted")


class Record(Sent):
    """An offer on the topic."""

    def headers(self) -> list[tuple[str, bytes]]:
        assert self.payload is not None
        assert self.event_id is not None
        mark = fingerprint(self.payload)
        return Envelope(self.event_id, "offers", "default", START_MS * 1000, "n1", mark).to_headers()


def record(found: Payload) -> Record:
    return Record(json.dumps(found).encode(), f"{found['merchant']}:{found['offer']}:{found['version']}")


def place(tmp_path: Path, bootstrap: str) -> tuple[Settings, Pipeline]:
    """The shipped pipeline, on a topic and a lake of its own."""
    folder = tmp_path / "offers"
    folder.mkdir()
    for file in (conf_dir() / "pipelines" / "offers").iterdir():
        text = file.read_text(encoding="utf-8")
        (folder / file.name).write_text(
            text.replace('topic = "offers"', f'topic = "offers-{uuid.uuid4().hex[:8]}"'), encoding="utf-8"
        )
    pipeline = load_pipeline(folder)
    ensure_topics(pipeline.sources.values(), bootstrap)
    return load_settings({}, lake=tmp_path / "lake", pipeline=str(folder), kafka__bootstrap=bootstrap), pipeline


def arrived(lake: Lake, pipeline: Pipeline, offsets: dict[str, int], version: int) -> bool:
    """Whether every product holds all of the topic and of bronze."""
    for product in pipeline.products.values():
        mark = ProductStore(product, lake.table(product.layer, product.name), pipeline.name).mark()
        if mark is None or any(mark.through.get(at, 0) < end for at, end in offsets.items()):
            return False
        if mark.versions[0] < version:
            return False
        assert not any(at.startswith("file:") for at in mark.through)
    return True


def times(table: DeltaTable) -> list[int]:
    """``bronze_at`` of each commit that has rows, in the order of versions."""
    found = []
    root = Path(table.table_uri.removeprefix("file://"))
    for commit in sorted((root / "_delta_log").glob("[0-9]*.json")):
        adds = [
            json.loads(line)["add"]["path"] for line in commit.read_text().splitlines() if line.startswith('{"add"')
        ]
        rows = [pq.read_table(root / path, columns=["bronze_at"], partitioning=None) for path in adds]
        columns = [pc.cast(one["bronze_at"], pa.timestamp("us", "UTC")) for one in rows]  # Spark's files read as ns
        at = {value for column in columns for value in pc.cast(column, "int64").to_pylist()}
        assert len(at) <= 1
        found += sorted(at)
    return found


def test_feeds_and_stream_make_one_catalogue(tmp_path: Path, broker: EmbeddedBroker, spark: SparkSession) -> None:
    settings, pipeline = place(tmp_path, broker.bootstrap)
    lake, source = Lake(settings.lake), pipeline.sources["offers"]
    written = write_feeds(tmp_path / "in", SEED, MERCHANTS, OFFERS, ROUNDS, START_MS)
    assert written.malformed > 0
    # By the stream: offers of the files again, newer versions of some, and one merchant more.
    streamed = [offer(SEED, m, n, v, START_MS) for m in range(3, MERCHANTS + 1) for n in range(10) for v in (2, 5)]
    # Written directly: newer versions of some, and another merchant.
    written_directly = [offer(SEED, m, n, 7, START_MS) for m in (2, MERCHANTS + 2) for n in range(5)]

    def send() -> None:
        for start in range(0, len(streamed), 20):
            produce(broker.bootstrap, source.topic, [record(one) for one in streamed[start : start + 20]])

    with driving(spark, settings, None, Stages(), broker.bootstrap) as driver:
        sender = threading.Thread(target=send)
        sender.start()
        files = find([tmp_path / "in"])
        for start in range(0, len(files), 6):  # a commit each, among those of the stream
            assert load(LoadJob(lake, source, chunk_rows=50), files[start : start + 6]).ok
        copies = sorted((tmp_path / "in").rglob("*.csv"))
        for path in copies:  # again, by another way: its valid rows and its rejects are known
            path.with_suffix(".again.csv.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        again = load(LoadJob(lake, source), find([path.with_suffix(".again.csv.gz") for path in copies]))
        assert again.ok and sum(report.rejects for report in again.reports) > 0
        payloads = [json.dumps(one).encode() for one in written_directly]
        assert write_rows(lake, source, "job of today", payloads) > 0
        assert write_rows(lake, source, "job of today", payloads) == -1
        sender.join()
        offsets = ends(broker.bootstrap, source.topic)
        eventually(lambda: progress(lake.bronze("offers")).offsets == offsets, 300, driver.is_alive)
        version = DeltaTable(str(lake.bronze("offers").path)).version()
        eventually(lambda: arrived(lake, pipeline, offsets, version), 300, driver.is_alive)

    assert times(DeltaTable(str(lake.bronze("offers").path))) == sorted(
        set(times(DeltaTable(str(lake.bronze("offers").path))))
    )
    rows = [row for m in range(MERCHANTS) for turn in feed_rows(SEED, m, OFFERS, ROUNDS, START_MS) for row in turn]
    everything = [*(row for row in rows if row is not None), *streamed, *written_directly]
    check_catalogue(lake, everything)
    check_merchants(lake, everything)
    check_staging(lake, pipeline, everything)
    rejected = DeltaTable(str(lake.quarantine().path)).to_pyarrow_table()
    assert rejected.num_rows == written.malformed
    assert {name: found.equal for found in verify(spark, settings, pipeline) for name in [found.table]} == {
        "catalogue": True,
        "merchants": True,
        "quarantine": True,
    }


def latest(everything: list[Payload]) -> dict[tuple[Any, Any], Payload]:
    best: dict[tuple[Any, Any], Payload] = {}
    for one in everything:
        key = one["merchant"], one["offer"]
        if key not in best or int(str(one["version"])) > int(str(best[key]["version"])):
            best[key] = one
    return best


def check_catalogue(lake: Lake, everything: list[Payload]) -> None:
    found = run_sql(lake, f"SELECT {', '.join(SHOWN)} FROM catalogue").to_pylist()
    wanted = [tuple(one[name] for name in SHOWN) for one in latest(everything).values()]
    assert sorted(tuple(row.values()) for row in found) == sorted(wanted)


def check_merchants(lake: Lake, everything: list[Payload]) -> None:
    found = run_sql(lake, "SELECT merchant, versions FROM merchants").to_pylist()
    distinct = {(one["merchant"], one["offer"], one["version"]) for one in everything}
    assert {row["merchant"]: row["versions"] for row in found} == Counter(merchant for merchant, _, _ in distinct)


def check_staging(lake: Lake, pipeline: Pipeline, everything: list[Payload]) -> None:
    made = refresh(lake, pipeline, pipeline.staging["bargains"], rebuild=True)
    cheap = {
        key: one["price"]
        for key, one in latest(everything).items()
        if one["available"] and not one["deleted"] and float(str(one["price"])) < 20
    }
    found = run_sql(lake, "SELECT merchant, offer, price FROM bargains").to_pylist()
    assert {(row["merchant"], row["offer"]): row["price"] for row in found} == cheap
    assert made.rows == len(cheap)
