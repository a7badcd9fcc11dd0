"""Ways to keep the latest row of each key: ``python -m tests.bench.bench_latest [--keys N] [--batch N]``.

A table of so many keys, then batches of so many rows of random keys: appended (and folded on reading), merged by
delta-rs, or put in place by buckets of the key. Seconds a batch, and seconds to count and to look one key up. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from rich.console import Console

from lakehouse.contract.pipeline import Product
from lakehouse.contract.rows import LATEST, Fold
from lakehouse.operators.rows import Latest

BUCKETS = 64
COLUMNS = ("key", "bucket", "version", "title", "price", "tie")
err = Console(stderr=True)
operator = Latest(Product("gold", "s", "SELECT 1", operator="latest", by=("key",), version="version", name="t"))
Write = Callable[[Path, pa.Table], None]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=2_000_000)
    parser.add_argument("--batch", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=5)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    first = rows(np.arange(options.keys), 0)
    operator.describe(first.schema)
    batches = [rows(rng.integers(0, options.keys, options.batch), n + 1) for n in range(options.batches)]
    found: dict[str, float] = {}
    ways: dict[str, Write] = {"append": append, "merge": merge, "buckets": buckets}
    with tempfile.TemporaryDirectory(prefix="bench-latest-") as folder:
        for name, write in ways.items():
            path = Path(folder) / name
            write_deltalake(str(path), first, partition_by=["bucket"] if name == "buckets" else None)
            began = time.monotonic()
            for batch in batches:
                write(path, operator.merge(None, batch))
            found[f"{name}_batch_s"] = round((time.monotonic() - began) / len(batches), 2)
            for what, where in (("count", ""), ("look_up", " WHERE key = 12345")):
                began = time.monotonic()
                read(path, f"SELECT count(*), sum(version) FROM ({{}}){where}", folded=name == "append")
                found[f"{name}_{what}_s"] = round(time.monotonic() - began, 3)
            err.print(name, {key: value for key, value in found.items() if key.startswith(name)}, soft_wrap=True)
    sys.stdout.write(json.dumps(found) + "\n")


def rows(keys: np.ndarray, version: int) -> pa.Table:  # type: ignore[type-arg]
    """A row a key, about 80 bytes of it."""
    titles = pa.array([f"Thing {key % 9973} of good quality, version {version}" for key in keys.tolist()])
    return pa.table(
        {
            "key": pa.array(keys, pa.int64()),
            "bucket": pa.array(keys % BUCKETS, pa.int32()),
            "version": pa.array(np.full(len(keys), version), pa.int64()),
            "title": titles,
            "price": pa.array(keys % 977 / 7.0),
            "tie": pa.array(keys * 31 + version, pa.int64()),
        }
    )


def append(path: Path, batch: pa.Table) -> None:
    """The batch's rows, and nothing else."""
    write_deltalake(str(path), batch, mode="append")


def merge(path: Path, batch: pa.Table) -> None:
    """Update or insert, by delta-rs."""
    merger = DeltaTable(str(path)).merge(batch, "t.key = s.key", source_alias="s", target_alias="t")
    merger.when_matched_update_all("s.version > t.version").when_not_matched_insert_all().execute()


def buckets(path: Path, batch: pa.Table) -> None:
    """Rewrite the buckets that the batch touches."""
    touched = sorted(set(batch["bucket"].to_pylist()))
    held = DeltaTable(str(path)).to_pyarrow_table(filters=[("bucket", "in", touched)])
    merged = operator.merge(held.select(batch.schema.names).cast(batch.schema), batch)
    predicate = f"bucket IN ({', '.join(map(str, touched))})"
    write_deltalake(str(path), merged, mode="overwrite", predicate=predicate, partition_by=["bucket"])


def read(path: Path, sql: str, *, folded: bool) -> None:
    """Ask DuckDB."""
    with duckdb.connect(config={"threads": "2"}) as connection:
        connection.register("t", DeltaTable(str(path)).to_pyarrow_dataset())
        fold = Fold(("key",), dict.fromkeys(COLUMNS[1:], LATEST), ("version", "tie"))
        connection.sql(sql.format(fold.sql("t", COLUMNS) if folded else "SELECT * FROM t")).fetchall()


if __name__ == "__main__":
    main()
