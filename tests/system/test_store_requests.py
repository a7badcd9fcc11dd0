"""What a lake in an object store is asked for, counted by a proxy before a real S3-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from lakehouse.bronze.query import BronzeWriter
from lakehouse.bronze.table import COLUMNS, BronzeClock, Progress, create
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product
from lakehouse.contract.settings import ServeSettings, Settings
from lakehouse.contract.storage import lake_path
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from serve.app import run_server
from tests.s3 import CountingProxy, S3Server
from tests.serve.conftest import receive, subscribed

pytestmark = pytest.mark.s3
IDLE_S = 10.0
TABLES, COMMITS = 2, 5
START = datetime(2026, 1, 1, tzinfo=UTC)
COUNTS = "SELECT window.start AS window_start, count(*) AS n FROM r GROUP BY window(t, '1 minute')"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingProxy]:
    server = S3Server(tmp_path_factory.mktemp("s3"), bucket="counted")
    server.start()
    proxy = CountingProxy(server)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.variables.items():
            patch.setenv(name, value)
        yield proxy
    proxy.close()
    server.stop()


@pytest.fixture
def lake(store: CountingProxy, tmp_path: Path) -> Lake:
    return Lake(lake_path(f"s3://counted/{tmp_path.name}"), tmp_path / "work")


def said(what: str, **found: object) -> None:
    print(json.dumps({"requests": what, **found}))


def test_of_a_commit_to_bronze(store: CountingProxy, lake: Lake) -> None:
    """The turn: 2. The data file: 1. Whether a loader came between: 1. The commit: 1."""
    table = lake.bronze("clicks")
    create(table)
    writer = BronzeWriter(table, Progress(), BronzeClock(lake, table))
    columns = [field for field in COLUMNS if field.name not in ("bronze_at", "date")]
    rows = pa.table({field.name: pa.nulls(1, field.type) for field in columns})
    writer.append(rows, {"clicks/0": 1})
    with store.counted() as found:
        writer.append(rows, {"clicks/0": 2})
    said("a commit to bronze", **found)
    assert found.total() <= 5


def product(lake: Lake, name: str) -> ProductStore:
    declared = Product("gold", "r", COUNTS, name=name)
    return ProductStore(declared, lake.table("gold", name), "test")


def counts(made: ProductStore, batch: int) -> None:
    rows = pa.table({"window_start": pa.array([START], pa.timestamp("us", "UTC")), "n": [1]})
    made.apply(rows, BatchMark("q", (batch,)))


def test_of_a_commit_to_a_product(store: CountingProxy, lake: Lake) -> None:
    """The data file: 1. Whether there is another writer: 1. The commit: 1. What it replaces is in memory."""
    made = product(lake, "counts")
    for batch in range(2):
        counts(made, batch)
    with store.counted() as found:
        counts(made, 2)
    said("a commit to a product", **found)
    assert found.total() <= 3


async def test_of_a_server(store: CountingProxy, lake: Lake) -> None:
    made = [product(lake, f"counts_{number}") for number in range(TABLES)]
    for one in made:
        counts(one, 0)
    stop, up = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = Settings(lake=lake.root, work=lake.work, pipeline="meetup", serve=ServeSettings(port=0))
    task = asyncio.create_task(run_server(settings, ready=up.set_result, stop=stop))
    async with subscribed(await up, "counts_0") as connection:
        await receive(connection, "snapshot")
        with store.counted() as idle:
            await asyncio.sleep(IDLE_S)
        said(f"{TABLES} served tables that stand still, {IDLE_S:.0f} s", **idle)
        # A slow machine asks less, never more.
        assert idle.total() <= TABLES * IDLE_S
        began = len(store.seen)
        for number in range(1, COMMITS + 1):
            row = pa.table({"window_start": pa.array([START], pa.timestamp("us", "UTC")), "n": [number + 1]})
            await asyncio.to_thread(
                write_deltalake, str(made[0].table.path), row, mode="append", storage_options=store.behind
            )
            await receive(connection, "change")
        asked = [place for place in store.seen[began:] if "counts_0" in place[1]]
        said(f"{COMMITS} commits that a server tails", all=len(asked), without_repeated_looks=len(set(asked)))
        # The commit, whether the log is still the same one, and the data file; and a look for the next commit.
        assert len(set(asked)) <= 3 * COMMITS + 1
    stop.set()
    await task
