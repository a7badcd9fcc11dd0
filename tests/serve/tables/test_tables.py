"""What can go wrong with a lake's tables while they are served."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import PROPERTY_KEY, Lake
from serve.core.position import Position, lake_seal
from tests.serve.conftest import receive, serving, subscribed
from tests.serve.core.test_view_of import CHANNEL, PIPELINE, declared
from tests.serve.lakes import TOPICS, Product, rsvps_by_city, top_topics, topics, window
from tests.serve.push.clients import STREAMS, Client, WebSocketClient


def counts(change: dict[str, Any]) -> list[int]:
    return [row["count"] for row in change["upserts"]]


def described(product: Product, properties: dict[str, str]) -> None:
    """Commit a table's metadata with other properties; delta-rs sets none but Delta's own."""
    first = DeltaLog(product.folder).commit_file(0).read_text().splitlines()
    [metadata] = [action["metaData"] for action in map(json.loads, first) if "metaData" in action]
    actions = [{"metaData": metadata | {"configuration": properties}}, {"commitInfo": {"timestamp": 0}}]
    path = DeltaLog(product.folder).commit_file(product.version + 1)
    path.with_suffix(".tmp").write_text("\n".join(map(json.dumps, actions)))
    path.with_suffix(".tmp").rename(path)


async def refused(client: Client) -> str:
    """The code of the error that comes next, and closes."""
    code = str((await client.receive("error"))["code"])
    await client.closed()
    return code


async def test_a_lake_that_cannot_be_listed_once_is_followed_nevertheless(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    product = top_topics(root)
    left, failed, listed = [3], asyncio.Event(), Path.iterdir
    loop = asyncio.get_running_loop()

    def no_more_files(self: Path) -> Iterator[Path]:
        if self == root / "gold" and left[0]:
            left[0] -= 1
            loop.call_soon_threadsafe(failed.set)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return listed(self)

    async with serving(root) as url, subscribed(url, "top_topics") as connection:
        await receive(connection, "snapshot")
        monkeypatch.setattr(Path, "iterdir", no_more_files)
        async with asyncio.timeout(60):
            await failed.wait()
        product.overwrite(topics(0, [3]), [window(0)])
        assert counts(await receive(connection, "change")) == [3]
        while left[0]:
            async with subscribed(url, "rsvps_by_city") as other:
                assert (await receive(other, "error"))["code"] in ("busy", "no_such_table")
        later = rsvps_by_city(root)
        async with subscribed(url, "rsvps_by_city") as other:
            await receive(other, "snapshot")
        assert later.version == 0
    assert "cannot be listed" in caplog.text


async def test_a_commit_that_cannot_be_read_at_once_is_read_a_little_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = top_topics(root)
    left, read = {"00000000000000000001.json": 1}, Path.read_bytes

    def no_more_files(self: Path) -> bytes:
        if left.pop(self.name, 0):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", no_more_files)
    async with serving(root) as url, WebSocketClient(url, {"table": "top_topics"}) as client:
        await client.receive("snapshot")
        for count in (1, 2):
            product.overwrite(topics(0, [count]), [window(0)])
        assert [counts(change) for change in await client.changes(2)] == [[1], [2]], "nothing expired"
    assert not left


async def test_subscribers_that_do_not_acknowledge_keep_nobody_elses_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.tables.tables.CHUNK_BYTES", 1)
    monkeypatch.setattr("serve.core.channel._HISTORY", 2)
    product = top_topics(root)
    for count in range(7):
        product.overwrite(topics(0, [count]), [window(0)])
    start = lake_seal(Lake(root).state).token(Position(str(product.table.metadata().id), 0))
    resumed = {"table": "top_topics", "from": start}
    async with serving(root, ring_frames=2) as url, AsyncExitStack() as stack:
        held = [WebSocketClient(url, resumed | {"window": "1"}) for _ in range(4)]
        for client in held:
            await stack.enter_async_context(client)
            await client.receive("resumed")
            assert counts(await client.receive("change")) == [0]
        async with WebSocketClient(url, resumed) as other:
            await other.receive("resumed")
            assert [counts(change) for change in await other.changes(7)] == [[count] for count in range(7)]
        for count in range(1, 7):
            for client in held:
                await client.send(type="ack", position=client.position)
                assert counts(await client.receive("change")) == [count]


async def test_a_table_that_becomes_unreadable_is_not_served_until_it_is_readable_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.tables.tables._UNREADABLE_RETRY_S", 0.05)
    product = top_topics(root)
    product.overwrite(topics(0, [3]), [window(0)])
    start = window(0).isoformat().replace("+00:00", "Z")
    ways = ("", f"/{start}", f"/{start},1")
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client, AsyncExitStack() as stack:

        async def answers() -> list[int]:
            return [(await client.get(f"/v1/tables/top_topics{way}")).status_code for way in ways]

        streams = [STREAMS[name](url, {"table": "top_topics"}) for name in STREAMS]
        filtered = WebSocketClient(url, {"table": "top_topics", "where": "count > 1"})
        for stream in (*streams, filtered):
            await stack.enter_async_context(stream)
            await stream.receive("snapshot")
        asked = {"table": "top_topics", "wait": "60"}
        first = (await client.get("/v1/poll", params=asked)).json()
        poll = asyncio.ensure_future(client.get("/v1/poll", params=asked | {"from": first["position"]}))
        assert await answers() == [200] * 3
        described(product, {PROPERTY_KEY: "nothing"})
        for stream in (*streams, filtered):
            assert await refused(stream) == "not_served"
        assert ((await poll).status_code, (await poll).json()["code"]) == (400, "not_served")
        assert await answers() == [409] * 3
        [listed] = (await client.get("/v1/tables")).json()["tables"]
        assert (listed["served"], PROPERTY_KEY in listed["detail"]) == (False, True)
        async with WebSocketClient(url, {"table": "top_topics"}) as late:
            assert await refused(late) == "not_served"
        described(product, {PROPERTY_KEY: "window_start,rank"})
        async with asyncio.timeout(60):
            while await answers() != [200] * 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        product.overwrite(topics(0, [3, 8]), [window(0)])
        async with asyncio.timeout(60):
            while len((await client.get(f"/v1/tables/top_topics/{start}")).json()["rows"]) != 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_table_that_outgrows_its_channel_is_not_served(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [9]), [window(0)])
    async with declared(root, PIPELINE + CHANNEL) as url, WebSocketClient(url, {"table": "top_topics"}) as client:
        await client.receive("snapshot")
        narrow = TOPICS.remove(TOPICS.get_field_index("item"))
        rows = [{name: row[name] for name in narrow.names} for row in topics(0, [9])]
        data = pa.Table.from_pylist(rows, schema=narrow)
        write_deltalake(product.folder, data, mode="overwrite", schema_mode="overwrite")
        assert await refused(client) == "not_served"
