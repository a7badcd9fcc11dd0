"""Hours at a rate, and whether every line stays flat; ``make soak ARGS="--minutes 480"``.

``millrace demo`` as it is: every ten seconds memory and CPU of each part with its processes, the files of each table's
newest version, the bytes of all tables, and the latency that a subscriber saw (from the collector's clock at the newest
event of a change until the change is here). A line is flat if the median of the run's last quarter is not above that
of its second quarter by more than the line's tolerance. Events need disk themselves; so bytes are compared a second of
playing. Samples and plot are in ``dist/soak``; the last line is one JSON object. Exit status 1: an event was lost or
counted twice, or a line is not flat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from jobs.local.stack import parts
from lakehouse.contract.lake import Lake
from tests.bench.bench_latency import ROOT, Code, running_millrace
from tests.bench.cpu import cpu_s
from tests.bench.plot import plot_lines

EVERY_S = 10.0
WATCHED = "rsvps_by_city"
TOLERANCE = {
    "latency ms": (1.5, 200.0),
    "memory MB": (1.15, 40.0),
    "CPU %": (1.3, 10.0),
    "files": (1.5, 30.0),
    "disk KB/s": (1.5, 50.0),
}
"""By panel: by what factor, and by how much besides, a line may be above what it was."""


class Watch:
    """Samples of a demo.

    Attributes:
        rows: one a line and time: ``panel``, ``line``, ``minutes``, ``value``.
    """

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._began = time.monotonic()
        self._lags: list[float] = []
        self._bytes: list[tuple[float, int]] = []
        self._cpu: dict[int, tuple[float, float]] = {}
        self.rows: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Sample for ever."""
        follower = asyncio.create_task(self._follow())
        try:
            while True:
                await asyncio.sleep(EVERY_S)
                await asyncio.to_thread(self._sample)
        finally:
            follower.cancel()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            address = next((part.address for part in parts(Lake(self._lake)) if part.name == "serve"), "")
            url = f"{address.replace('http', 'ws')}/v1/subscribe?table={WATCHED}"
            with contextlib.suppress(OSError, WebSocketException):
                async with connect(url, max_size=None) as messages:
                    async for text in messages:
                        newest = json.loads(text).get("newest_at")
                        if newest:
                            self._lags.append(time.time() * 1000 - newest)

    def _note(self, panel: str, line: str, value: float) -> None:
        minutes = (time.monotonic() - self._began) / 60
        self.rows.append({"panel": panel, "line": line, "minutes": round(minutes, 3), "value": round(value, 1)})

    def _sample(self) -> None:
        lags, self._lags = sorted(self._lags), []
        if lags:
            self._note("latency ms", "p50", lags[len(lags) // 2])
            self._note("latency ms", "p99", lags[len(lags) * 99 // 100])
        for part in parts(Lake(self._lake)):
            if part.pid:
                self._note("memory MB", part.name, resident_mb(part.pid))
                before, now = self._cpu.get(part.pid), (time.monotonic(), cpu_s(part.pid))
                self._cpu[part.pid] = now
                if before:
                    self._note("CPU %", part.name, 100 * (now[1] - before[1]) / (now[0] - before[0]))
        total = 0
        for layer in ("bronze", "silver", "gold"):
            for table in (self._lake / layer).glob("*"):
                total += size_of(table)
                with contextlib.suppress(DeltaError):
                    self._note("files", table.name, len(DeltaTable(str(table)).file_uris()))
        self._bytes.append((time.monotonic(), total))
        if len(self._bytes) > 30:  # five minutes: maintenance goes in steps
            at, before = self._bytes.pop(0)
            self._note("disk KB/s", "tables", (total - before) / (time.monotonic() - at) / 1e3)


def resident_mb(pid: int) -> float:
    """Memory of a process and all below it."""
    pages, pids = 0, [pid]
    for one in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.stat(os.path.join(place, name)).st_size
    return size


def quarters(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By panel and line: the median of the second quarter and of the last, and whether that is flat."""
    end = max((row["minutes"] for row in rows), default=0.0)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for panel, line in dict.fromkeys((row["panel"], row["line"]) for row in rows):
        own = [row for row in rows if (row["panel"], row["line"]) == (panel, line)]
        before = [row["value"] for row in own if end / 4 <= row["minutes"] < end / 2]
        last = [row["value"] for row in own if row["minutes"] >= end * 3 / 4]
        if before and last:
            factor, more = TOLERANCE[panel]
            first, second = statistics.median(before), statistics.median(last)
            flat = second <= first * factor + more
            found[panel][line] = {"second_quarter": first, "last_quarter": second, "flat": flat}
    return found


async def soak(minutes: float, rate: float, lake: Path) -> tuple[dict[str, Any], Watch]:
    """Play for so long; the demo's own figures, and the samples."""
    watch = Watch(lake)
    command = [
        "demo",
        "--no-browser",
        "--json",
        "--set",
        "serve.port=0",
        "--lake",
        str(lake),
        "--seconds",
        str(minutes * 60),
    ]
    with running_millrace(Code("", ROOT), *command, "--rate", str(rate)) as process:
        watching = asyncio.create_task(watch.run())
        said = (await asyncio.to_thread(process.communicate))[0].strip()
        watching.cancel()
    if not said:
        raise SystemExit(f"the demo ended with status {process.returncode}")
    return json.loads(said.splitlines()[-1]), watch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of playing")
    parser.add_argument("--rate", type=float, default=1_000.0, help="events a second")
    options = parser.parse_args()
    folder = ROOT / "dist" / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="millrace-soak-") as lake:
        demo, watch = asyncio.run(soak(options.minutes, options.rate, Path(lake) / "lake"))
    (folder / "samples.json").write_text(json.dumps(watch.rows), encoding="utf-8")
    plot_lines(folder / "soak.svg", list(TOLERANCE), watch.rows)
    lines = quarters(watch.rows)
    rising = [f"{panel}, {line}" for panel, own in lines.items() for line, found in own.items() if not found["flat"]]
    figures = {name: demo[name] for name in ("events_sent", "lost", "counted_twice", "latency_ms_warm")}
    result = {"minutes": options.minutes, "rate": options.rate, **figures, "lines": lines, "rising": rising}
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if rising or demo["lost"] or demo["counted_twice"] else 0


if __name__ == "__main__":
    sys.exit(main())
