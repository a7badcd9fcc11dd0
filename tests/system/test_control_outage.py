"""The control plane is killed under load: nobody is refused who was let in before, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from ingest.broker import EmbeddedBroker
from jobs.local.stack import free_port
from lakehouse.contract.settings import ControlSettings, ServeSettings
from tests.ingest.conftest import consume, pipeline_of, running_node, settings_of
from tests.serve.control.conftest import Plane, good, new_tenant
from tests.serve.control.test_state import server
from tests.serve.lakes import city, rsvps_by_city

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
SENDERS, READERS, PAUSE_S, COMMIT_S = 4, 2, 0.02, 0.5


class Killable:
    """A control plane in a process of its own, always on the same port."""

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._port = free_port()
        self.plane = Plane(f"http://127.0.0.1:{self._port}", lake)

    async def start(self) -> None:
        command = ["control", "--lake", str(self._lake), "--set", f"control.port={self._port}"]
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork of milliseconds
            [sys.executable, "-m", "jobs.cli", *command], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 60
        async with httpx.AsyncClient(timeout=60) as client:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.plane.url}/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError("the control plane did not start")

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.asynccontextmanager
async def killable(lake: Path) -> AsyncIterator[Killable]:
    found = Killable(lake)
    await found.start()
    try:
        yield found
    finally:
        found.kill()


async def outage(broker: EmbeddedBroker, lake: Path, down_s: float) -> None:
    """A round of load with an outage of this length in its middle."""
    topic = f"outage-{time.monotonic_ns()}"
    table = rsvps_by_city(lake)
    table.append([city(0, "Berlin", 0)])
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(killable(lake))
        plane = control.plane
        link = ControlSettings(url=plane.url, refresh_ms=500)
        settings = replace(settings_of(lake), serve=ServeSettings(port=0, poll_ms=5), control=link)
        admin = await stack.enter_async_context(plane.client())
        await new_tenant(admin, "default")
        made = await good(
            admin, "POST", "/v1/keys", 201, actions=["read", "send"], tenant="default", app="shop", sources=["clicks"]
        )
        serving = await stack.enter_async_context(server(settings))
        node = running_node(settings, pipeline_of(topic, "http"), broker.bootstrap)
        collecting = await stack.enter_async_context(node)
        key = {"Authorization": f"Bearer {made['key']}"}
        http = await stack.enter_async_context(httpx.AsyncClient(headers=key, timeout=60))
        answers: Counter[int] = Counter()
        acknowledged: list[str] = []
        seen: list[int] = []
        over = asyncio.Event()

        async def send(sender: int) -> None:
            number = 0
            while not over.is_set():
                event = f"{sender}-{number}"
                answer = await http.post(f"{collecting}/v1/clicks", json={"id": event, "who": str(sender)})
                answers[answer.status_code] += 1
                if answer.status_code == 202:
                    acknowledged.append(event)
                number += 1
                await asyncio.sleep(PAUSE_S)

        async def read() -> None:
            while not over.is_set():
                answers[(await http.get(f"{serving}/v1/tables/rsvps_by_city")).status_code] += 1
                await asyncio.sleep(PAUSE_S)

        async def commit() -> int:
            number = 0
            while not over.is_set():
                number += 1
                await asyncio.to_thread(table.append, [city(0, "Berlin", 1)])
                await asyncio.sleep(COMMIT_S)
            return number

        async def follow() -> int | None:
            async with connect(
                f"{serving.replace('http', 'ws')}/v1/subscribe?table=rsvps_by_city", additional_headers=key
            ) as stream:
                with contextlib.suppress(ConnectionClosed):
                    async for text in stream:
                        message = json.loads(text)
                        seen.extend(row["yes"] for row in message.get("rows", message.get("upserts", [])))
                return stream.close_code

        following = asyncio.create_task(follow())
        load = [asyncio.create_task(send(number)) for number in range(SENDERS)]
        load += [asyncio.create_task(read()) for _ in range(READERS)]
        committing = asyncio.create_task(commit())
        await asyncio.sleep(1)
        control.kill()
        await asyncio.sleep(down_s)
        await control.start()
        await asyncio.sleep(2)
        assert not following.done()
        over.set()
        await asyncio.gather(*load)
        commits = await committing
        assert answers.keys() <= {200, 202}, answers
        until = time.monotonic() + 60
        while seen[-1] < commits:
            assert time.monotonic() < until, (seen[-1], commits)
            await asyncio.sleep(0.05)
        records = await asyncio.to_thread(consume, broker.bootstrap, topic, len(acknowledged))
        assert sorted(json.loads(record.value)["id"] for record in records) == sorted(acknowledged)
        assert len(acknowledged) > SENDERS * down_s
        # The control plane that is back is heard: the key ends at collector and server.
        await good(admin, "DELETE", f"/v1/keys/{made['id']}", 204)
        refused = await http.post(f"{collecting}/v1/clicks", json={"id": "late", "who": "x"})
        assert refused.status_code == 401
        assert (await http.get(f"{serving}/v1/tables/rsvps_by_city")).status_code == 401
        async with asyncio.timeout(60):
            assert await following == 4401


async def test_control_plane_is_killed_under_load(broker: EmbeddedBroker, tmp_path: Path) -> None:
    await outage(broker, tmp_path / "lake", 3)


@pytest.mark.soak
async def test_control_plane_is_down_for_ten_minutes_under_load(broker: EmbeddedBroker, tmp_path: Path) -> None:
    await outage(broker, tmp_path / "lake", 600)
