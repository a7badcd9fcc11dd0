"""How many rows a second the batch loader brings into bronze: ``python -m tests.bench.bench_loader [--rows N]``.

Offers of 14,000 merchants (about 300 bytes of JSON a row) as feed files of each format, written beforehand; the time
runs from the call of the loader, its worker processes' start included, to its last commit. Each format into a lake of
its own. ``--end-to-end`` then runs the pipeline's Spark driver over what was loaded, from the start of the loader to
the commit of ``catalogue`` that holds the last offer: loading and products one after the other, so the rate of both
side by side is no lower. The last line is one JSON object; ``loader_rows_s`` is that of JSON lines.
Bronze and the catalogue are counted: ``lost`` offers are not in it, ``twice`` rows are too many; exit status 1 where
there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import duckdb
from deltalake import DeltaTable
from rich.console import Console

from ingest.simulate.scenes import offer
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir
from lakehouse.gold.store import ProductStore
from lakehouse.load.files import find
from lakehouse.load.loader import Load, load
from lakehouse.load.worker import LoadJob
from serve.sql.statement import run_sql
from tests.bench.cpu import cpu_s

FORMATS = ("jsonl", "jsonl.gz", "csv", "parquet")
PATIENCE_S = 1_800.0
err = Console(stderr=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--end-to-end", action="store_true")
    options = parser.parse_args(arguments)
    sizes = {"files": options.files, "workers": options.workers}
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        found = measure(Path(folder), options.rows, formats=options.formats, **sizes)
    if options.end_to_end:
        found |= {name: found.get(name, 0) + value for name, value in end_to_end(options.rows, **sizes).items()}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.exit(1 if found["lost"] or found["twice"] else 0)


def measure(
    folder: Path, rows: int = 1_000_000, *, files: int = 16, workers: int = 2, formats: Sequence[str] = FORMATS
) -> dict[str, float]:
    """Rows a second into bronze, by format; prints them, and returns ``loader_rows_s`` with the others.

    ``lost`` and ``twice``, of all formats together, are what bronze has not and what it has too often.

    Args:
        folder: for the files and lakes; made where absent, and left empty.
    """
    found: dict[str, float] = {"lost": 0, "twice": 0}
    for kind in formats:
        place = folder / kind
        size = write(place / "in", rows, files, kind)
        before = _cpu_s()
        done = _load(place, workers)
        cpu = _cpu_s() - before
        rate = done.new_rows / done.seconds
        lost, twice = count(Lake(place / "lake"), rows)
        found["lost"] += lost
        found["twice"] += twice
        found["loader_rows_s" if kind == "jsonl" else f"loader_{kind.replace('.', '_')}_rows_s"] = round(rate)
        err.print(
            f"{kind:>9}: {done.new_rows:,} rows, {size / 1e6:,.0f} MB in {done.seconds:.1f} s: {rate:,.0f} rows/s; "
            f"{cpu / done.new_rows * 1e6:.1f} s of CPU a million rows; {workers} workers; "
            f"lost {lost}, twice {twice}",
            soft_wrap=True,
        )
        shutil.rmtree(place)
    return found


def write(folder: Path, rows: int, files: int, kind: str) -> int:
    """Feed files with so many rows in all, made of a thousand different offers each; returns their bytes."""
    import gzip

    import pyarrow as pa
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    models = [offer(1, number * 13 % 14_000, number, 1, 1_790_000_000_000) for number in range(1_000)]
    for number in range(files):
        count = rows // files + (number < rows % files)
        made = [{**models[i % 1_000], "offer": f"o{number:03}{i:07}", "version": 1 + i % 7} for i in range(count)]
        path = folder / f"offers-{number:03}.{kind}"
        if kind.startswith("jsonl"):
            text = b"".join(json.dumps(row).encode() + b"\n" for row in made)
            path.write_bytes(gzip.compress(text, 1) if kind.endswith("gz") else text)
        elif kind == "csv":
            pacsv.write_csv(pa.Table.from_pylist(made), path)
        else:
            pq.write_table(pa.Table.from_pylist(made), path)
    return sum(path.stat().st_size for path in folder.iterdir())


def count(lake: Lake, rows: int) -> tuple[int, int]:
    """Of so many offers, each of an id of its own: how many bronze has not, and rows that it has beyond the others."""
    offers = DeltaTable(str(lake.bronze("offers").path)).to_pyarrow_dataset()
    held = duckdb.connect().register("bronze", offers)
    told = held.execute("SELECT count(*), count(DISTINCT event_id) FROM bronze").fetchone()
    assert told is not None
    return rows - told[1], told[0] - told[1]


def end_to_end(rows: int = 1_000_000, *, files: int = 16, workers: int = 2) -> dict[str, float]:
    """``offers_end_to_end_s``: offers a second from the loader's start to the catalogue that holds them all.

    The driver's start is left out. ``lost`` and ``twice`` are of the catalogue's rows.
    """
    pipeline = load_pipeline(conf_dir() / "pipelines" / "offers")
    with tempfile.TemporaryDirectory(prefix="bench-offers-") as text:
        folder = Path(text)
        write(folder / "in", rows, files, "jsonl")
        lake = Lake(folder / "lake")
        arguments = ["--lake", str(lake.root), "--pipeline", "offers"]
        environment = {**os.environ, "MILLRACE_SPARK_REHEARSE": "false"}
        command = [sys.executable, "-m", "jobs.run_pipeline", "--only", "products", *arguments]
        with (folder / "driver.log").open("wb") as log:
            driver = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            store = ProductStore(pipeline.products["catalogue"], lake.table("gold", "catalogue"), "offers")
            _load(folder / "warm", workers, lake, write_rows=1_000)
            _wait(lambda: _holds(lake, store), driver, folder)
            began, cpu = time.monotonic(), cpu_s(driver.pid)
            _load(folder, workers, lake)
            _wait(lambda: _holds(lake, store), driver, folder)
            took = time.monotonic() - began
            held = run_sql(lake, "SELECT count(*) AS n FROM catalogue").to_pylist()[0]["n"]
            cpu = cpu_s(driver.pid) - cpu
            err.print(
                f"end to end: {rows:,} offers in {took:.1f} s: {rows / took:,.0f}/s; the catalogue has {held:,}; "
                f"the driver used {cpu / rows * 1e6:.1f} s of CPU a million offers",
                soft_wrap=True,
            )
            lost, twice = max(0, rows - held), max(0, held - rows)
            return {"offers_end_to_end_s": round(rows / took), "lost": lost, "twice": twice}
        finally:
            driver.terminate()
            driver.wait()


def _load(folder: Path, workers: int, lake: Lake | None = None, *, write_rows: int = 0) -> Load:
    if write_rows:
        write(folder / "in", write_rows, 1, "jsonl")
    source = load_pipeline(conf_dir() / "pipelines" / "offers").sources["offers"]
    done = load(LoadJob(lake or Lake(folder / "lake"), source), find([folder / "in"]), workers=workers)
    assert done.ok, [report for report in done.reports if not report.ok]
    return done


def _holds(lake: Lake, store: ProductStore) -> bool:
    mark = store.mark()
    return mark is not None and mark.versions[0] >= DeltaTable(str(lake.bronze("offers").path)).version()


def _wait(check: object, driver: subprocess.Popen[bytes], folder: Path) -> None:
    assert callable(check)
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        if driver.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError((folder / "driver.log").read_text()[-2_000:])
        time.sleep(0.1)


def _cpu_s() -> float:
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


if __name__ == "__main__":
    main()
