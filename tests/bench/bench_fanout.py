"""Fan-out of one gold table to many subscribers; ``make bench-fanout ARGS="--cases ws-10000,sse-10000"``.

A real Delta table gets two commits a second (delta-rs, in this process), each with one row of about 1 KB for every
distinct filter; the server (a process of its own, ``millrace serve`` as it is) tails it; the load client is one more
process on epoll, compiled from ``fanout_load.c`` where there is a C compiler, else two of
:mod:`tests.bench.fanout_load`. A delivery's time runs from just before the commit is written to the subscriber's
``recv``. Its parts: ``commit`` (delta-rs writes it), ``first`` (from before the commit until the first subscriber has
the change: commit, the tail's poll and reading, encoding), ``fanout`` (from the first subscriber to this one). Each run
counts for every reading subscriber which changes came: none may be missing, none may come twice. ``floor`` is what a
bare broadcast of the same bytes takes here and now (:mod:`tests.bench.fanout_floor`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from rich.console import Console

from lakehouse.contract import lake as names

RATE = 2.0  # changes a second
WARM_S = 4.0
STOPPED_WARM_S = 10.0  # until each has had a ping, and the second to answer it; they are cut after 30
PAD = "x" * 850  # with the other fields and the envelope of the message: about 1 KB
SCHEMA = pa.schema([("part", pa.string()), ("seq", pa.int64()), ("at", pa.int64()), ("pad", pa.string())])
SPARE_FILES = 512  # that a process has open beside its connections
err = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: how many subscribers, over how many distinct filters, over what, and how many of them stop reading."""

    subscribers: int
    filters: int = 1
    transport: str = "websocket"
    stopped: int = 0
    processes: int = 1  # of the server


CASES = {
    "ws-1000": Case(1_000),
    "ws-5000": Case(5_000),
    "ws-10000": Case(10_000),
    "ws-10000-filters-100": Case(10_000, filters=100),
    "ws-10000-filters-1000": Case(10_000, filters=1_000),
    "ws-10000-stopped-1000": Case(10_000, stopped=1_000),
    "ws-10000-processes-2": Case(10_000, processes=2),
    "sse-1000": Case(1_000, transport="sse"),
    "sse-5000": Case(5_000, transport="sse"),
    "sse-10000": Case(10_000, transport="sse"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="which, with commas between; all: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring, each run")
    parser.add_argument("--subscribers", type=int, help="one run with so many, instead of the cases")
    parser.add_argument("--filters", type=int, default=1)
    parser.add_argument("--transport", choices=("websocket", "sse"), default="websocket")
    parser.add_argument("--stopped", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="of the server")
    parser.add_argument("--python-client", action="store_true", help="even where there is a C compiler")
    options = parser.parse_args()
    if unknown := [name for name in options.cases.split(",") if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}; there are: {', '.join(CASES)}")
    cases: Sequence[Case] = [CASES[name] for name in options.cases.split(",")]
    if options.subscribers:
        cases = [Case(options.subscribers, options.filters, options.transport, options.stopped, options.processes)]
    _raise_files(max(case.subscribers for case in cases) + SPARE_FILES)
    runs, floor = [], None
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as built:
        program = None if options.python_client else _compiled(Path(built))
        if program is not None:
            floor = _floor(program, max(case.subscribers for case in cases))
            err.print(f"  a bare broadcast: {floor}")
        for case in cases:
            with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
                runs.append(run(case, Path(folder), options.seconds, program))
            err.print(f"  {runs[-1]}")
    sys.stdout.write(json.dumps({"runs": runs, "floor": floor}) + "\n")
    return 0 if all(found["lost"] == found["twice"] == 0 for found in runs) else 1


def _raise_files(wanted: int) -> None:
    """Let this process's children open so many files; this machine may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, hard), max(wanted, hard)))
    except (ValueError, OSError):
        raise SystemExit(
            f"{wanted} open files are needed and {hard} allowed: raise it (ulimit -Hn {wanted}, or nofile in "
            "/etc/security/limits.conf), or choose smaller --cases"
        ) from None
    if soft < wanted:
        err.print(f"open files a process: {max(wanted, hard):,} instead of {soft:,}")


def _compiled(folder: Path) -> Path | None:
    """The compiled load client; None: there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        err.print("no C compiler: the load client is in Python and takes part of what is measured")
        return None
    program = folder / "fanout_load"
    source = Path(__file__).with_name("fanout_load.c")
    subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
    return program


class Table:
    """The gold table: one row a filter, all of them new with each change. ``took_ms``: what each commit took."""

    def __init__(self, folder: Path, filters: int) -> None:
        self._parts = [f"p{number}" for number in range(filters)]
        folder.mkdir(parents=True)
        properties = {names.PROPERTY_KEY: "part", "delta.checkpointInterval": "1000000"}
        self._table = DeltaTable.create(folder, SCHEMA, configuration=properties, raise_if_key_not_exists=False)
        self.seq = 0
        self.took_ms: list[float] = []
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
        self.took_ms.append((time.monotonic_ns() - at) / 1e6)


def _floor(program: Path, subscribers: int) -> dict[str, Any]:
    """See :mod:`tests.bench.fanout_floor`."""
    command = [sys.executable, "-m", "tests.bench.fanout_floor", str(program), str(subscribers), "6"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run(case: Case, folder: Path, seconds: float, program: Path | None) -> dict[str, Any]:
    """One run; its figures."""
    err.print(f"{case.subscribers:,} subscribers, {asdict(case)} …")
    table = Table(folder / "gold" / "fan", case.filters)
    server = Server(folder, case.processes)
    try:
        idle_mb = server.private_mb()
        with _load(case, server.url, folder, program) as clients:
            _play(table, STOPPED_WARM_S if case.stopped else WARM_S)
            for client in clients:
                _say(client, "count")
            cpu, began, counted = server.cpu_s(), time.monotonic(), len(table.took_ms)
            _play(table, seconds)
            took, server_cpu = time.monotonic() - began, server.cpu_s() - cpu
            for client in clients:
                _say(client, f"end {table.seq}")
            results = [json.loads(client.communicate(timeout=60)[0]) for client in clients]
        delivered = sum(found["delivered"] for found in results)
        return {
            **asdict(case),
            "delivered_s": round(delivered / took),
            **_times(folder, table.took_ms[counted:]),
            "lost": sum(found["lost"] for found in results),
            "twice": sum(found["twice"] for found in results),
            "rss_mb": round(server.rss_mb()),
            "private_mb": round(server.private_mb()),
            "private_idle_mb": round(idle_mb),
            "server_cpu_s": round(server_cpu, 2),
            "server_us_a_message": round(server_cpu / max(1, delivered) * 1e6, 1),
            "client_cpu_s": round(sum(found["cpu_s"] for found in results), 2),
            "client": "python" if program is None else "c",
            "seconds": round(took, 1),
        }
    finally:
        server.stop()


def _times(folder: Path, commits_ms: Sequence[float]) -> dict[str, float]:
    """Percentiles of what the clients have written down, and of its parts; see the module."""
    pairs = np.concatenate([np.fromfile(path, np.float32).reshape(-1, 2) for path in folder.glob("delays-*")])
    _, change = np.unique(pairs[:, 0], return_inverse=True)
    delays = pairs[:, 1]
    first = np.full(change.max() + 1, np.inf, np.float32)
    np.minimum.at(first, change, delays)
    found = {}
    parts: dict[str, npt.NDArray[np.floating]] = {
        "": delays,
        "commit_": np.array(commits_ms),
        "first_": first,
        "fanout_": delays - first[change],
    }
    for name, values in parts.items():
        for percent in (50, 99):
            found[f"{name}p{percent}_ms"] = round(float(np.percentile(values, percent)), 1)
    return found


def _play(table: Table, seconds: float) -> None:
    began = time.monotonic()
    number = 0
    while (due := began + number / RATE) < began + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        table.change()
        number += 1
    time.sleep(1 / RATE)


@contextlib.contextmanager
def _load(case: Case, url: str, folder: Path, program: Path | None) -> Iterator[list[subprocess.Popen[str]]]:
    """The load clients, every subscriber of them with its snapshot."""
    clients: list[subprocess.Popen[str]] = []
    address = urlsplit(url)
    count = 1 if program else 2
    share, stopped = case.subscribers // count, case.stopped // count
    command = [str(program)] if program else [sys.executable, "-m", "tests.bench.fanout_load"]
    try:
        for number in range(count):
            file = folder / f"delays-{number}"
            words = (address.hostname, address.port, share, number * share, case.filters, case.transport, stopped, file)
            client = subprocess.Popen(
                [*command, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            clients.append(client)
        for client in clients:
            line = client.stdout.readline() if client.stdout else ""
            if line.strip() != "ready":
                raise SystemExit(f"a load client failed: {line}")
        yield clients
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
                client.wait()


def _say(client: subprocess.Popen[str], line: str) -> None:
    assert client.stdin is not None
    client.stdin.write(line + "\n")
    client.stdin.flush()


class Server:
    """``millrace serve`` on the lake, on a free port."""

    def __init__(self, lake: Path, processes: int) -> None:
        command = [sys.executable, "-m", "jobs.cli", "serve", "--lake", str(lake), "--set", "serve.port=0"]
        if processes:
            command += ["--set", f"serve.processes={processes}"]
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

    def private_mb(self) -> float:
        """Of that, what is not a file's: the rest, about 100 MB, is pages of libraries that processes share."""
        found = 0
        for pid in self._all():
            status = Path(f"/proc/{pid}/status").read_text()
            found += int(status.split("RssAnon:")[1].split()[0])
        return found * 1024 / 1e6

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
