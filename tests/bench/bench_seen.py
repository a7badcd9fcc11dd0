"""How long the index of seen events takes to judge a batch, by its size: ``python -m tests.bench.bench_seen [SIZE …]``.

Batches of 14,000 events that were never seen (what 35,000 events/s give every 400 ms) into an index that holds so many
already; the median of nine. The last line is one JSON object: milliseconds by size, and bytes an entry on the disk.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from lakehouse.bronze.seen import RunIndex

BATCH = 14_000
FILL = 500_000


def main() -> None:
    sizes = [int(size) for size in sys.argv[1:]] or [0, 1_000_000, 4_000_000, 8_000_000]
    chance = np.random.default_rng(1)
    found = {}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        index = RunIndex(Path(name))
        for size in sorted(sizes):
            while (missing := size - len(index)) > 0:
                index.judge(rows(chance, min(FILL, missing), len(index)), "fill")
            took = []
            for _ in range(10):
                batch = rows(chance, BATCH, len(index))
                began = time.perf_counter()
                counts = index.judge(batch, "batch")
                took.append((time.perf_counter() - began) * 1000)
                assert counts.all()
            found[str(size)] = round(statistics.median(took[1:]), 1)
            sys.stderr.write(f"{size:>12,} entries: {found[str(size)]} ms a batch of {BATCH:,}\n")
        used = sum(path.stat().st_size for path in Path(name).iterdir()) / len(index)
        index.close()
    sys.stdout.write(json.dumps({"batch_ms": found, "bytes_an_entry": round(used)}) + "\n")


def rows(chance: np.random.Generator, count: int, first: int) -> pa.Table:
    """Rows with random keys at the next offsets."""
    keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(chance.bytes(16 * count))])
    return pa.table(
        {
            "dedupe_key": keys.cast(pa.binary()),
            "topic": pa.array(["t"]).take(pa.array(np.zeros(count, np.int64))),
            "partition": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(np.arange(first, first + count)),
            "bronze_at": pa.array(np.full(count, first)).cast(pa.timestamp("us", "UTC")),
        }
    )


if __name__ == "__main__":
    main()
