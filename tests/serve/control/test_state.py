"""What the control plane says reaches servers: keys, rotation, revocation, ends of life. It holds while it is down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from lakehouse.contract.access import SOURCES_FOLDER, STATE_FILE, KeyRing, StateManager
from lakehouse.contract.settings import ControlSettings, ServeSettings, Settings
from lakehouse.contract.tomlfile import read_toml
from serve.access import ReaderKey
from serve.app import run_server
from tests.serve.conftest import wait_until
from tests.serve.control.conftest import controlling, good, new_tenant
from tests.serve.control.test_rest import SOURCE
from tests.serve.lakes import city, rsvps_by_city

REFRESH_MS = 500


def settings_of(lake: Path, url: str, **control: Any) -> Settings:
    serve = ServeSettings(port=0, poll_ms=5, webhook_private=True)
    return Settings(lake=lake, serve=serve, control=ControlSettings(url=url, refresh_ms=REFRESH_MS, **control))


@contextlib.asynccontextmanager
async def server(settings: Settings) -> AsyncIterator[str]:
    stop = asyncio.Event()
    up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_server(settings, ready=up.set_result, stop=stop))
    try:
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield up.result()
    finally:
        stop.set()
        await task


@contextlib.contextmanager
def managed(settings: Settings) -> Any:
    manager = StateManager(settings)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    rsvps_by_city(tmp_path / "lake").append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    return tmp_path / "lake"


async def status(url: str, key: str) -> int:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.get(f"{url}/v1/tables/rsvps_by_city", headers={"Authorization": f"Bearer {key}"})
        return answer.status_code


async def test_subscription_is_usable_at_once_and_ends_with_its_key(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin, server(settings_of(lake, plane.url)) as url:
        await new_tenant(admin, "default")
        assert await status(url, "mr_x_y") == 401, "a key is needed although there is none"
        asked = {"tenant": "default", "app": "shop", "table": "rsvps_by_city", "where": "city = 'Bonn'"}
        made = await admin.post("/v1/subscriptions", json=asked)
        assert made.headers["millrace-known-by"] == "1/1"
        key = {"Authorization": f"Bearer {made.json()['key']}"}
        target = f"{url.replace('http', 'ws')}/v1/subscribe?table=rsvps_by_city"
        async with connect(target, additional_headers=key) as stream:
            snapshot = json.loads(await stream.recv())
            assert [row["city"] for row in snapshot["rows"]] == ["Bonn"]
            began = time.monotonic()
            await good(admin, "DELETE", f"/v1/subscriptions/{made.json()['id']}", 204)
            assert await status(url, made.json()["key"]) == 401
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    await stream.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
            assert time.monotonic() - began < 60, "the benchmark measures it; two seconds are promised"


async def test_rotated_key_keeps_what_was_made_with_it(lake: Path) -> None:
    settings = settings_of(lake, "http://127.0.0.1:1")
    async with contextlib.AsyncExitStack() as stack:
        plane = await stack.enter_async_context(controlling(lake))
        url = await stack.enter_async_context(
            server(replace(settings, control=replace(settings.control, url=plane.url)))
        )
        admin = await stack.enter_async_context(plane.client())
        first = await good(admin, "POST", "/v1/keys", 201, actions=["read"], name="hooks")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {first['key']}"}, timeout=60) as old:
            hook = {"table": "rsvps_by_city", "url": "http://127.0.0.1:9/x", "from": "now"}
            made = await old.post(f"{url}/v1/webhooks", json=hook)
            assert made.status_code == 201, made.text
        second = await good(admin, "POST", f"/v1/keys/{first['id']}/rotate", 201, grace_s=3600)
        assert [await status(url, each["key"]) for each in (first, second)] == [200, 200]
        third = await good(admin, "POST", f"/v1/keys/{second['id']}/rotate", 201, grace_s=0)
        await good(admin, "DELETE", f"/v1/keys/{first['id']}", 204)
        assert [await status(url, each["key"]) for each in (first, second, third)] == [401, 401, 200]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {third['key']}"}, timeout=60) as new:
            (listed,) = (await new.get(f"{url}/v1/webhooks")).json()["webhooks"]
            assert listed["id"] == made.json()["id"] and listed["state"] != "stopped"


async def test_webhooks_and_queries_are_those_of_the_server(lake: Path) -> None:
    async with controlling(lake) as plane:
        settings = settings_of(lake, plane.url)
        async with server(settings) as url, controlling(lake, serve_url=url) as plane, plane.client() as admin:
            key = await good(admin, "POST", "/v1/keys", 201, actions=["queries"])
            reader = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
            await wait_for_key(url, reader["key"])
            async with plane.client(key["key"]) as queries, plane.client(reader["key"]) as reads:
                sql = "SELECT city, sum(yes) AS yes FROM rsvps_by_city GROUP BY city"
                refused = await reads.post("/v1/queries", json={"name": "by_city", "sql": sql})
                assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
                made = await queries.post("/v1/queries", json={"name": "by_city", "sql": sql})
                assert made.status_code == 201, made.text
                assert (await queries.get("/v1/queries/by_city")).json()["sql"] == sql
                hook = {"table": "rsvps_by_city", "url": "http://127.0.0.1:9/x"}
                made = await reads.post("/v1/webhooks", json=hook)
                assert made.status_code == 201
                async with httpx.AsyncClient(
                    headers={"Authorization": f"Bearer {reader['key']}"}, timeout=60
                ) as direct:
                    (listed,) = (await direct.get(f"{url}/v1/webhooks")).json()["webhooks"]
                assert listed["id"] == made.json()["id"]
                assert (await reads.delete(f"/v1/webhooks/{listed['id']}")).status_code == 204
            acts = [each["act"] for each in (await good(admin, "GET", "/v1/audit?limit=3", 200))["items"]]
            assert acts == ["webhooks.delete", "webhooks.post", "queries.post"]
    async with controlling(lake, serve_url="http://127.0.0.1:1") as plane, plane.client(reader["key"]) as reads:
        assert (await reads.get("/v1/webhooks")).status_code == 503


async def wait_for_key(url: str, key: str) -> None:
    until = time.monotonic() + 30
    while await status(url, key) != 200:
        assert time.monotonic() < until
        await asyncio.sleep(0.02)


async def test_key_ends_by_its_date_while_the_control_plane_is_down(lake: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with controlling(lake) as plane, plane.client() as admin:
            url = await stack.enter_async_context(server(settings_of(lake, plane.url)))
            await new_tenant(admin, "default")
            key = await good(admin, "POST", "/v1/keys", 201, actions=["read"], tenant="default", app="shop")
            ends = time.time() + 2
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(ends))
            await good(admin, "PATCH", "/v1/tenants/default/apps/shop", 200, ends=moment)
        assert await status(url, key["key"]) == 200 or time.time() > ends - 1
        await asyncio.sleep(max(0.0, ends + 0.1 - time.time()))
        assert await status(url, key["key"]) == 401


async def test_last_good_state_outlives_control_plane_and_server(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin:
        settings = settings_of(lake, plane.url)
        async with server(settings) as url:
            kept = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
            revoked = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
            assert await status(url, kept["key"]) == await status(url, revoked["key"]) == 200
            await good(admin, "DELETE", f"/v1/keys/{revoked['id']}", 204)
            folder = settings.control_state
            await wait_until(lambda: revoked["id"] not in (folder / STATE_FILE).read_text())
    assert kept["key"].split("_", 2)[2] not in (folder / STATE_FILE).read_text()
    assert (folder / STATE_FILE).stat().st_mode & 0o077 == 0
    async with server(settings) as url:
        assert [await status(url, each["key"]) for each in (kept, revoked)] == [200, 401]
    (folder / STATE_FILE).write_text("{")
    async with server(settings) as url:
        assert await status(url, kept["key"]) == 401, "without a state nobody is let in"


async def test_restarted_server_begins_with_the_newest_state(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin:
        settings = settings_of(lake, plane.url)
        key = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
        async with server(settings) as url:
            assert await status(url, key["key"]) == 200
        await good(admin, "DELETE", f"/v1/keys/{key['id']}", 204)
        assert key["id"] in (settings.control_state / STATE_FILE).read_text()
        async with server(settings) as url:
            assert await status(url, key["key"]) == 401


async def test_sources_are_files_of_the_state(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin:
        settings = settings_of(lake, plane.url)
        folder = settings.control_state / SOURCES_FOLDER
        with managed(settings) as manager:
            await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE)
            await wait_until(lambda: (folder / "clicks.toml").exists())
            assert read_toml(folder / "clicks.toml") == SOURCE
            before = (folder / "clicks.toml").stat().st_mtime_ns
            await good(admin, "PUT", "/v1/sources/views", 200, **SOURCE | {"topic": "views"})
            await wait_until(lambda: (folder / "views.toml").exists())
            assert (folder / "clicks.toml").stat().st_mtime_ns == before, "what is unchanged is not written again"
            await good(admin, "DELETE", "/v1/sources/clicks", 204)
            await wait_until(lambda: not (folder / "clicks.toml").exists())
            assert manager.maps["sources"].keys() == {"views"}


async def test_processes_that_share_a_folder_agree_on_the_newest_state(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin:
        settings = settings_of(lake, plane.url)
        await good(admin, "PUT", "/v1/sources/clicks", 200, **SOURCE)
        file = settings.control_state / STATE_FILE
        with managed(settings), managed(settings):
            await wait_until(file.exists)
            newest = file.read_bytes()
            file.write_bytes(b"an older state, by a process that was slow")
            await wait_until(lambda: file.read_bytes() == newest)


async def test_change_by_another_process_over_the_same_database_arrives(lake: Path) -> None:
    async with controlling(lake) as plane, plane.client() as admin:
        key = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
        other = await good(admin, "POST", "/v1/keys", 201, actions=["read"])
        with managed(settings_of(lake, plane.url)) as manager:
            ring = KeyRing(manager.keys(ReaderKey, "read"))
            await wait_until(lambda: ring.find(key["key"]) is not None)
            assert ring.required
            # A second control plane over the same database revokes a key that the first never speaks of.
            async with controlling(lake) as second, second.client() as again:
                await good(again, "DELETE", f"/v1/keys/{other['id']}", 204)
            await wait_until(lambda: ring.find(other["key"]) is None)
            assert ring.find(key["key"]) is not None


def test_ring_of_the_state_never_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = StateManager(settings_of(tmp_path, "http://127.0.0.1:1"))
    ring = KeyRing(manager.keys(ReaderKey, "read"))
    monkeypatch.setattr(Path, "stat", None)
    monkeypatch.setattr(Path, "read_bytes", None)
    assert ring.find("mr_x_y") is None and ring.required


async def test_answer_of_somebody_else_changes_nothing(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]")
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    key = tmp_path / "key"
    key.write_text("mr_x_y")
    settings = settings_of(tmp_path, f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}", key=str(key))
    manager = StateManager(settings)
    await asyncio.to_thread(manager.start)
    await wait_until(lambda: manager.failures >= 2)
    await asyncio.to_thread(manager.stop)
    other.close()
    assert not any(manager.maps.values())


def test_key_of_a_newer_millrace_is_not_used(tmp_path: Path) -> None:
    manager = StateManager(settings_of(tmp_path, "http://127.0.0.1:1"))
    ring = KeyRing(manager.keys(ReaderKey, "read"))
    good_key = {"hash": "0" * 64, "actions": ["read"]}
    keys = {"a": good_key, "b": {**good_key, "rows": {"t": "1 = ("}}, "c": {**good_key, "actions": ["send"]}}
    manager._take({"whole": True, "tenants": {}, "apps": {}, "keys": keys, "sources": {}})
    assert ring.get("a") is not None and ring.get("b") is None and ring.get("c") is None
