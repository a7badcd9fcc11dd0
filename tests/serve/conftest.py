"""A real server on a real socket, in this process or in one that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from lakehouse.contract.settings import ServeSettings, Settings
from serve.app import run_server
from tests.serve.postgres import Postgres

SCRIPT = """
import sys
from pathlib import Path
import uvloop
from lakehouse.contract.settings import load_settings
from serve.app import run_server
settings = load_settings({}, lake=Path(sys.argv[1]), **dict(a.split("=") for a in sys.argv[2:]))
uvloop.run(run_server(settings, ready=lambda url: print(url, flush=True)))
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Root of an empty lake."""
    return tmp_path / "lake"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of the tests' own."""
    with tempfile.TemporaryDirectory(prefix="millrace-pg-") as folder:
        started = Postgres(Path(folder))
        yield started
        started.close()


@contextlib.asynccontextmanager
async def serving(root: Path, pipeline: str = "meetup", **changed: int) -> AsyncIterator[str]:
    """A server in this loop; its base URL."""
    stop = asyncio.Event()
    up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = Settings(lake=root, pipeline=pipeline, serve=ServeSettings(**({"port": 0, "poll_ms": 5} | changed)))
    task = asyncio.create_task(run_server(settings, ready=up.set_result, stop=stop))
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield up.result()
    finally:
        stop.set()
        await task


class Spawned:
    """A server process."""

    def __init__(self, root: Path, **changed: int) -> None:
        arguments = [f"serve__{name}={value}" for name, value in ({"port": 0} | changed).items()]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(root), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], 60)
        assert readable, "the server did not start"
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://")

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it, in whatever state."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def spawned() -> Iterator[list[Spawned]]:
    """Server processes to be ended with the test."""
    processes: list[Spawned] = []
    yield processes
    for process in processes:
        process.close()


def address(url: str, table: str, position: str | None = None) -> str:
    """Where to subscribe."""
    query = f"table={table}" + (f"&from={position}" if position is not None else "")
    return f"{url.replace('http', 'ws')}/v1/subscribe?{query}"


def subscribed(url: str, table: str, position: str | None = None, **options: Any) -> connect:
    """A raw subscriber."""
    return connect(address(url, table, position), compression=None, open_timeout=60, **options)


async def receive(connection: ClientConnection, kind: str | None = None) -> dict[str, Any]:
    """The next message; of a kind if one is named (heartbeats are passed over in any case)."""
    until = time.monotonic() + 60
    while True:
        async with asyncio.timeout(max(0.01, until - time.monotonic())):
            message: dict[str, Any] = json.loads(await connection.recv())
        if message["type"] == kind or (kind is None and message["type"] != "heartbeat"):
            return message
        assert message["type"] == "heartbeat", f"{message['type']} came instead of {kind}"


async def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for something to become true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        await asyncio.sleep(0.01)
