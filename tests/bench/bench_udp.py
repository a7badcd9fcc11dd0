"""What one-way events by UDP cost: ``python -m tests.bench.bench_udp [--tags 400] [--seconds 10]``.

Tags are read 25 times a second each, one datagram a read, by a sender in a process of its own that keeps that pace. The
node is ``millrace collect`` with the embedded broker. Counted: what the node received, what it lost by the tags' own
counters, what Kafka holds at the end, and the node's CPU time (``/proc``). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from ingest.broker import EmbeddedBroker
from jobs.account import end_offsets
from jobs.local.stack import free_port

PIPELINE = """
[sources.reads]
topic = "udp-reads"
schema = "tag STRING, seq BIGINT, reader STRING, rssi BIGINT"
event_time = "received_at"
key = "{tag}"
[[sources.reads.collectors]]
kind = "udp"
port = PORT
sequence = "{seq}"
sender = "{tag}"
"""
SENDER = """
import socket, sys, time
port, tags, seconds = map(int, sys.argv[1:])
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.connect(("127.0.0.1", port))
began = time.perf_counter()
for seq in range(25 * seconds):
    for tag in range(tags):
        if tag % 20 == 0:  # spread over the 40 ms, as tags do not speak at once
            due = began + (seq + tag / tags) / 25
            while time.perf_counter() < due:
                time.sleep(0.0005)
        out.send(b'{"tag":"t%d","seq":%d,"reader":"r%d","rssi":-40}' % (tag, seq, tag % 8))
print(time.perf_counter() - began)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tags", type=int, default=400)
    parser.add_argument("--seconds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.tags, options.seconds)))


def measure(folder: Path, tags: int, seconds: int) -> dict[str, Any]:
    """One run; see the module."""
    broker = EmbeddedBroker(folder / "broker", die_with_parent=True)
    broker.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        udp = int(probe.getsockname()[1])
    (folder / "pipeline.toml").write_text(PIPELINE.replace("PORT", str(udp)), encoding="utf-8")
    http = free_port()
    command = [
        "collect",
        "--pipeline",
        str(folder),
        "--lake",
        str(folder / "lake"),
        "--set",
        f"kafka={broker.bootstrap}",
    ]
    node = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *command, "--set", f"collect.port={http}"], stderr=subprocess.DEVNULL
    )
    try:
        stats = _wait(http, lambda found: found["ready"])
        cpu = _cpu_s(node.pid)
        sender = [sys.executable, "-c", SENDER, str(udp), str(tags), str(seconds)]
        took = float(subprocess.run(sender, capture_output=True, text=True, check=True).stdout)
        cpu = _cpu_s(node.pid) - cpu
        time.sleep(1.0)
        stats = _wait(http, lambda found: found["log"]["in_flight"] == 0)
    finally:
        node.terminate()
        node.wait()
        ends = end_offsets(broker.bootstrap, ["udp-reads"]) or {}
        broker.stop()
    sent = tags * 25 * seconds
    counts = stats["sources"]["reads"]["upstreams"][0]["counts"]
    return {
        "sent": sent,
        "per_second": round(sent / took),
        **counts,
        "in_kafka": sum(ends.values()),
        "cpu_of_a_core": round(cpu / took, 3),
        "cpu_us_an_event": round(1e6 * cpu / sent, 1),
    }


def _wait(port: int, check: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/stats", timeout=5) as answer:
                found: dict[str, Any] = json.loads(answer.read())
            if check(found):
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
