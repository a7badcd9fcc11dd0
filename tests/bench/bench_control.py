"""The control plane with many tenants; ``make bench-control ARGS="--tenants 1000 --subscriptions 10000"``.

``millrace control`` and ``millrace serve`` as they are, over real sockets. Measured: a refresh of the state, whole,
unchanged and after a change; a subscription, from the POST to its answer and to its first snapshot; a revocation, until
a request is refused and until an open stream is closed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from jobs.local.stack import free_port, get_json
from tests.bench.cpu import cpu_s
from tests.serve.lakes import city, rsvps_by_city

ROOT = Path(__file__).parents[2]
TABLE = "rsvps_by_city"
REVOKED_S = 2.0


class Part:
    """A process of ``millrace``."""

    def __init__(self, lake: Path, command: str, *settings: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        chosen = [word for text in (f"{command}.port={port}", *settings) for word in ("--set", text)]
        with (lake / f"{command}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", command, "--lake", str(lake), *chosen], cwd=ROOT, stderr=log
            )
        until = time.monotonic() + 60
        while get_json(f"{self.url}/readyz", 1.0) is None:
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit((lake / f"{command}.log").read_text())
            time.sleep(0.05)

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1_000, help="with one app each")
    parser.add_argument("--subscriptions", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=50, help="changes, subscriptions and revocations measured")
    parser.add_argument("--database", default="", help="URL of an empty PostgreSQL database instead of SQLite")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        lake = Path(folder)
        rsvps_by_city(lake).append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
        plane = Part(lake, "control", f"control.database={options.database}")
        try:
            found = uvloop.run(measure(plane, lake, options))
        finally:
            plane.stop()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["revoked_ms_max"] <= 1000 * REVOKED_S and found["stream_closed_ms_max"] <= 1000 * REVOKED_S else 1


async def measure(plane: Part, lake: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder = lake / "_millrace" / "control"
    admin, machine = (
        httpx.AsyncClient(
            base_url=plane.url,
            headers={"Authorization": f"Bearer {(folder / name).read_text().strip()}"},
            timeout=60,
        )
        for name in ("admin.key", "machine.key")
    )
    found: dict[str, Any] = {"tenants": options.tenants, "subscriptions": options.subscriptions}
    async with admin, machine:
        found |= await fill(admin, plane, options)
        found |= await refresh(admin, machine, plane, options.rounds)
        server = await asyncio.to_thread(Part, lake, "serve", f"control.url={plane.url}")
        try:
            found |= await subscribe(admin, server, options.rounds)
        finally:
            server.stop()
    return found


async def fill(admin: httpx.AsyncClient, plane: Part, options: argparse.Namespace) -> dict[str, Any]:
    began, cpu = time.perf_counter(), plane.cpu_s
    waiting = asyncio.Semaphore(8)

    async def post(path: str, **body: Any) -> None:
        async with waiting:
            (await admin.post(path, json=body)).raise_for_status()

    names = ["default", *(f"tenant{number}" for number in range(1, options.tenants))]
    await asyncio.gather(*(post("/v1/tenants", name=name) for name in names))
    await asyncio.gather(*(post(f"/v1/tenants/{name}/apps", name="app") for name in names))
    owners = [names[number % len(names)] for number in range(options.subscriptions)]
    await asyncio.gather(
        *(post("/v1/subscriptions", tenant=one, app="app", table=TABLE, where="city = 'Bonn'") for one in owners)
    )
    seconds, made = time.perf_counter() - began, 2 * len(names) + len(owners)
    say(f"filled: {made:,} resources in {seconds:.1f} s")
    return {"filled_per_s": round(made / seconds), "fill_cpu_ms_each": round(1000 * (plane.cpu_s - cpu) / made, 2)}


async def refresh(admin: httpx.AsyncClient, machine: httpx.AsyncClient, plane: Part, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    whole = await looks(machine, plane, [""] * 5)
    found |= {f"whole_{name}": value for name, value in whole.items()}
    tag = (await machine.get("/v1/state")).headers["etag"]
    unchanged = await looks(machine, plane, [tag] * (10 * rounds))
    found |= {f"unchanged_{name}": value for name, value in unchanged.items()}
    tags = []
    for _ in range(rounds):
        tags.append((await machine.get("/v1/state", headers={"If-None-Match": tag})).headers.get("etag", tag))
        await admin.post("/v1/subscriptions", json={"tenant": "default", "app": "app", "table": TABLE})
        tag = tags[-1]
    changed = await looks(machine, plane, tags[-1:] * rounds)
    found |= {f"changed_{name}": value for name, value in changed.items()}
    for kind in ("whole", "unchanged", "changed"):
        values = (found[f"{kind}_{name}"] for name in ("bytes", "ms", "cpu_ms"))
        say("refresh, {}: {:,} bytes, {} ms, {} ms of the control plane's CPU".format(kind, *values))
    return found


async def looks(machine: httpx.AsyncClient, plane: Part, tags: Sequence[str]) -> dict[str, Any]:
    """Median time of a look at the state, its bytes, and the CPU of the control plane."""
    times, size, cpu = [], 0, plane.cpu_s
    for tag in tags:
        began = time.perf_counter()
        answer = await machine.get("/v1/state", headers={"If-None-Match": tag} if tag else {})
        times.append(time.perf_counter() - began)
        size = len(answer.content)
    return {"bytes": size, "ms": ms(times, 0.5), "cpu_ms": round(1000 * (plane.cpu_s - cpu) / len(tags), 2)}


async def subscribe(admin: httpx.AsyncClient, server: Part, rounds: int) -> dict[str, Any]:
    answered, seen, refused, closed = [], [], [], []
    target = f"{server.url.replace('http', 'ws')}/v1/subscribe?table={TABLE}"
    cpu = server.cpu_s
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as reader:
        for _ in range(rounds):
            began = time.perf_counter()
            body = {"tenant": "default", "app": "app", "table": TABLE, "where": "city = 'Bonn'"}
            made = await admin.post("/v1/subscriptions", json=body)
            answered.append(time.perf_counter() - began)
            key = {"Authorization": f"Bearer {made.json()['key']}"}
            async with connect(target, additional_headers=key, open_timeout=60) as stream:
                assert json.loads(await stream.recv())["type"] == "snapshot"
                seen.append(time.perf_counter() - began)
                began = time.perf_counter()
                ending = asyncio.create_task(end_of(stream))
                revoking = asyncio.create_task(admin.delete(f"/v1/keys/{made.json()['key_id']}"))
                while (await reader.get(f"/v1/tables/{TABLE}", headers=key)).status_code != 401:  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.005)
                refused.append(time.perf_counter() - began)
                closed.append(await ending - began)
                (await revoking).raise_for_status()
    found = {"server_cpu_ms_a_round": round(1000 * (server.cpu_s - cpu) / rounds, 1)}
    for name, times in (
        ("subscribed", answered),
        ("first_snapshot", seen),
        ("revoked", refused),
        ("stream_closed", closed),
    ):
        figures = {"p50": ms(times, 0.5), "p99": ms(times, 0.99), "max": ms(times, 1.0)}
        found |= {f"{name}_ms_{each}": value for each, value in figures.items()}
        say(f"{name}: p50 {figures['p50']} ms, max {figures['max']} ms")
    return found


async def end_of(stream: Any) -> float:
    try:
        while True:
            await stream.recv()
    except ConnectionClosed:
        return time.perf_counter()


def ms(times: Sequence[float], share: float) -> float:
    return round(1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))], 2)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
