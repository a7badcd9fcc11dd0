"""CPU of a commit to a product and to bronze, by the length of the log; ``python -m tests.bench.bench_commit``.

A product of 60 groups a window, and micro-batches of 600 RSVPs; and what the compaction of 64 long batches costs,
20,000 page views each. The logs are filled with commits without rows, and a checkpoint is written every 200, as care
does. CPU is of this process, all threads. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from rich.console import Console

from lakehouse.bronze.query import BronzeWriter
from lakehouse.bronze.table import COLUMNS, BronzeClock, Progress, create
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.envelope import fingerprint
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from lakehouse.maintain.care import MANY_BRONZE_FILES, compact_bronze
from tests.bench.lakehouse_cases import CASES

START = datetime(2026, 1, 1, tzinfo=UTC)
SQL = "SELECT window.start AS window_start, city, count(*) AS n FROM r GROUP BY window(t, '1 minute'), city"
BATCH, LONG_BATCH, GROUPS, CHECKPOINT_EVERY = 600, 20_000, 60, 200
err = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=int, nargs="+", default=[100, 2_000, 10_000], help="commits that the log holds")
    parser.add_argument("--commits", type=int, default=50, help="that are measured")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for size in options.log:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            lake = Lake(Path(folder))
            found[f"{size}"] = {
                "product": measured(product(lake, size), options.commits),
                "bronze": measured(bronze(lake, size), options.commits),
            }
        err.print(f"{size:,} commits: {found[f'{size}']}")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        found["compaction"] = compaction(Lake(Path(folder)))
    err.print(f"Compaction: {found['compaction']}")
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def product(lake: Lake, size: int) -> Callable[[int], object]:
    """Commits of a product whose log holds so many."""
    made = Product("gold", "r", SQL, name="counts")
    table = lake.table("gold", "counts")
    cities, ones = [f"city {n}" for n in range(GROUPS)], [1] * GROUPS

    def commit(store: ProductStore, batch: int) -> None:
        start = pa.array([START + timedelta(minutes=batch // 100)] * GROUPS, pa.timestamp("us", "UTC"))
        store.apply(pa.table({"window_start": start, "city": cities, "n": ones}), BatchMark("q", (batch,)))

    commit(ProductStore(made, table, "bench"), 0)
    fill(table, size)
    store = ProductStore(made, table, "bench")
    return lambda batch: commit(store, batch + 1)


def bronze(lake: Lake, size: int) -> Callable[[int], object]:
    """Commits of a bronze table whose log holds so many."""
    table = lake.bronze("r")
    create(table)
    fill(table, size)
    writer = BronzeWriter(table, Progress(), BronzeClock(lake, table))
    rows = rows_of(list(itertools.islice(CASES["meetup"].lines(1, 1_760_000_000_000, 1_000.0), BATCH)))
    return lambda batch: writer.append(rows, {"r/0": (batch + 1) * BATCH})


def rows_of(payloads: list[bytes]) -> pa.Table:
    """Bronze rows, less the columns that a commit gives."""
    count = len(payloads)
    columns: dict[str, pa.Array] = {
        field.name: pa.nulls(count, field.type) for field in COLUMNS if field.name not in ("bronze_at", "date")
    }
    columns["payload"] = pa.array(payloads, pa.binary())
    columns["fingerprint"] = pa.array(map(fingerprint, payloads), pa.string())
    columns["event_id"] = pa.array([f"{n:032}" for n in range(count)])
    columns["topic"], columns["offset"] = pa.array(["r"] * count), pa.array(range(count), pa.int64())
    return pa.table(columns)


def compaction(lake: Lake) -> dict[str, float]:
    """CPU of a compaction, microseconds an event, and the bytes of an event's files before and after it."""
    table, views = lake.bronze("v"), CASES["clicks"].lines(1, 1_760_000_000_000, 1_000.0)
    create(table)
    writer = BronzeWriter(table, Progress(), BronzeClock(lake, table))
    for batch in range(MANY_BRONZE_FILES):
        writer.append(rows_of(list(itertools.islice(views, LONG_BATCH))), {"v/0": (batch + 1) * LONG_BATCH})
    events = MANY_BRONZE_FILES * LONG_BATCH

    def event_bytes() -> float:
        actions = DeltaTable(str(table.path)).get_add_actions(flatten=True)
        return round(sum(actions.column("size_bytes").to_pylist()) / events, 1)

    before, cpu = event_bytes(), time.process_time()
    compact_bronze(lake, table)
    used = time.process_time() - cpu
    assert DeltaTable(str(table.path)).to_pyarrow_dataset().count_rows() == events
    return {"cpu_us": round(used / events * 1e6, 2), "bytes_before": before, "bytes_after": event_bytes()}


def fill(table: TableRef, size: int) -> None:
    log = DeltaLog(table.path)
    assert isinstance(log.folder, Path)
    first = log.newest() + 1
    for version in range(first, size):
        info = {"timestamp": 1_760_000_000_000 + version, "operation": "WRITE", "operationParameters": {}}
        log.folder.joinpath(f"{version:020}.json").write_text(json.dumps({"commitInfo": info}) + "\n")
        if version % CHECKPOINT_EVERY == 0:
            DeltaTable(str(table.path)).create_checkpoint()


def measured(commit: Callable[[int], object], commits: int) -> dict[str, float]:
    """CPU and wall time of a commit, milliseconds."""
    commit(0)  # opens the table
    cpu, wall = time.process_time(), time.perf_counter()
    for batch in range(1, commits + 1):
        commit(batch)
    return {
        "cpu_ms": round((time.process_time() - cpu) / commits * 1000, 2),
        "wall_ms": round((time.perf_counter() - wall) / commits * 1000, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
