"""Latency of the worked case at a rate, beside a plain Spark job with MERGE; ``make bench ARGS="--seconds 90"``.

Millrace: ``millrace demo`` as it is, from the player's socket to a subscriber's socket, through collector, log, Kafka,
bronze, gold and the server, all on this machine. The plain job: from the event's Kafka timestamp to the end of the
MERGE that holds it, without a collector before it or a server behind it. One after the other in one run; both after
warm-up (the first 20 s are left out of the figures). The driver's CPU is that of ``millrace run`` with its JVM, in
seconds of CPU a second, from the end of warm-up to the end of playing; null: no such time, or the driver was restarted.

``--against COMMIT`` compares this code with a commit instead: one host's figures differ by a factor of two within an
hour, their ratio does not. The commit is checked out into a temporary folder, and both codes run in turns, ``--turns``
times each, in this virtual environment. A class-data archive's name says Java and jars, not the commit. So each code
has a temporary jar folder of its own with links to the shared jars, and ``millrace prepare`` makes its archives there
before the first turn. ``ratios`` are medians of this code divided by the commit's. Exit status 1: this code lost an
event or counted one twice.

``--kills N`` measures restarts alone: while events come, the driver is killed N times (``kill -9``), and each time is
measured until gold has a commit again.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kafka import KafkaProducer
from rich.console import Console
from rich.table import Table

from ingest.broker import EmbeddedBroker
from ingest.kafka import ensure_topics
from jobs.account import WARM_S, percentiles
from jobs.local.stack import get_json, parts
from jobs.local.supervise import PARENT_VARIABLE
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.jvm import jars_dir
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings
from tests.bench.cpu import cpu_s
from tests.recordings import generate

ROOT = Path(__file__).resolve().parents[2]
DRAIN_S = 40.0  # for the plain job, after the last event
STOP_S = 60.0
BETWEEN_KILLS_S = 25.0
FIGURES = ("p50", "p99", "first_result_s", "driver_cpu_s_per_s", "lost", "counted_twice")
RATIOS = {"p50": "p50", "p99": "p99", "first_result": "first_result_s", "driver_cpu": "driver_cpu_s_per_s"}
err = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Code:
    """A checkout to be measured.

    Attributes:
        commit: full hash, with ``-dirty`` if files differ from it; empty: not asked for.
        root: its folder.
        environment: variables added to ours.
        lake: where to; None: a new one on this machine.
    """

    commit: str
    root: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    lake: Lake | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="of playing, each")
    parser.add_argument("--rate", type=float, default=1_000.0, help="events a second")
    parser.add_argument("--without-plain", action="store_true", help="Millrace alone")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit, without the plain job")
    parser.add_argument("--turns", type=int, default=2, help="of each code, with --against")
    parser.add_argument("--kills", type=int, default=0, help="kill the driver so often, and measure its restarts alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
    if options.against:
        return compare(options.against, options.turns, options.seconds, options.rate)
    if options.kills:
        return restarts(options.kills, options.rate)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        millrace = measure_millrace(Code("", ROOT), options.seconds, options.rate)
        plain = None if options.without_plain else measure_plain(Path(folder), options.seconds, options.rate)
    result = {
        "rate": options.rate,
        "seconds": options.seconds,
        "latency_ms": millrace["latency_ms_warm"],
        "lost": millrace["lost"],
        "counted_twice": millrace["counted_twice"],
        "first_result_s": millrace["first_result_s"],
        "driver_cpu_s_per_s": millrace["driver_cpu_s_per_s"],
        "plain_spark": plain,
    }
    if plain:
        ours = millrace["latency_ms_warm"]
        result["plain_to_millrace"] = {
            p: round(plain["latency_ms"][p] / ours[p], 1) for p in ours if plain["latency_ms"][p] and ours[p]
        }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if millrace["lost"] == millrace["counted_twice"] == 0 else 1


# Two commits in turns


def compare(commit: str, turns: int, seconds: float, rate: float) -> int:
    """This code and a commit's, in turns."""
    found: list[tuple[str, dict[str, Any]]] = []
    additions = []
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        codes = {"this": _own_code(Path(folder) / "this"), "against": _check_out(commit, Path(folder) / "against")}
        for code in codes.values():
            _prepare(code)
        for name in list(codes) * turns:
            additions.append(_additions_s())
            err.print(f"Turn {len(additions)} of {2 * turns}: {name}, {codes[name].commit}")
            figures = measure_millrace(codes[name], seconds, rate)
            figures |= figures["latency_ms_warm"]
            found.append((name, {key: figures[key] for key in FIGURES}))
    result: dict[str, Any] = {"rate": rate, "seconds": seconds, "host": {"additions_s": additions}}
    for name, code in codes.items():
        own = [figures for whose, figures in found if whose == name]
        median = {key: _median([figures[key] for figures in own]) for key in FIGURES}
        result[name] = {"commit": code.commit, "turns": own, "median": median}
    this, against = result["this"]["median"], result["against"]["median"]
    result["ratios"] = {key: _ratio(this[figure], against[figure]) for key, figure in RATIOS.items()}
    err.print(_table(found, result))
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if any(turn["lost"] or turn["counted_twice"] for turn in result["this"]["turns"]) else 0


def _own_code(folder: Path) -> Code:
    commit = _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    return Code(commit, ROOT, _own_folders(folder))


def _check_out(commit: str, folder: Path) -> Code:
    """A clone that borrows the repository's objects and leaves no trace in it."""
    commit = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    root = folder / "code"
    _git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(root))
    _git("-C", str(root), "checkout", "--quiet", "--detach", commit)
    return Code(commit, root, _own_folders(folder))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {arguments[0]} failed")
    return done.stdout.strip()


def _own_folders(folder: Path) -> dict[str, str]:
    """Variables that name a jar folder with links to the shared jars, and a folder for temporary files."""
    for jar in jars_dir().glob("*/*.jar"):
        link = folder / "jars" / jar.relative_to(jars_dir())
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(jar.resolve())
    return {"MILLRACE_JARS_DIR": str(folder / "jars"), "TMPDIR": str(folder)}


def _prepare(code: Code) -> None:
    """Compile its modules and make its archives, so that its first turn starts as fast as the others."""
    err.print(f"Preparing {code.commit} …")
    for package in code.root.glob("*/__init__.py"):
        compileall.compile_dir(package.parent, quiet=2)
    with running_millrace(code, "prepare") as process:
        if process.wait():
            raise SystemExit(f"millrace prepare of {code.commit} failed")


def _additions_s() -> float:
    """Seconds of 10^7 additions in CPython: how fast the host is now."""
    began, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return round(time.perf_counter() - began, 3)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def _ratio(this: float | None, against: float | None) -> float | None:
    return round(this / against, 3) if this is not None and against else None


def _table(found: Sequence[tuple[str, Mapping[str, Any]]], result: Mapping[str, Any]) -> Table:
    table = Table("", "additions s", "p50 ms", "p99 ms", "first result s", "CPU s/s", "lost", "twice")
    for additions, (name, figures) in zip(result["host"]["additions_s"], found, strict=True):
        table.add_row(name, str(additions), *(str(figures[key]) for key in FIGURES))
    table.add_section()
    for name in ("this", "against"):
        table.add_row(f"{name}, median", "", *(str(result[name]["median"][key]) for key in FIGURES))
    table.add_row("ratio", "", *(str(ratio) for ratio in result["ratios"].values()))
    return table


# Restarts


def restarts(kills: int, rate: float) -> int:
    """Seconds from each ``kill -9`` of the driver to the next commit of gold; 1: an event was lost or counted twice."""
    found: list[float] = []
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        lake = Lake(Path(folder) / "lake")
        log = DeltaLog(lake.table("gold", "members").path)
        arguments = ["--no-browser", "--json", "--lake", str(lake.root), "--seconds", "3600", "--rate", str(rate)]
        with running_millrace(Code("", ROOT), "demo", *arguments) as process:
            while not lake.table("gold", "members").exists() or log.newest() < 1:
                if _ended(process, 0.2):
                    raise SystemExit(f"the demo ended with status {process.returncode}")
            for _ in range(kills):
                if _ended(process, BETWEEN_KILLS_S) or (driver := _pid_of_driver(lake)) is None:
                    raise SystemExit("the driver does not run")
                os.kill(driver, signal.SIGKILL)
                killed = time.monotonic()
                time.sleep(0.2)  # a commit that had begun is not one of the next driver
                before = log.newest()
                while log.newest(before) == before:
                    if _ended(process, 0.05) or time.monotonic() - killed > STOP_S:
                        raise SystemExit("gold has no commit again")
                found.append(round(time.monotonic() - killed, 2))
                err.print(f"  {found[-1]} s")
            _ended(process, BETWEEN_KILLS_S)
            process.terminate()
            said = json.loads(process.communicate()[0].strip().splitlines()[-1])
    result = {"rate": rate, "restart_s": found, **{key: said[key] for key in ("events_sent", "lost", "counted_twice")}}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if said["lost"] == said["counted_twice"] == 0 else 1


# Millrace


def measure_millrace(code: Code, seconds: float, rate: float) -> dict[str, Any]:
    """The demo's own figures, and the driver's CPU."""
    err.print(f"Millrace: {seconds:.0f} s at {rate:,.0f} events/s …")
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        lake = code.lake or Lake(Path(folder) / "lake")
        command = ["demo", "--no-browser", "--json", "--lake", str(lake.root)]
        with running_millrace(code, *command, "--seconds", str(seconds), "--rate", str(rate)) as process:
            cpu = _driver_cpu(process, lake, seconds)
            said = process.communicate()[0].strip()
    if not said:
        raise SystemExit(f"the demo ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    err.print(f"  sent {found['events_sent']:,}, latency after warm-up {found['latency_ms_warm']}")
    return {**found, "driver_cpu_s_per_s": cpu}


@contextlib.contextmanager
def running_millrace(code: Code, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``millrace`` of a checkout, in a process group of its own; nothing of it is left afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(code.root), PARENT_VARIABLE: str(os.getpid()), **code.environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *arguments],
        cwd=code.root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        deadline = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            process.terminate()  # the demo takes the first as the end of playing, a later one as the end of its wait
            _ended(process, 1.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _driver_cpu(process: subprocess.Popen[str], lake: Lake, seconds: float) -> float | None:
    """CPU of the driver, s/s, from the end of warm-up to the end of playing; None: it cannot be told."""
    while not _has_events(lake):
        if _ended(process, 0.2):
            return None
    if seconds <= WARM_S or _ended(process, WARM_S):
        return None
    driver = _pid_of_driver(lake)
    if driver is None:
        return None
    cpu, began = cpu_s(driver), time.monotonic()
    _ended(process, seconds - WARM_S)
    used, took = cpu_s(driver) - cpu, time.monotonic() - began
    return round(used / took, 3) if _pid_of_driver(lake) == driver else None


def _pid_of_driver(lake: Lake) -> int | None:
    return next((part.pid for part in parts(lake) if part.name == "lakehouse"), None)


def _has_events(lake: Lake) -> bool:
    """Whether the collector has acknowledged an event."""
    address = next((part.address for part in parts(lake) if part.name == "collect"), "")
    stats = get_json(f"{address}/v1/stats") if address else None
    return stats is not None and any(source["acknowledged"] for source in stats["sources"].values())


def _ended(process: subprocess.Popen[str], timeout_s: float) -> bool:
    """Whether a process has ended; waits so long for it."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def measure_plain(folder: Path, seconds: float, rate: float) -> dict[str, Any]:
    """The plain job, fed straight through Kafka at the same rate."""
    err.print("Plain Spark job with MERGE, the same rate …")
    source = load_pipeline(load_settings().pipeline_folder()).sources["rsvps"]
    broker = EmbeddedBroker(folder / "broker", die_with_parent=True)
    bootstrap = broker.start()
    commits, ready = folder / "commits.jsonl", folder / "ready"
    command = [sys.executable, "-m", "tests.bench.plain_spark_job", "--lake", str(folder / "plain-lake")]
    command += ["--kafka", bootstrap, "--commits", str(commits), "--ready", str(ready)]
    try:
        ensure_topics(bootstrap, [source])
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(ready.exists, 120)
            sent = _produce(bootstrap, source.topic, seconds, rate)
            ends = {partition: max(offset for p, offset, _ in sent if p == partition) + 1 for partition, _, _ in sent}
            with contextlib.suppress(TimeoutError):  # what has not come by then counts as late as it is by then
                _wait(lambda: _reached(commits, ends), DRAIN_S)
            ended = time.time() * 1000
        finally:
            job.terminate()
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                job.kill()
    finally:
        broker.stop()
    latency, unfinished = _latency(sent, commits, ended, warm_ms=WARM_S * 1000)
    err.print(f"  sent {len(sent):,}, not merged in time {unfinished:,}, latency after warm-up {percentiles(latency)}")
    return {"latency_ms": percentiles(latency), "events": len(sent), "not_merged_in_time": unfinished}


def _produce(bootstrap: str, topic: str, seconds: float, rate: float) -> list[tuple[int, int, float]]:
    """Send at the rate; (partition, offset, sent at ms) of each event."""
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=20, batch_size=262_144)
    futures = []
    began = time.monotonic()
    for number, line in enumerate(generate(1, int(time.time() * 1000), rate)):
        due = began + number / rate
        if due - began >= seconds:
            break
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.004))
        futures.append((time.time() * 1000, producer.send(topic, value=line, key=str(number).encode())))
    producer.flush()
    sent = []
    for at, future in futures:
        record = future.get(30)
        sent.append((record.partition, record.offset, at))
    producer.close()
    return sent


def _read(commits: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commits.read_text().splitlines()] if commits.exists() else []


def _reached(commits: Path, ends: dict[int, int]) -> bool:
    rows = _read(commits)
    return bool(rows) and all(rows[-1]["ends"].get(str(p), 0) >= end for p, end in ends.items())


def _latency(sent: list[tuple[int, int, float]], commits: Path, ended: float, *, warm_ms: float) -> tuple[Any, int]:
    """Latencies, and how many events had not been merged when the job was ended (their latency is a lower bound)."""
    rows = _read(commits)
    at = np.array([*(row["at_ms"] for row in rows), ended])
    ends = {p: np.array([row["ends"].get(str(p), 0) for row in rows]) for p in {p for p, _, _ in sent}}
    start = sent[0][2]
    found, unfinished = [], 0
    for partition, offset, sent_ms in sent:
        if sent_ms - start >= warm_ms:
            index = int(np.searchsorted(ends[partition], offset, side="right"))
            unfinished += index == len(rows)
            found.append(at[index] - sent_ms)
    return np.array(found), unfinished


def _wait(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the plain job did not come along")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
