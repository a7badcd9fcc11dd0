"""What only a WebSocket has: the close handshake, acknowledgements, changing the filter, the Origin."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.serve.conftest import Spawned, address, receive, serving, subscribed
from tests.serve.lakes import top_topics, topics, window
from tests.serve.push.clients import WebSocketClient


def counts(message: dict[str, Any]) -> list[int]:
    return [row["count"] for row in message["upserts"]]


async def closed(connection: ClientConnection) -> tuple[int, str]:
    """Reads to the end; close code and reason."""
    with pytest.raises(ConnectionClosed) as end:
        while True:
            async with asyncio.timeout(60):
                await connection.recv()
    assert end.value.rcvd is not None
    return end.value.rcvd.code, end.value.rcvd.reason


async def test_a_table_that_comes_later_is_served(root: Path) -> None:
    async with serving(root) as url:
        async with subscribed(url, "top_topics") as connection:
            error = await receive(connection, "error")
            assert error["code"] == "no_such_table"
            assert (await closed(connection))[0] == 4404
        top_topics(root)
        async with subscribed(url, "top_topics") as connection:
            assert (await receive(connection, "snapshot"))["rows"] == []


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
        ("x" * 17_000, 1009),
        (b'{"type":"\xff"}', 1007),
    ],
)
async def test_what_a_client_may_not_send(root: Path, text: str | bytes, close: int) -> None:
    top_topics(root)
    async with serving(root) as url, subscribed(url, "top_topics") as connection:
        await receive(connection, "snapshot")
        await connection.send(text, text=True)
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
            async with asyncio.timeout(60):
                while (await receive(connection, "heartbeat"))["behind"] != behind:
                    pass


class Bare:
    """A subscription that answers no ping by itself."""

    PONG = b"\x8a\x84" + bytes(4) + b"mill"

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def subscribe(cls, url: str, table: str) -> Bare:
        """The upgrade is through, the snapshot comes next."""
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(
            f"GET /v1/subscribe?table={table} HTTP/1.1\r\nHost: {place.netloc}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        async with asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
        return cls(reader, writer)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> int:
        """The code of the close that comes."""
        while (frame := await self._frame())[0] != 0x88:
            pass
        return int.from_bytes(frame[1][:2], "big")

    async def _frame(self) -> tuple[int, bytes]:
        async with asyncio.timeout(60):
            first, size = await self._reader.readexactly(2)
            if size == 126:
                size = int.from_bytes(await self._reader.readexactly(2), "big")
            return first, await self._reader.readexactly(size)

    async def message(self, *kinds: str) -> dict[str, Any]:
        """The next one of these kinds."""
        while True:
            first, body = await self._frame()
            if first == 0x81 and (found := json.loads(body))["type"] in kinds:
                return dict(found)
            assert first in (0x81, 0x89), "neither text nor a ping"


async def test_pongs_come_as_they_like(root: Path) -> None:
    """Whole, in pieces, and together with what needs a parser: the connection goes on, and they count as a sign."""
    product = top_topics(root)
    pong = Bare.PONG
    async with serving(root, heartbeat_ms=50, slow_after_ms=10_000) as url:
        bare = await Bare.subscribe(url, "top_topics")
        snapshot = await bare.message("snapshot")
        for pieces in ([pong], [pong], [pong[:3], pong[3:]], [pong, pong + pong]):
            for piece in pieces:
                bare.write(piece)
                await bare.message("heartbeat")
        ack = json.dumps({"type": "ack", "position": snapshot["position"], "pad": "x" * 200}).encode()
        product.overwrite(topics(0, [1]), [window(0)])
        bare.write(pong)
        await bare.message("change")
        while (await bare.message("heartbeat"))["behind"] != 0:
            bare.write(pong)
        frame = b"\x81\xfe" + len(ack).to_bytes(2, "big") + bytes(4) + ack
        bare.write(pong + frame[:20])
        await bare.message("heartbeat")
        bare.write(frame[20:] + pong)
        while (await bare.message("heartbeat"))["behind"] != 1:
            bare.write(pong)
        bare.close()


@pytest.mark.parametrize("spoken", [False, True])
async def test_a_close_amid_a_message_is_a_close(root: Path, spoken: bool) -> None:
    top_topics(root)
    async with serving(root) as url:
        bare = await Bare.subscribe(url, "top_topics")
        await bare.message("snapshot")
        if spoken:  # so that the parser of the handshake is there no more, and another one is
            bare.write(Bare.PONG + b"\x8a\x80" + bytes(4))
        bare.write(b"\x01\x81" + bytes(4) + b"{" + b"\x88\x82" + bytes(4) + (1000).to_bytes(2, "big"))
        assert await bare.closed() == 1000
        bare.close()


async def test_who_answers_no_ping_is_written_nothing_and_has_all_of_it_when_it_answers(root: Path) -> None:
    product = top_topics(root)
    async with serving(root, heartbeat_ms=50, slow_after_ms=600_000, cut_after_ms=600_000) as url:
        bare = await Bare.subscribe(url, "top_topics")
        await bare.message("snapshot")
        made, came = 0, []
        while True:
            made += 1
            product.overwrite(topics(0, [made]), [window(0)])
            while (got := await bare.message("change", "heartbeat"))["type"] == "change":
                came.append(counts(got)[0])
            if got["behind"] > 0:
                break
        assert came == list(range(1, len(came) + 1))
        assert len(came) < made, "it is told that there is more, and not given it"
        bare.write(Bare.PONG)
        while len(came) < made:
            came.append(counts(await bare.message("change"))[0])
        assert came == list(range(1, made + 1))
        bare.close()


async def test_a_listener_that_compresses_may_still_speak(root: Path) -> None:
    product = top_topics(root)
    async with serving(root, heartbeat_ms=50) as url, connect(address(url, "top_topics"), compression="deflate") as one:
        snapshot = json.loads(await one.recv())
        await receive(one, "heartbeat")
        product.overwrite(topics(0, [1]), [window(0)])
        await receive(one, "change")
        for _ in range(2):
            await one.send(json.dumps({"type": "ack", "position": snapshot["position"], "pad": "x" * 500}))
        while (await receive(one, "heartbeat"))["behind"] != 1:
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
    server = Spawned(root, poll_ms=5, heartbeat_ms=100, slow_after_ms=500, cut_after_ms=2_500)
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
        began, number, while_slow = time.monotonic(), 0, 0
        while (await metric(server.url, "millrace_serve_cut_total")) == 0:
            number += 1
            rows = [row | {"item": f"{number} " + "x" * 2_000} for row in topics(0, [number] * 100)]  # 200 KB a change
            slow = await metric(server.url, "millrace_serve_slow_total")
            await asyncio.to_thread(product.overwrite, rows, [window(0)])
            assert counts(await receive(good, "change"))[0] == number
            while_slow += slow == 1 and await metric(server.url, "millrace_serve_cut_total") == 0
            assert time.monotonic() - began < 60, "it was never cut"
        assert while_slow, "the other got its changes while this one stood still"
        assert await metric(server.url, "millrace_serve_slow_total") == 1
        assert await metric(server.url, "millrace_serve_expired_total") == 0
        assert time.monotonic() - began >= 2.4
        await wait_until_metric(server.url, "millrace_serve_subscribers", 1)
    stopped.close()


async def metric(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    text = await asyncio.to_thread(fetch, f"{url}/metrics")
    lines = [line for line in text.splitlines() if line.startswith(name)]
    assert lines, f"no metric {name}"
    return sum(float(line.split()[-1]) for line in lines)


async def wait_until_metric(url: str, name: str, value: float) -> None:
    until = time.monotonic() + 60
    while (now := await metric(url, name)) != value:
        assert time.monotonic() < until, f"{name} is {now}"
        await asyncio.sleep(0.05)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


async def test_another_filter_on_an_open_connection(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5, 1, 7]), [window(0)])
    async with serving(root) as url, WebSocketClient(url, {"table": "top_topics"}) as client:
        await client.receive("snapshot")
        await client.send(type="filter", where="count > 4", columns=["count"])
        expired = await client.receive()
        assert (expired["type"], expired["reason"]) == ("expired", "filter")
        snapshot = await client.receive("snapshot")
        assert (snapshot["where"], [row["count"] for row in snapshot["rows"]]) == ('"count" > 4', [5, 7])
        await client.send(type="filter", where="count > ")
        assert (await client.receive("error"))["code"] == "bad_filter"
        product.overwrite(topics(0, [6, 1, 7]), [window(0)])
        assert counts(await client.receive("change")) == [6], "the one before a filter that was refused stays"
        await client.send(type="filter", select="SELECT max(count) AS most")
        await client.receive("expired")
        assert (await client.receive("snapshot"))["rows"] == [{"most": 7}]
        await client.send(type="filter")
        await client.receive("expired")
        assert len((await client.receive("snapshot"))["rows"]) == 3


@pytest.mark.parametrize("conflate", [False, True])
async def test_no_more_than_a_window_is_sent_without_an_acknowledgement(root: Path, conflate: bool) -> None:
    product = top_topics(root)
    asked = {"table": "top_topics", "window": "2"} | ({"conflate": "1"} if conflate else {})
    async with (
        serving(root, heartbeat_ms=20) as url,
        WebSocketClient(url, asked) as client,
        WebSocketClient(url, {"table": "top_topics"}) as other,
    ):
        await client.receive("snapshot")
        await other.receive("snapshot")
        for count in range(1, 8):
            product.overwrite(topics(0, [count]), [window(0)])
            assert counts(await other.receive("change")) == [count]
        first = [await client.receive("change") for _ in range(2)]
        assert [counts(change) for change in first] == [[1], [2]]
        await client.send(type="filter", where="no SQL (")
        fence = await client.receive()
        assert fence["type"] == "error", "seven commits have been made, and nothing more was sent before this answer"
        while not client.messages or client.messages[-1]["behind"] != 5:  # heartbeats go on, and tell
            await client.fetch()
        await client.send(type="ack", position=first[-1]["position"])
        if conflate:
            merged = await client.receive("change")
            assert (counts(merged), merged["merged"], merged["events"]) == ([7], 5, 50)
            assert merged["after"] == first[-1]["position"]
            return
        more = [await client.receive("change") for _ in range(2)]
        await client.send(type="ack", position=more[-1]["position"])
        rest = [await client.receive("change") for _ in range(2)]
        await client.send(type="ack", position=rest[0]["position"])
        rest.append(await client.receive("change"))
        assert [counts(change) for change in more + rest] == [[3], [4], [5], [6], [7]]
