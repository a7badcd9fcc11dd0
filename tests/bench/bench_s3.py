"""A lake in an object store beside one on this machine's disk; ``make bench-s3 ARGS="--seconds 40"``.

The store is a real S3-compatible server on this machine (:mod:`tests.s3`). Steps, each on files and on the store:

1. ``notice``: from the end of a commit to the change that the server's tail makes of it; one commit each 0.2 to 1 s.
2. ``latency``: the worked case as :mod:`tests.bench.bench_latency` measures it.
3. ``catch-up``: as :mod:`tests.bench.bench_lakehouse` measures it.

``latency`` and ``catch-up`` in the result are the store's figure divided by the disk's. The last line is one JSON
object. Exit status 1: an event was lost, or counted twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingest.broker import EmbeddedBroker
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import LakePath, lake_path
from serve.tables.state import TableReader
from serve.tables.tables import Opened, Tail
from tests.bench import bench_lakehouse
from tests.bench.bench_latency import ROOT, Code, measure_millrace
from tests.s3 import BUCKET, S3Server
from tests.serve.lakes import top_topics, topics, window

STEPS = ("notice", "latency", "catch-up")
PLACES = ("files", "s3")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the worked case, each")
    parser.add_argument("--rate", type=float, default=1_000.0, help="events a second of the worked case")
    parser.add_argument("--events", type=int, default=1_000_000, help="of the catch-up")
    parser.add_argument("--commits", type=int, default=60, help="to notice")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name, store(Path(name)):
        folder = Path(name)
        if "notice" in options.steps:
            for place in PLACES:
                found[f"notice_ms_{place}"] = asyncio.run(notice(root(folder, place, "notice"), options.commits))
        if "latency" in options.steps:
            measured = {place: worked_case(folder, place, options.seconds, options.rate) for place in PLACES}
            found |= {f"latency_{place}": figures for place, figures in measured.items()}
            found["latency"] = _ratios(measured["s3"]["latency_ms"], measured["files"]["latency_ms"])
        if "catch-up" in options.steps:
            caught = catch_up(folder, options.events)
            found |= {f"catch_up_{place}": figures for place, figures in caught.items()}
            rates = {place: figures["catch_up_events_s"] for place, figures in caught.items()}
            found["catch_up"] = round(rates["s3"] / rates["files"], 3)
    sys.stdout.write(json.dumps(found) + "\n")
    wrong = [figures.get(name) for figures in found.values() if isinstance(figures, dict) for name in ("lost", "twice")]
    return 1 if any(wrong) else 0


@contextlib.contextmanager
def store(folder: Path) -> Iterator[None]:
    """The server runs, and this process and its children know it."""
    server = S3Server(folder / "s3")
    server.start()
    os.environ.update(server.variables)
    try:
        yield
    finally:
        server.stop()


def root(folder: Path, place: str, name: str) -> LakePath:
    return lake_path(f"s3://{BUCKET}/{name}" if place == "s3" else folder / name)


async def notice(lake: LakePath, commits: int) -> dict[str, float]:
    """Milliseconds from the end of a commit to its change, by a tail as a server has it."""
    chance, product = random.Random(1), top_topics(lake)
    took = []
    events = Tail(TableReader(product.folder), poll_ms=20).follow()
    assert isinstance(await anext(events), Opened)
    for number in range(commits):
        change = asyncio.ensure_future(anext(events))
        await asyncio.sleep(chance.uniform(0.2, 1.0))
        await asyncio.to_thread(product.overwrite, topics(number, [3, 2, 1]), [window(number)])
        ended = time.perf_counter()
        await change
        took.append((time.perf_counter() - ended) * 1000)
    # The first finds a tail that looks rarely, since nothing had changed for long.
    return {f"p{p}": round(float(np.percentile(took[1:], p)), 1) for p in (50, 99)}


def worked_case(folder: Path, place: str, seconds: float, rate: float) -> dict[str, Any]:
    name = f"worked-{place}"
    lake = Lake(root(folder, place, name), folder / f"{name}-work")
    code = Code("", ROOT, {"MILLRACE_WORK": str(lake.work)}, lake)
    figures = measure_millrace(code, seconds, rate)
    return {
        "latency_ms": figures["latency_ms_warm"],
        "driver_cpu_s_per_s": figures["driver_cpu_s_per_s"],
        "lost": figures["lost"],
        "twice": figures["counted_twice"],
    }


def catch_up(folder: Path, events: int) -> dict[str, dict[str, Any]]:
    """One topic, read into a lake of each kind."""
    broker = EmbeddedBroker(folder / "broker", die_with_parent=True)
    bootstrap = broker.start()
    try:
        found = {}
        for place in PLACES:
            lake = Lake(root(folder, place, f"catch-up-{place}"), folder / f"catch-up-{place}-work")
            site = bench_lakehouse.site_at(folder, "clicks", "filled", bootstrap, lake)
            if not site.sent:
                bench_lakehouse.fill(site, events)
            found[place] = bench_lakehouse.catch_up(site)
        return found
    finally:
        broker.stop()


def _ratios(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: round(one[key] / other[key], 3) for key in ("p50", "p99")}


if __name__ == "__main__":
    sys.exit(main())
