"""Fan-out of one gold table to many subscribers; ``make bench-fanout ARGS="--seconds 15"``.

A real Delta table gets two commits a second (delta-rs, in this process), each with one row of about 1 KB for every
distinct filter; the server (a process of its own, ``millrace serve`` as it is) tails it; the load client is two more
processes on epoll (:mod:`tests.bench.fanout_load`). A delivery's time runs from just before the commit is written to
the subscriber's ``recv``, so that it holds the commit itself, the tail's poll, the encoding and the sockets. Each run
counts for every reading subscriber which changes came: none may be missing, none may come twice. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from rich.console import Console

from lakehouse.contract import lake as names

RATE = 2.0  # changes a second
PAD = "x" * 850  # with the other fields and the envelope of the message: about 1 KB
SCHEMA = pa.schema([("part", pa.string()), ("seq", pa.int64()), ("at", pa.int64()), ("pad", pa.string())])
CLIENTS = 2
err = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: how many subscribers, over how many distinct filters, over what, and how many of them stop reading."""

    subscribers: int
    filters: int = 1
    transport: str = "websocket"
    stopped: int = 0


CASES = (
    Case(1_000),
    Case(5_000),
    Case(10_000),
    Case(10_000, filters=100),
    Case(10_000, filters=1_000),
    Case(10_000, stopped=1_000),
    Case(10_000, transport="sse"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring, each run")
    parser.add_argument("--subscribers", type=int, help="one run with so many, instead of the usual ones")
    parser.add_argument("--filters", type=int, default=1)
    parser.add_argument("--transport", choices=("websocket", "sse"), default="websocket")
    parser.add_argument("--stopped", type=int, default=0)
    parser.add_argument("--processes", type=int, default=0, help="of the server; 0: as its settings say")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cases: Sequence[Case] = CASES
    if options.subscribers:
        cases = [Case(options.subscribers, options.filters, options.transport, options.stopped)]
    runs = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
            runs.append(run(case, Path(folder), options.seconds, options.processes))
        err.print(f"  {runs[-1]}")
    sys.stdout.write(json.dumps({"runs": runs}) + "\n")
    return 0 if all(found["lost"] == found["twice"] == 0 for found in runs) else 1


class Table:
    """The gold table: one row a filter, all of them new with each change."""

    def __init__(self, folder: Path, filters: int) -> None:
        self._parts = [f"p{number}" for number in range(filters)]
        folder.mkdir(parents=True)
        properties = {names.PROPERTY_KEY: "part", "delta.checkpointInterval": "1000000"}
        self._table = DeltaTable.create(folder, SCHEMA, configuration=properties, raise_if_key_not_exists=False)
        self.seq = 0
        self.change()

    def change(self) -> None:
        """One commit."""
        self.seq += 1
        count = len(self._parts)
        at = time.monotonic_ns()
        rows = pa.table(
            [self._parts, [self.seq] * count, [at] * count, [PAD] * count],
            schema=SCHEMA,
        )
        write_deltalake(self._table, rows, mode="overwrite", commit_properties=CommitProperties())


def run(case: Case, folder: Path, seconds: float, processes: int) -> dict[str, Any]:
    """One run; its figures."""
    err.print(f"{case.subscribers:,} subscribers, {asdict(case)} …")
    table = Table(folder / "gold" / "fan", case.filters)
    server = Server(folder, processes)
    clients: list[subprocess.Popen[str]] = []
    try:
        clients = [_client(case, server.url, number) for number in range(CLIENTS)]
        for client in clients:
            line = client.stdout.readline() if client.stdout else ""
            if line.strip() != "ready":
                raise SystemExit(f"a load client failed: {line}")
        _play(table, 4.0)  # warm-up
        for client in clients:
            _say(client, "count")
        cpu, began = server.cpu_s(), time.monotonic()
        _play(table, seconds)
        took, server_cpu = time.monotonic() - began, server.cpu_s() - cpu
        for client in clients:
            _say(client, f"end {table.seq}")
        results = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
        delays = np.concatenate([np.array(found["delays_ms"]) for found in results])
        delivered = sum(found["delivered"] for found in results)
        return {
            **asdict(case),
            "delivered_s": round(delivered / took),
            "p50_ms": round(float(np.percentile(delays, 50)), 1),
            "p99_ms": round(float(np.percentile(delays, 99)), 1),
            "lost": sum(found["lost"] for found in results),
            "twice": sum(found["twice"] for found in results),
            "rss_mb": round(server.rss_mb()),
            "server_cpu_s": round(server_cpu, 1),
            "seconds": round(took, 1),
        }
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
                client.wait()
        server.stop()


def _play(table: Table, seconds: float) -> None:
    began = time.monotonic()
    number = 0
    while (due := began + number / RATE) < began + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        table.change()
        number += 1
    time.sleep(1 / RATE)


def _client(case: Case, url: str, number: int) -> subprocess.Popen[str]:
    address = urlsplit(url)
    share = case.subscribers // CLIENTS
    options = {
        "host": address.hostname,
        "port": address.port,
        "subscribers": share,
        "first": number * share,
        "filters": case.filters,
        "transport": case.transport,
        "stopped": case.stopped // CLIENTS,
    }
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.fanout_load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _say(client, json.dumps(options))
    return client


def _say(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


class Server:
    """``millrace serve`` on the lake, on a free port."""

    def __init__(self, lake: Path, processes: int) -> None:
        command = [sys.executable, "-m", "jobs.cli", "serve", "--lake", str(lake), "--port", "0"]
        if processes:
            command += ["--processes", str(processes)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.url = ""
        for line in self._process.stderr:
            if "serving at" in line:
                self.url = line.split("serving at", 1)[1].strip()
                break
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        if not self.url:
            raise SystemExit("the server did not start")

    def _all(self) -> list[int]:
        """Its process and its children."""
        found = [self._process.pid]
        for pid in found:
            try:
                found += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            except OSError:
                continue
        return found

    def cpu_s(self) -> float:
        """CPU time of all its processes."""
        ticks = 0
        for pid in self._all():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory of all its processes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._all()) * page / 1e6

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
