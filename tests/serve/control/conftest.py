"""A real control plane on a real socket, over SQLite and over a PostgreSQL that the tests start themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.local.stack import free_port
from lakehouse.contract.settings import ControlSettings, Settings
from serve.control.app import run_control

URL = "postgresql://{user}@127.0.0.1:{port}/{name}"


def _binary(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


class Postgres:
    """A PostgreSQL of its own; as root it runs as a system user, because it refuses root."""

    def __init__(self, folder: Path) -> None:
        server, initdb = _binary("postgres"), _binary("initdb")
        if server is None or initdb is None:
            pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        self._folder = folder
        self.user = "postgres"
        self.port = free_port()
        identity: dict[str, Any] = {}
        if os.getuid() == 0:
            known = {entry.pw_name: entry for entry in pwd.getpwall()}
            entry = known.get("postgres") or known["nobody"]
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        data = str(folder / "data")
        made = subprocess.run(
            [initdb, "-D", data, "-U", self.user, "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"],
            capture_output=True,
            text=True,
            cwd=folder,
            **identity,
        )
        assert made.returncode == 0, made.stderr
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        arguments = [text for name, value in options.items() for text in ("-c", f"{name}={value}")]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen([server, "-D", data, *arguments], stderr=log, cwd=folder, **identity)

    def new_database(self) -> str:
        """URL of a new, empty database."""
        import psycopg

        name = f"t{time.monotonic_ns()}"
        until = time.monotonic() + 30
        while True:
            try:
                with psycopg.connect(URL.format(user=self.user, port=self.port, name="postgres")) as connection:
                    connection.autocommit = True
                    connection.execute(f"CREATE DATABASE {name}")
                    return URL.format(user=self.user, port=self.port, name=name)
            except psycopg.OperationalError:
                assert time.monotonic() < until, (self._folder / "log").read_text()
                time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory(prefix="millrace-pg-") as folder:
        started = Postgres(Path(folder))
        yield started
        started.close()


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
