"""Latency of the worked case at a rate, beside a plain Spark job with MERGE; ``make bench ARGS="--seconds 90"``.

Millrace: ``millrace demo`` as it is, from the player's socket to a subscriber's socket, through collector, log, Kafka,
bronze, gold and the server, all on this machine. The plain job: from the event's Kafka timestamp to the end of the
MERGE that holds it, without a collector before it or a server behind it. One after the other in one run; both after
warm-up (the first 20 s are left out of the figures). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kafka import KafkaProducer
from rich.console import Console

from ingest.broker import EmbeddedBroker
from ingest.kafka import ensure_topics
from ingest.simulate.generator import generate
from jobs.demo import percentiles
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings

WARM_S = 20.0
DRAIN_S = 40.0  # for the plain job, after the last event
err = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="of playing, each")
    parser.add_argument("--rate", type=float, default=1_000.0, help="events a second")
    parser.add_argument("--without-plain", action="store_true", help="Millrace alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        millrace = measure_millrace(Path(folder), options.seconds, options.rate)
        plain = None if options.without_plain else measure_plain(Path(folder), options.seconds, options.rate)
    result = {
        "rate": options.rate,
        "seconds": options.seconds,
        "latency_ms": millrace["latency_ms_warm"],
        "lost": millrace["lost"],
        "counted_twice": millrace["counted_twice"],
        "first_result_s": millrace["first_result_s"],
        "plain_spark": plain,
    }
    if plain:
        ours = millrace["latency_ms_warm"]
        result["plain_to_millrace"] = {
            p: round(plain["latency_ms"][p] / ours[p], 1) for p in ours if plain["latency_ms"][p] and ours[p]
        }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if millrace["lost"] == millrace["counted_twice"] == 0 else 1


def measure_millrace(folder: Path, seconds: float, rate: float) -> dict[str, Any]:
    """The demo's own figures."""
    err.print(f"Millrace: {seconds:.0f} s at {rate:,.0f} events/s …")
    command = [sys.executable, "-m", "jobs.cli", "demo", "--no-browser", "--json", "--lake", str(folder / "lake")]
    command += ["--seconds", str(seconds), "--rate", str(rate)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    err.print(f"  sent {found['events_sent']:,}, latency after warm-up {found['latency_ms_warm']}")
    return found


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
