"""A real control plane on a real socket, over SQLite and over a PostgreSQL that the tests start themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lakehouse.contract.settings import ControlSettings, Settings
from serve.control.app import run_control


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    """``control.database`` of either kind."""
    return "" if request.param == "sqlite" else request.getfixturevalue("postgres").new_database()


class Plane:
    """A control plane that runs, and clients of it."""

    def __init__(self, url: str, lake: Path) -> None:
        self.url = url
        self.folder = lake / "_millrace" / "control"

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """With a key; by default the operator's."""
        key = (self.folder / "admin.key").read_text().strip() if key is None else key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60)

    def machine(self) -> httpx.AsyncClient:
        return self.client((self.folder / "machine.key").read_text().strip())


@contextlib.asynccontextmanager
async def controlling(lake: Path, database: str = "", **changed: Any) -> AsyncIterator[Plane]:
    """A control plane in this loop."""
    stop = asyncio.Event()
    up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    control = ControlSettings(**{"port": 0, "database": database} | changed)
    task = asyncio.create_task(run_control(Settings(lake=lake, control=control), ready=up.set_result, stop=stop))
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield Plane(up.result(), lake)
    finally:
        stop.set()
        await task


@pytest.fixture
async def plane(tmp_path: Path, database: str) -> AsyncIterator[Plane]:
    async with controlling(tmp_path / "lake", database) as found:
        yield found


@pytest.fixture
async def admin(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    async with plane.client() as client:
        yield client


async def good(client: httpx.AsyncClient, method: str, path: str, status: int, **body: Any) -> Any:
    """The JSON of an answer with this status."""
    answer = await client.request(method, path, json=body or None)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def new_tenant(client: httpx.AsyncClient, tenant: str = "acme", app: str = "shop") -> None:
    await good(client, "POST", "/v1/tenants", 201, name=tenant)
    await good(client, "POST", f"/v1/tenants/{tenant}/apps", 201, name=app)
