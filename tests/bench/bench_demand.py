"""How soon devices stop and start; ``make bench-demand ARGS="--rounds 20"``.

``millrace collect`` and ``millrace serve`` as they are, the embedded broker, and a simulated device of 100 events a
second. A subscriber comes and goes. Measured from before its connect to the first event that is acknowledged, and
from before its close until the device hears of it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from websockets.asyncio.client import connect

from ingest.broker import EmbeddedBroker
from ingest.simulate.player import Play
from ingest.simulate.server import SimulatedDevice, run_devices
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.folder import load_pipeline
from tests.bench.bench_control import ROOT, TABLE, Part
from tests.serve.lakes import city, rsvps_by_city

BOUND_MS = 2_000


class Heard:
    """What the device was told last, and when its counts last changed."""

    def __init__(self) -> None:
        self.device: SimulatedDevice | None = None
        self.wanted: bool | None = None

    def tell(self, device: SimulatedDevice, wanted: bool) -> None:
        self.device, self.wanted = device, wanted

    async def until(self, wanted: bool) -> SimulatedDevice:
        async with asyncio.timeout(60):
            while self.wanted is not wanted or self.device is None:  # noqa: ASYNC110 - it is polled to be timed
                await asyncio.sleep(0.002)
        return self.device


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        lake = Path(folder)
        rsvps_by_city(lake).append([city(0, "Berlin", 1)])
        broker = EmbeddedBroker(lake / "broker", heap_mb=256, die_with_parent=True)
        broker.start()
        parts = []
        try:
            parts.append(Part(lake, "collect", f"kafka.bootstrap={broker.bootstrap}"))
            parts.append(Part(lake, "serve"))
            found = uvloop.run(measure(parts[0].url, parts[1].url, options.rounds))
        finally:
            for part in parts:
                part.stop()
            broker.stop()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if max(found["start_ms_max"], found["stop_ms_max"]) <= BOUND_MS else 1


async def measure(collector: str, server: str, rounds: int) -> dict[str, Any]:
    heard, stop = Heard(), asyncio.Event()
    pipeline: Pipeline = load_pipeline(ROOT / "conf" / "pipelines" / "meetup")
    fleet = asyncio.create_task(run_devices(pipeline, Play(), collector, "", heard.tell, stop))
    starts, stops = [], []
    try:
        device = await heard.until(False)
        for _ in range(rounds):
            await asyncio.sleep(random.uniform(0, 0.5))
            acknowledged, began = device.acknowledged, time.perf_counter()
            async with connect(f"{server.replace('http', 'ws')}/v1/subscribe?table={TABLE}") as subscriber:
                await subscriber.recv()
                await heard.until(True)
                while device.acknowledged == acknowledged:  # noqa: ASYNC110 - it is polled to be timed
                    await asyncio.sleep(0.002)
                starts.append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(random.uniform(0, 0.5))
                began = time.perf_counter()
            await heard.until(False)
            stops.append(1000 * (time.perf_counter() - began))
            sent = device.sent
            await asyncio.sleep(0.5)
            assert device.sent == sent, "it rests"
    finally:
        stop.set()
        await fleet
    return {
        "rounds": rounds,
        **{f"{name}_ms_p50": round(statistics.median(found)) for name, found in (("start", starts), ("stop", stops))},
        **{f"{name}_ms_max": round(max(found)) for name, found in (("start", starts), ("stop", stops))},
    }


if __name__ == "__main__":
    raise SystemExit(main())
