"""Many WebSocket publishers on one collector: 10,000 that say nothing, and 1,000 that do.

Everything is real: the embedded broker, a collecting node (``ingest.node``) in a process of its own on one core, the
publishers in another on the other core, the lake's disk. What was acknowledged is read back from the topic.

1. *idle*: all are connected, none sends: memory, memory a publisher, CPU.
2. *steady*: the busy ones send 1,000 events/s together, the others stay connected: CPU, p50 and p99 of the
   acknowledgement (durable in the message log or in Kafka).
3. *flat out*: each busy one sends its next event when the one before is acknowledged: events/s.

    python -m tests.bench.bench_publishers [--idle 10000] [--busy 1000] [--seconds 15] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingest.broker import EmbeddedBroker
from ingest.kafka import ensure_topics
from ingest.node import CollectorNode, calm_garbage_collector
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import CollectSettings, KafkaSettings, Settings
from tests.bench.bench_collect import COLLECTOR_CORE, OTHER_CORE, ids_in
from tests.bench.collect_node import source_of

TOPIC = "publishers"


def serve(folder: Path, bootstrap: str, core: int) -> None:
    """The collecting node; its URL is printed when it is ready."""

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        collect = CollectSettings(port=0, max_connections=50_000, idle_timeout_s=3600)
        settings = Settings(lake=folder, kafka=KafkaSettings(bootstrap=bootstrap), collect=collect)
        node = CollectorNode(settings, Pipeline({"clicks": source_of(TOPIC)}))
        await node.run(stop, lambda url: print(url, flush=True))

    import uvloop

    with suppress(OSError):
        os.sched_setaffinity(0, {core})
    calm_garbage_collector()
    uvloop.run(run())


def resident_mb(pid: int) -> float:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads, as the scheduler counts them."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class Load:
    """The process of the publishers."""

    def __init__(self, port: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.publishers_load", port, str(OTHER_CORE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **what: Any) -> dict[str, Any]:
        """Have it do something; returns what it says of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        """All connections end."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write('{"do": "close"}\n')
            self._process.stdin.close()
        self._process.wait(60)


def run(folder: Path, idle: int, busy: int, seconds: float) -> dict[str, Any]:
    """All of it, printed as it comes; returns what the last line says."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < idle + busy + 500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, idle + busy + 1_000), hard))
    broker = EmbeddedBroker(folder / "broker", heap_mb=512, die_with_parent=True)
    try:
        bootstrap = broker.start()
        ensure_topics(bootstrap, [source_of(TOPIC)])
        node = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bench_publishers", "--serve", str(folder / "lake"), bootstrap],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert node.stdout is not None
        load = Load(node.stdout.readline().strip().rpartition(":")[2])
        try:
            empty = resident_mb(node.pid)
            opened = load.ask(do="open", count=idle + busy)
            full, cpu = resident_mb(node.pid), cpu_s(node.pid)
            time.sleep(seconds)
            idle_core = (cpu_s(node.pid) - cpu) / seconds
            print(f"{idle + busy} publishers connected in {opened['seconds']:.1f} s: {full:.0f} MB "
                  f"({(full - empty) * 1024 / (idle + busy):.1f} KiB each), {idle_core:.3f} of a core while none sends",
                  flush=True)  # fmt: skip
            acknowledged, refused, found = 0, 0, {}
            for name, rate in (("steady", 1_000.0), ("flat_out", 0.0)):
                cpu = cpu_s(node.pid)
                said = load.ask(do="send", publishers=busy, seconds=seconds, rate=rate)
                cpu = cpu_s(node.pid) - cpu
                acknowledged += said["events"] - said["refused"]
                refused += said["refused"]
                found[name] = {"events_s": round(said["events"] / said["seconds"]), "p50_ms": round(said["p50_ms"], 1),
                               "p99_ms": round(said["p99_ms"], 1), "core": round(cpu / said["seconds"], 3),
                               "cpu_us_event": round(cpu / said["events"] * 1e6, 1),
                               "rss_mb": round(resident_mb(node.pid))}  # fmt: skip
                print(f"{name}: {found[name]}", flush=True)
        finally:
            load.end()
            node.send_signal(signal.SIGTERM)
            node.wait(120)
            node.stdout.close()
        there = len(ids_in(bootstrap, TOPIC))
        return {
            "publishers_idle": idle, "publishers_busy": busy, "rss_mb": round(full), "rss_empty_mb": round(empty),
            "kib_a_publisher": round((full - empty) * 1024 / (idle + busy), 1), "core_idle": round(idle_core, 4),
            **found, "refused": refused, "lost": max(0, acknowledged - there), "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
    finally:
        broker.stop()


def main() -> None:
    """Print what was found, and one JSON object as the last line; exit status 1 where an event was lost."""
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3], COLLECTOR_CORE)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=10_000, help="publishers that only stay connected")
    parser.add_argument("--busy", type=int, default=1_000, help="publishers that send")
    parser.add_argument("--seconds", type=float, default=15, help="of each step")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to be measured")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix=".bench-publishers-"))
    try:
        found = run(folder, options.idle, options.busy, options.seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found))
    sys.exit(1 if found["lost"] else 0)


if __name__ == "__main__":
    main()
