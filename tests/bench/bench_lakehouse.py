"""What the lakehouse takes, beside a plain Spark job; ``make bench-lakehouse ARGS="--events 2000000"``.

Steps, one after the other on an idle machine, each with the real broker, Spark and Delta:

1. ``catch-up``: the topic is full of made-up events before ``millrace run`` starts; from the start of its first bronze
   batch to the commit of the last product that holds them all. Bronze and three products.
2. ``plain``: the plain job (:mod:`tests.bench.plain_spark_job`: readStream → groupBy → foreachBatch MERGE, default
   settings) on the same topic: one of those products, no record, no dedupe; from its query's start to its last MERGE.
   Then a trickle: its latency from an event's sending to the end of the MERGE that holds it.
3. ``sustained``: events come at ``--rate`` for ``--seconds`` while the pipeline runs, after ``--warm`` events in which
   the JVM compiles what it runs; events over the time from the first one's sending to the commit of the last product
   that holds the last.
4. ``growth``: latency of a trickle on a lake of a few rows, and on the lake that step 1 filled (1,000 times as many):
   from an event's sending to the commit of the slowest product that holds it.
5. ``loader``: the batch loader (:mod:`tests.bench.bench_loader`).
6. ``end-to-end``: feed files by the loader into bronze, and by a driver into the catalogue of pipeline ``offers``.

``--case meetup`` sends RSVPs of 1.4 KB to the worked case, ``--case clicks`` page views of 200 bytes to a pipeline of
three products. The driver runs with the default settings.
After each of 1, 3 and 4 the products are counted: no event may be missing, none may count twice. CPU is of the whole
driver process with its JVM.
``--folder`` keeps topics and lakes between runs, so that the steps can be run one by one (``--steps fill``, then
``--steps catch-up``, …). The last line is one JSON object; ``floors`` in it says which of :data:`FLOORS` were met.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from deltalake import DeltaTable
from rich.console import Console

from ingest.broker import EmbeddedBroker
from ingest.kafka import ensure_topics
from jobs.local.stack import DRIVER
from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.storage import LakePath
from tests.bench import bench_loader
from tests.bench.cpu import cpu_s
from tests.bench.lakehouse_cases import CASES

PATIENCE_S = 900.0
Commit = tuple[float, dict[str, int]]  # when it was made, ms since the epoch; TOPIC/PARTITION to the next offset
STEPS = ("fill", "catch-up", "plain", "sustained", "growth", "loader", "end-to-end")
FLOORS: dict[str, Callable[[float], bool]] = {
    "sustained_events_s": lambda found: found >= 70_000,
    "loader_rows_s": lambda found: found >= 100_000,
    "offers_end_to_end_s": lambda found: found >= 35_000,
    "latency_growth": lambda found: found <= 1.1,
}
err = Console(stderr=True)


@dataclass(slots=True)
class Sent:
    """What one feed put on the topic."""

    partition: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    sent_ms: npt.NDArray[np.float64]
    ids: npt.NDArray[np.uint64]
    bytes: int

    @classmethod
    def read(cls, file: Path) -> Sent:
        """What :mod:`tests.bench.lakehouse_feed` noted."""
        with np.load(file) as found:
            return cls(found["partition"], found["offset"], found["sent_ms"], found["id"], int(found["bytes"]))

    def ends(self, topic: str) -> dict[str, int]:
        """``TOPIC/PARTITION`` to the offset behind its last event."""
        return {f"{topic}/{p}": int(self.offset[self.partition == p].max()) + 1 for p in np.unique(self.partition)}


@dataclass(slots=True)
class Site:
    """A lake, its topic and what was sent to it; notes of that lie in ``notes``."""

    case: str
    lake: Lake
    notes: Path
    pipeline: Pipeline
    topic: str
    bootstrap: str
    sent: list[Sent] = field(default_factory=list)

    def products(self) -> list[LakePath]:
        """Folders of the products."""
        return [self.lake.table(p.layer, p.name).path for p in self.pipeline.products.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000, help="of the catch-up")
    parser.add_argument("--rate", type=float, default=38_000.0, help="events a second of the sustained run")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the sustained run")
    parser.add_argument("--trickle", type=float, default=100.0, help="events a second of the growth runs")
    parser.add_argument("--warm", type=int, default=2_000_000, help="events before the sustained run")
    parser.add_argument("--case", choices=sorted(CASES), default="clicks")
    parser.add_argument("--folder", type=Path, help="keeps topics and lakes; else they are made and removed")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as name:
        found = measure(options, (options.folder or Path(name)).resolve())
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found.get("lost", 0) == found.get("twice", 0) == 0 else 1


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the steps that were asked for, in their order."""
    found: dict[str, Any] = {"case": options.case}
    if set(options.steps) - {"loader", "end-to-end"}:
        broker = EmbeddedBroker(folder / "broker", die_with_parent=True)
        bootstrap = broker.start()
        try:
            site = site_at(folder, options.case, "filled", bootstrap)
            steps: dict[str, Callable[[], dict[str, Any]]] = {
                "fill": lambda: fill(site, options.events),
                "catch-up": lambda: catch_up(site),
                "plain": lambda: plain(site, folder, options.trickle),
                "sustained": lambda: sustained(folder, site, options.rate, options.seconds, options.warm),
                "growth": lambda: growth(folder, site, options.trickle),
            }
            for step, run in steps.items():
                if step in options.steps:
                    _add(found, run())
        finally:
            broker.stop()
    if "loader" in options.steps:
        _add(found, bench_loader.measure(folder / "loader"))
    if "end-to-end" in options.steps:
        _add(found, bench_loader.end_to_end())
    found["floors"] = {name: met(found[name]) for name, met in FLOORS.items() if name in found}
    return found


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        found[key] = found.get(key, 0) + value if key in ("lost", "twice") else value


def fill(site: Site, events: int) -> dict[str, Any]:
    """Put the events of the catch-up on the topic, beforehand."""
    err.print(f"Filling the topic with {events:,} events …")
    sent = feed(site, events)
    return {"event_bytes": round(sent.bytes / len(sent.offset))}


def catch_up(site: Site) -> dict[str, Any]:
    """Step 1."""
    if not site.sent:
        raise SystemExit("the topic is empty: run the step fill first")
    sent = site.sent[0]
    events = len(sent.offset)
    err.print("Catch-up: millrace run …")
    with Driver(site) as driver:
        cpu = driver.cpu_s()
        ended = _wait_for(site, sent)
        used = driver.cpu_s() - cpu
    began = _first_batch_ms(site)
    rate = events / (ended - began) * 1000
    lost, twice = _count(site)
    size = sent.bytes / events
    err.print(
        f"  {rate:,.0f} events/s, {rate * size / 1e6:.1f} MB/s, {used / events * 1e6:.0f} CPU s a million events, "
        f"lost {lost}, twice {twice}"
    )
    return {
        "catch_up_events_s": round(rate),
        "catch_up_mb_s": round(rate * size / 1e6, 1),
        "catch_up_cpu_s_per_million": round(used / events * 1e6, 1),
        "lost": lost,
        "twice": twice,
    }


def plain(site: Site, folder: Path, trickle: float) -> dict[str, Any]:
    """Step 2."""
    err.print("The plain job on the same topic …")
    commits, ready = folder / "commits.jsonl", folder / "ready"
    command = [sys.executable, "-m", "tests.bench.plain_spark_job", "--lake", str(folder / "plain")]
    command += ["--kafka", site.bootstrap, "--commits", str(commits), "--ready", str(ready), "--case", site.case]
    command += ["--topic", site.topic]

    def commits_made() -> list[Commit]:
        rows = [json.loads(line) for line in commits.read_text().splitlines()] if commits.exists() else []
        return [(row["at_ms"], {f"{site.topic}/{p}": end for p, end in row["ends"].items()}) for row in rows]

    def wait_for(sent: Sent) -> None:
        ends = sent.ends(site.topic)

        def reached() -> bool:
            made = commits_made()
            return bool(made) and all(made[-1][1].get(place, 0) >= end for place, end in ends.items())

        _until(reached)

    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(ready.exists)
        began, cpu = time.time() * 1000, cpu_s(job.pid)
        wait_for(site.sent[0])
        ended = commits_made()[-1][0]
        used = cpu_s(job.pid) - cpu
        sent = feed(site, int(trickle * 30), rate=trickle, seed=31)
        wait_for(sent)
        latency = float(np.median(_reached_ms(site.topic, commits_made(), sent) - sent.sent_ms))
    finally:
        _end(job)
    events = len(site.sent[0].offset)
    rate = events / (ended - began) * 1000
    err.print(f"  {rate:,.0f} events/s, {used / events * 1e6:.0f} CPU s a million events, p50 {latency:,.0f} ms")
    return {
        "plain_spark_events_s": round(rate),
        "plain_spark_cpu_s_per_million": round(used / events * 1e6, 1),
        "plain_spark_latency_ms": round(latency),
    }


def sustained(folder: Path, site: Site, rate: float, seconds: float, warm: int) -> dict[str, Any]:
    """Step 3."""
    err.print(f"Sustained: {rate:,.0f} events/s for {seconds:.0f} s, after {warm:,} …")
    fresh = site_at(folder, site.case, f"sustained-{time.time_ns()}", site.bootstrap)
    with Driver(fresh) as driver:
        for part in (min(warm, 20_000), max(0, warm - 20_000)):
            if part:
                _wait_for(fresh, feed(fresh, part, seed=7))
        cpu = driver.cpu_s()
        sent = feed(fresh, int(rate * seconds), rate=rate, seed=8)
        ended = _wait_for(fresh, sent)
        used = driver.cpu_s() - cpu
    took_s = (ended - sent.sent_ms[0]) / 1000
    behind_s = (ended - sent.sent_ms[-1]) / 1000
    lost, twice = _count(fresh)
    found = len(sent.offset) / took_s
    err.print(
        f"  {found:,.0f} events/s; the last was in gold {behind_s:.1f} s after it was sent; lost {lost}, twice {twice}"
    )
    return {
        "lost": lost,
        "twice": twice,
        "sustained_events_s": round(found),
        "sustained_mb_s": round(found * sent.bytes / len(sent.offset) / 1e6, 1),
        "sustained_offered_s": round(len(sent.offset) / ((sent.sent_ms[-1] - sent.sent_ms[0]) / 1000)),
        "sustained_behind_s": round(behind_s, 1),
        "sustained_cpu_s_per_million": round(used / len(sent.offset) * 1e6, 1),
    }


def growth(folder: Path, site: Site, rate: float) -> dict[str, Any]:
    """Step 4: rows of the trickle before the measuring are a thousandth of those in the lake."""
    bronze = site.lake.bronze(CASES[site.case].source)
    rows = DeltaTable(str(bronze.path)).to_pyarrow_dataset().count_rows() if bronze.exists() else 0
    few = rows // 1000
    if few < 100:
        raise SystemExit(f"the lake has {rows:,} rows, too few to compare with: run fill and catch-up before growth")
    empty = site_at(folder, site.case, f"empty-{time.time_ns()}", site.bootstrap)
    latency = {}
    for name, place in (("empty", empty), ("full", site)):
        err.print(f"Growth: {rate:,.0f} events/s on the {name} lake …")
        with Driver(place):
            _wait_for(place, feed(place, few, rate=rate, seed=21))
            sent = feed(place, int(rate * 30), rate=rate, seed=22)
            _wait_for(place, sent)
        latency[name] = float(np.median(_latency_ms(place, sent)))
    lost, twice = _count(empty)
    again = _count(site)
    err.print(f"  p50 {latency}, lost {lost + again[0]}, twice {twice + again[1]}")
    return {
        "latency_growth": round(latency["full"] / latency["empty"], 3),
        "latency_empty_ms": round(latency["empty"]),
        "latency_full_ms": round(latency["full"]),
        "latency_full_rows": rows,
        "lost": lost + again[0],
        "twice": twice + again[1],
    }


# Parts


def site_at(folder: Path, case: str, name: str, bootstrap: str, lake: Lake | None = None) -> Site:
    """A lake with the case's pipeline on a topic of its own; what was sent to it in an earlier run is known."""
    place = folder / f"{case}-{name}"
    made, found = CASES[case], place / "pipeline"
    topic = load_pipeline(made.pipeline).sources[made.source].topic
    if not found.exists():
        found.mkdir(parents=True)
        for file in made.pipeline.iterdir():
            text = file.read_text(encoding="utf-8")
            (found / file.name).write_text(text.replace(f'"{topic}"', f'"{topic}-{name}"'), encoding="utf-8")
    pipeline = load_pipeline(found)
    source = pipeline.sources[made.source]
    ensure_topics(bootstrap, [source])
    sent = [Sent.read(file) for file in sorted(place.glob("sent-*.npz"))]
    return Site(case, lake or Lake(place / "lake"), place, pipeline, source.topic, bootstrap, sent)


def feed(site: Site, events: int, rate: float = 0.0, seed: int = 1) -> Sent:
    """Send events in a process of their own, and wait for it."""
    out = site.notes / f"sent-{time.time_ns()}.npz"
    command = [sys.executable, "-m", "tests.bench.lakehouse_feed", "--kafka", site.bootstrap, "--topic", site.topic]
    command += ["--events", str(events), "--rate", str(rate), "--seed", str(seed + 100 * len(site.sent))]
    subprocess.run([*command, "--case", site.case, "--out", str(out)], check=True)
    site.sent.append(Sent.read(out))
    return site.sent[-1]


class Driver:
    """``millrace run``."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def __enter__(self) -> Driver:
        command = [sys.executable, "-m", "jobs.cli", "run", "--lake", str(self._site.lake.root)]
        command += ["--pipeline", str(self._site.pipeline.path.parent), "--set", f"kafka={self._site.bootstrap}"]
        command += ["--set", f"work={self._site.lake.state}"]
        marker = self._site.lake.state / "run" / DRIVER
        marker.unlink(missing_ok=True)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until(marker.exists)
        return self

    def cpu_s(self) -> float:
        """CPU time until now."""
        return cpu_s(self._process.pid)

    def __exit__(self, *_: object) -> None:
        _end(self._process)


def _commits(table: LakePath) -> list[Commit]:
    """When each commit that says how far it reaches was made (ms since the epoch), and how far."""
    infos = [info for _, info in DeltaLog(table).infos() if names.COMMIT_THROUGH in info]
    return [(float(info["timestamp"]), json.loads(info[names.COMMIT_THROUGH])) for info in infos]


def _wait_for(site: Site, sent: Sent) -> float:
    """Wait until every product holds all that was sent; when the last of them did, ms since the epoch."""
    ends = sent.ends(site.topic)

    def reached(table: LakePath) -> bool:
        through = json.loads(DeltaLog(table).newest_info(names.COMMIT_THROUGH) or "{}")
        return all(through.get(place, 0) >= end for place, end in ends.items())

    _until(lambda: all(reached(table) for table in site.products()))
    return max(
        next(at for at, through in _commits(table) if all(through.get(p, 0) >= end for p, end in ends.items()))
        for table in site.products()
    )


def _latency_ms(site: Site, sent: Sent) -> npt.NDArray[np.float64]:
    slowest = np.max([_reached_ms(site.topic, _commits(table), sent) for table in site.products()], axis=0)
    return np.asarray(slowest - sent.sent_ms)


def _reached_ms(topic: str, commits: Sequence[Commit], sent: Sent) -> npt.NDArray[np.float64]:
    """When each event was in, ms since the epoch."""
    found = np.zeros(len(sent.offset))
    at = np.array([when for when, _ in commits])
    for partition in np.unique(sent.partition):
        reach = np.maximum.accumulate([through.get(f"{topic}/{partition}", 0) for _, through in commits])
        mine = sent.partition == partition
        found[mine] = at[np.searchsorted(reach, sent.offset[mine], side="right")]
    return found


def _first_batch_ms(site: Site) -> float:
    """When the first bronze batch was begun: Spark then writes its offsets down."""
    return (site.lake.checkpoint(f"bronze-{CASES[site.case].source}") / "metadata").stat().st_mtime * 1000


def _count(site: Site) -> tuple[int, int]:
    """Events lost and counted twice, by the product that counts them."""
    product, column = CASES[site.case].counts
    rows = DeltaTable(str(site.lake.table("gold", product).path)).to_pyarrow_table(columns=[column])
    held = int(pc.sum(rows[column]).as_py() or 0)
    distinct = len(np.unique(np.concatenate([sent.ids for sent in site.sent])))
    return max(0, distinct - held), max(0, held - distinct)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("nothing came of it in time")
        time.sleep(0.1)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
