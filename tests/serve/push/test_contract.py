"""What a subscriber may rely on, whatever the transport: on real sockets, with real Delta tables."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from serve.position import Position

from ..conftest import Spawned, address, receive, serving, subscribed
from ..lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window


def counts(message: dict[str, Any]) -> list[int]:
    return [row["count"] for row in message["upserts"]]


async def closed(connection: ClientConnection) -> tuple[int, str]:
    """Reads to the end; close code and reason."""
    with pytest.raises(ConnectionClosed) as end:
        while True:
            async with asyncio.timeout(10):
                await connection.recv()
    assert end.value.rcvd is not None
    return end.value.rcvd.code, end.value.rcvd.reason


async def test_snapshot_changes_resume(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    async with serving(root) as url:
        async with subscribed(url, "top_topics") as connection:
            snapshot = await receive(connection, "snapshot")
            assert snapshot["rows"][0] == {
                "window_start": "2026-01-01T00:00:00Z",
                "window_end": "2026-01-01T00:01:00Z",
                "rank": 1,
                "item": "topic 1",
                "count": 3,
                "error": 0,
            }
            assert (snapshot["key"], snapshot["through"]) == (["window_start", "rank"], {"rsvps/0": 10})
            product.overwrite(topics(0, [4]), [window(0)])
            change = await receive(connection, "change")
            assert counts(change) == [4]
            assert change["deletes"] == [{"window_start": "2026-01-01T00:00:00Z", "rank": 2}]
            assert (change["events"], change["through"], change["last"]) == (10, {"rsvps/0": 20}, True)
            product.compact()
            product.overwrite(topics(0, [5]), [window(0)])
            missed = [await receive(connection, "change") for _ in range(product.version - 2)]
        async with subscribed(url, "top_topics", change["position"]) as connection:
            assert (await receive(connection, "resumed"))["position"] == change["position"]
            assert [await receive(connection, "change") for _ in missed] == missed


async def test_partials_arrive_as_totals(root: Path) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1)])
    async with serving(root) as url, subscribed(url, "rsvps_by_city") as connection:
        await receive(connection, "snapshot")
        product.append([city(0, "Bonn", 2)])
        assert [row["yes"] for row in (await receive(connection, "change"))["upserts"]] == [3]


async def test_any_position_of_the_log_is_resumed_by_a_process_that_never_saw_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.replay.CHUNK_BYTES", 1)  # a chunk a commit: the longest way to the ring
    product = top_topics(root)
    for count in range(12):
        product.overwrite(topics(0, [count]), [window(0)])
    table_id = str(product.table.metadata().id)
    async with serving(root, ring_frames=3) as url:
        for version in (0, 1, 5, 8, 9, 11, 12):
            async with subscribed(url, "top_topics", Position(table_id, version).token()) as connection:
                await receive(connection, "resumed")
                changes = [await receive(connection, "change") for _ in range(12 - version)]
                assert [counts(change) for change in changes] == [[count] for count in range(version, 12)]


async def test_what_is_gone_from_the_log_expires(root: Path) -> None:
    product = top_topics(root)
    for count in range(4):
        product.overwrite(topics(0, [count]), [window(0)])
    old = Position(str(product.table.metadata().id), 1).token()
    product.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    async with serving(root) as url, subscribed(url, "top_topics", old) as connection:
        assert (await receive(connection, "resumed"))["position"] == old
        assert (await receive(connection, "expired"))["reason"] == "log"
        snapshot = await receive(connection, "snapshot")
        assert [row["count"] for row in snapshot["rows"]] == [3]
        product.overwrite(topics(0, [9]), [window(0)])
        assert counts(await receive(connection, "change")) == [9]


async def test_a_rebuilt_table_expires_old_positions(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with serving(root) as url, subscribed(url, "top_topics") as connection:
        old = (await receive(connection, "snapshot"))["position"]
        shutil.rmtree(product.folder)
        await asyncio.sleep(0.05)
        top_topics(root).overwrite(topics(0, [2]), [window(0)])
        assert (await receive(connection, "expired"))["reason"] == "log"
        rows = (await receive(connection, "snapshot"))["rows"]
        while not rows:  # the tail may have seen the table before its first rows
            rows = (await receive(connection, "change"))["upserts"]
        assert [row["count"] for row in rows] == [2]
        async with subscribed(url, "top_topics", old) as again:
            assert (await receive(again, "expired"))["reason"] == "log"
            assert (await receive(again, "snapshot"))["position"] != old


async def test_a_position_ahead_of_the_table_expires(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.tables._AHEAD_MS", 50)
    product = top_topics(root)
    ahead = Position(str(product.table.metadata().id), 99).token()
    async with serving(root) as url, subscribed(url, "top_topics", ahead) as connection:
        await receive(connection, "resumed")
        assert "ahead" in (await receive(connection, "expired"))["detail"]
        await receive(connection, "snapshot")


async def test_a_table_that_comes_later_is_served(root: Path) -> None:
    async with serving(root) as url:
        async with subscribed(url, "top_topics") as connection:
            error = await receive(connection, "error")
            assert error["code"] == "no_such_table"
            assert (await closed(connection))[0] == 4404
        top_topics(root)
        async with subscribed(url, "top_topics") as connection:
            assert (await receive(connection, "snapshot"))["rows"] == []


@pytest.mark.parametrize(
    ("query", "close", "code"),
    [
        ("table=nope", 4404, "no_such_table"),
        ("table=..%2F..%2Fetc", 4404, "no_such_table"),
        ("table=top_topics&from=garbage", 4400, "bad_position"),
        ("table=top_topics&from=", 4400, "bad_position"),
        ("", 4400, "bad_request"),
        ("table=a&table=b", 4400, "bad_request"),
        ("table=top_topics&since=1", 4400, "bad_request"),
        ("table=log_only", 4400, "not_served"),
    ],
)
async def test_a_wrong_request_is_told_and_closed(root: Path, query: str, close: int, code: str) -> None:
    top_topics(root)
    Product(root / "gold" / "log_only", TOPICS, {})
    async with serving(root) as url, connect(f"{url.replace('http', 'ws')}/v1/subscribe?{query}") as connection:
        error = await receive(connection, "error")
        assert (error["code"], (await closed(connection))[0]) == (code, close)


async def test_too_many_subscribers(root: Path) -> None:
    top_topics(root)
    async with serving(root, max_subscribers=1) as url, subscribed(url, "top_topics") as first:
        await receive(first, "snapshot")
        async with subscribed(url, "top_topics") as second:
            assert (await closed(second))[0] == 1013
        await first.close()
        async with subscribed(url, "top_topics") as third:
            await receive(third, "snapshot")


async def test_the_server_stops_with_1001(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url:
        connection = await subscribed(url, "top_topics")
        await receive(connection, "snapshot")
    code, reason = await closed(connection)
    assert (code, "position" in reason) == (1001, True)
    assert connection.protocol.close_exc.rcvd_then_sent, "a clean close handshake"


@pytest.mark.parametrize(
    ("text", "close"),
    [
        ("{}", 4400),
        ("[]", 4400),
        ('{"type":"ack","position":"?"}', 4400),
        ('{"type":"x","position":"a"}', 4400),
        ("x" * 5_000, 1009),
    ],
)
async def test_what_a_client_may_not_send(root: Path, text: str, close: int) -> None:
    top_topics(root)
    async with serving(root) as url, subscribed(url, "top_topics") as connection:
        await receive(connection, "snapshot")
        await connection.send(text)
        assert (await closed(connection))[0] == close


async def test_acknowledgements_make_behind_exact(root: Path) -> None:
    product = top_topics(root)
    async with serving(root, heartbeat_ms=50) as url, subscribed(url, "top_topics") as connection:
        snapshot = await receive(connection, "snapshot")
        for count in range(3):
            product.overwrite(topics(0, [count]), [window(0)])
        changes = [await receive(connection, "change") for _ in range(3)]
        for position, behind in ((snapshot["position"], 3), (changes[1]["position"], 1), (changes[2]["position"], 0)):
            await connection.send(json.dumps({"type": "ack", "position": position}))
            async with asyncio.timeout(5):
                while (await receive(connection, "heartbeat"))["behind"] != behind:
                    pass


async def test_another_sites_page_may_not_subscribe(root: Path) -> None:
    async with serving(root) as url:
        with pytest.raises(InvalidStatus) as refused:
            await subscribed(url, "top_topics", additional_headers={"Origin": "https://elsewhere.example"})
        assert refused.value.response.status_code == 403
        async with subscribed(url, "nope", origin=url) as connection:
            await receive(connection, "error")


async def test_a_stopped_reader_costs_others_nothing_and_is_cut_with_notice(root: Path, spawned: list[Spawned]) -> None:
    product = top_topics(root)
    server = Spawned(root, poll_ms=5, heartbeat_ms=100, slow_after_ms=400, cut_after_ms=1_500)
    spawned.append(server)
    loop = asyncio.get_running_loop()
    host, port = server.url.removeprefix("http://").split(":")
    stopped = socket.socket()
    stopped.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    stopped.setblocking(False)
    await loop.sock_connect(stopped, (host, int(port)))
    await loop.sock_sendall(
        stopped,
        f"GET {address('', 'top_topics')} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode(),
    )
    head = await loop.sock_recv(stopped, 64)
    assert b" 101 " in head
    async with subscribed(server.url, "top_topics") as good:
        await receive(good, "snapshot")
        began, slowest, number = time.monotonic(), 0.0, 0
        while (await metric(server.url, "millrace_serve_cut_total")) == 0:
            number += 1
            rows = [row | {"item": f"{number} " + "x" * 2_000} for row in topics(0, [number] * 100)]  # 200 KB a change
            before = time.monotonic()
            await asyncio.to_thread(product.overwrite, rows, [window(0)])
            assert counts(await receive(good, "change"))[0] == number
            slowest = max(slowest, time.monotonic() - before)
            assert time.monotonic() - began < 10, "it was never cut"
        assert await metric(server.url, "millrace_serve_slow_total") == 1
        assert await metric(server.url, "millrace_serve_expired_total") == 0
        assert time.monotonic() - began >= 1.4
        assert slowest < 1.0
        await wait_until_metric(server.url, "millrace_serve_subscribers", 1)
    stopped.close()


async def test_a_reader_that_stops_for_a_while_hears_slow_first_and_then_everything(
    root: Path, spawned: list[Spawned]
) -> None:
    product = top_topics(root)
    server = Spawned(root, poll_ms=5, heartbeat_ms=100, slow_after_ms=300, cut_after_ms=20_000)
    spawned.append(server)
    async with subscribed(server.url, "top_topics", max_queue=1, max_size=None) as connection:
        await receive(connection, "snapshot")
        connection.transport.pause_reading()
        for number in range(1, 61):
            rows = [row | {"item": f"{number} " + "x" * 2_000} for row in topics(0, [number] * 100)]
            await asyncio.to_thread(product.overwrite, rows, [window(0)])
        await wait_until_metric(server.url, "millrace_serve_slow_total", 1)
        connection.transport.resume_reading()
        numbers, slow_at = [], None
        while len(numbers) < 60:
            message = await receive(connection)
            if message["type"] == "slow":
                slow_at = len(numbers)
                assert message["behind"] > 0
            elif message["last"]:
                numbers.append(counts(message)[0])
        assert numbers == list(range(1, 61))
        assert slow_at is not None
        assert slow_at < 60, "the notice stands ahead of what it lags by"


@pytest.mark.parametrize("ring_frames", [1_024, 2], ids=["from the ring", "from the log"])
async def test_kill_9_and_a_second_process_goes_on(root: Path, spawned: list[Spawned], ring_frames: int) -> None:
    product = top_topics(root)
    spawned.append(Spawned(root, poll_ms=5, ring_frames=ring_frames))
    writing = asyncio.create_task(write(product, 60))
    seen: list[int] = []
    position = None
    for stop_at in (10, 25, 40, 60):
        async with subscribed(spawned[-1].url, "top_topics", position) as connection:
            message = await receive(connection)
            if position is None:
                assert message["type"] == "snapshot"
                seen, position = [row["count"] for row in message["rows"]], message["position"]
            else:
                assert message["type"] == "resumed"
            while not seen or seen[-1] < stop_at:
                message = await receive(connection, "change")
                seen.extend(counts(message))
                position = message["position"]
            spawned[-1].kill()
        if stop_at < 60:
            spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, ring_frames=ring_frames))
    await writing
    assert seen == list(range(seen[0], 61)), "no gap, no repeat"


async def write(product: Product, changes: int) -> None:
    for count in range(1, changes + 1):
        await asyncio.to_thread(product.overwrite, topics(0, [count]), [window(0)])
        await asyncio.sleep(0.03)


async def metric(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    text = await asyncio.to_thread(fetch, f"{url}/metrics")
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, f"no metric {name}"
    return sum(float(line.split()[-1]) for line in lines)


async def wait_until_metric(url: str, name: str, value: float) -> None:
    until = time.monotonic() + 10
    while (now := await metric(url, name)) != value:
        assert time.monotonic() < until, f"{name} is {now}"
        await asyncio.sleep(0.05)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())
