"""The player on real sockets, and playing for a source."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ingest.simulate.generator import RsvpGenerator
from ingest.simulate.player import FileLines, Play, Player
from ingest.simulate.server import play_pipeline, run_player
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Pipeline, Source, Template


@asynccontextmanager
async def running(player: Player) -> AsyncIterator[int]:
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_player({"": player}, 0, port.set_result, stop))
    yield await asyncio.wait_for(port, 60)
    stop.set()
    await asyncio.wait_for(task, 60)


@asynccontextmanager
async def playing(tmp_path: Path, events: list[bytes], rate: float, **options: Any) -> AsyncIterator[int]:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\n".join(events))
    lines = FileLines(path)
    async with running(Player(lines, rate, event_id=Template("{rsvp_id}"), **options)) as port:
        yield port
    lines.close()


def numbered(count: int) -> list[bytes]:
    return [b'{"rsvp_id":%d,"mtime":1}' % n for n in range(count)]


# Clients have no bound (max_queue): what they leave unread would hold up the close handshake for ten seconds.
async def receive(socket: Any, count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        messages = [await socket.recv() for _ in range(count)]
    return [message.encode() if isinstance(message, str) else message for message in messages]


async def get(port: int, path: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(-1), 60)).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), orjson.loads(body)


@asynccontextmanager
async def streaming(port: int, path: str, *headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """The body of a chunked response, its chunks joined."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([f"GET {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert b" 200 OK" in head
    assert b"chunked" in head
    body = asyncio.StreamReader()

    async def unchunk() -> None:
        while size := int(await reader.readline(), 16):
            body.feed_data((await reader.readexactly(size + 2))[:-2])
        body.feed_eof()

    task = asyncio.create_task(unchunk())
    yield body
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    writer.close()
    await writer.wait_closed()


async def test_paces_by_the_rate_and_tells_the_times(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(500), 500.0) as port:
        await asyncio.sleep(0.2)
        assert (await get(port, "/status"))[1]["live"] == 0  # nobody came yet
        start = time.time()
        async with connect(f"ws://127.0.0.1:{port}/stream", max_queue=None) as socket:
            assert await receive(socket, 500) == numbered(500)
        took = time.time() - start
        assert took > 0.95, "never ahead of the rate; how far behind is the machine's affair"
        _, status = await get(port, "/status")
        assert status == {"sent": 500, "live": 500, "total": 500, "done": True, "rate": 500.0}
        _, answer = await get(port, "/times?from=0&limit=500")
        times = answer["at_ms"]
        assert len(times) == 500
        # Against the start that this side took: the first event itself may be late on a busy machine.
        assert min(at - start * 1000 - index * 2 for index, at in enumerate(times)) > -1
        _, answer = await get(port, "/times?from=490")
        assert answer == {"from": 490, "at_ms": times[490:]}


async def test_resumes_where_it_was_told(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(600), 1_000.0) as port:
        async with connect(f"ws://127.0.0.1:{port}/stream", max_queue=None) as socket:
            first = await receive(socket, 100)
        await asyncio.sleep(0.2)
        async with connect(f"ws://127.0.0.1:{port}/stream?from=100", max_queue=None) as socket:
            rest = await receive(socket, 500)
        assert first + rest == numbered(600)
        assert (await get(port, "/status"))[1]["done"] is True


async def test_without_a_place_a_client_starts_at_the_live_point(tmp_path: Path) -> None:
    async with (
        playing(tmp_path, numbered(2_000), 1_000.0) as port,
        connect(f"ws://127.0.0.1:{port}/stream", max_queue=None) as first,
    ):
        await receive(first, 300)
        async with connect(f"ws://127.0.0.1:{port}/stream", max_queue=None) as second:
            (event,) = await receive(second, 1)
            assert orjson.loads(event)["rsvp_id"] >= 299


async def test_sse_resumes_after_the_last_event_id(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(300), 5_000.0) as port:
        async with streaming(port, "/sse") as body:
            assert await body.readuntil(b"\n\n") == b'id: 0\ndata: {"rsvp_id":0,"mtime":1}\n\n'
        async with streaming(port, "/sse", "Last-Event-ID: 41") as body:
            got = [await body.readuntil(b"\n\n") for _ in range(258)]
        assert got[0] == b'id: 42\ndata: {"rsvp_id":42,"mtime":1}\n\n'
        assert got[-1].startswith(b"id: 299\n")
        async with streaming(port, "/sse?from=7") as body:
            assert (await body.readuntil(b"\n\n")).startswith(b"id: 7\n")


async def test_chunked_lines(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(300), 5_000.0) as port, streaming(port, "/lines?from=10") as body:
        got = [await asyncio.wait_for(body.readline(), 60) for _ in range(290)]
        assert got == [event + b"\n" for event in numbered(300)[10:]]


async def test_malformed_lines_pass_untouched(tmp_path: Path) -> None:
    events = [b'{"rsvp_id": 1', b"\xff\xfe{}", '{"name":"Zoë 健太"}'.encode(), b"  plain text", b'{"cut":"of']
    async with playing(tmp_path, events, 1_000.0) as port:
        async with connect(f"ws://127.0.0.1:{port}/stream", max_queue=None) as socket, asyncio.timeout(60):
            got = [await socket.recv() for _ in events]
        assert [type(message) for message in got] == [str, bytes, str, str, str]
        assert [m.encode() if isinstance(m, str) else m for m in got] == events
        async with streaming(port, "/lines?from=0") as body:
            assert [await body.readline() for _ in events] == [event + b"\n" for event in events]
        assert (await get(port, "/ids?from=0&limit=9"))[1] == {"from": 0, "ids": [None] * 5}


async def test_a_slow_client_holds_up_nobody() -> None:
    player = Player(RsvpGenerator(1, 0), 20_000.0)
    async with running(player) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1_024)  # never read
        writer.write(b"GET /lines HTTP/1.1\r\nHost: test\r\n\r\n")
        async with connect(f"ws://127.0.0.1:{port}/stream?from=0", max_queue=None) as socket:
            await receive(socket, 20_000)
            assert (await get(port, "/status"))[1]["sent"] >= 20_000  # while the other still has not read a byte
        writer.close()
        await writer.wait_closed()
        del reader


async def test_pings_are_answered_and_the_stop_is_told(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(3), 1_000.0) as port:
        socket = await connect(f"ws://127.0.0.1:{port}/stream")
        await receive(socket, 3)
        await asyncio.wait_for(await socket.ping(), 60)
    with pytest.raises(ConnectionClosed) as caught:
        await asyncio.wait_for(socket.recv(), 60)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1001


async def test_wrong_requests_are_told_so(tmp_path: Path) -> None:
    async with playing(tmp_path, numbered(3), 10.0) as port:
        assert (await get(port, "/nothing"))[0] == 404
        for path in ("/times?from=x", "/ids?from=-1", "/lines?from=1.5"):
            status, problem = await get(port, path)

            assert status == 400
            assert "whole number" in problem["detail"]
        with pytest.raises(InvalidStatus) as caught:
            await connect(f"ws://127.0.0.1:{port}/stream?from=abc")
        assert caught.value.response.status_code == 400
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"hello\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(-1), 60)).startswith(b"HTTP/1.1 400")
        writer.close()
        await writer.wait_closed()
        assert (await get(port, "/status"))[1]["live"] == 0  # none of them started the clock


SOURCE = Source(topic="t", schema="rsvp_id BIGINT", event_time="now()", event_id="{rsvp_id}:{mtime}", name="rsvps")
PIPELINE = Pipeline({"rsvps": SOURCE}, {})


async def test_made_up_rsvps_until_halted_by_signal() -> None:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(play_pipeline(PIPELINE, Play(rate=2_000.0, port=0), ready=url.set_result, stop=stop))
    base = await asyncio.wait_for(url, 60)
    async with connect(base.replace("http", "ws") + "/stream") as client:
        first = orjson.loads(await client.recv())
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(60):
            while not (status := await status_of(base))["done"]:  # noqa: ASYNC110 - asked by HTTP
                await asyncio.sleep(0.01)
            for _ in range(status["sent"] - 1):
                await client.recv()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.recv()
    assert first["group"]["group_topics"]
    assert (await status_of(base)) == status
    assert status["total"] == status["sent"]
    stop.set()
    await asyncio.wait_for(task, 60)


async def status_of(base: str) -> dict[str, Any]:
    """What the player says of itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rsplit(":", 1)[1]))
    writer.write(b"GET /status HTTP/1.1\r\nHost: test\r\n\r\n")
    status: dict[str, Any] = orjson.loads((await reader.read(-1)).partition(b"\r\n\r\n")[2])
    writer.close()
    await writer.wait_closed()
    return status


async def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"gone\.jsonl"):
        await play_pipeline(PIPELINE, Play(tmp_path / "gone.jsonl", port=0), stop=asyncio.Event())
    (tmp_path / "no.gz").write_bytes(b"not packed")
    with pytest.raises(EnvironmentProblem, match=r"no\.gz"):
        await play_pipeline(PIPELINE, Play(tmp_path / "no.gz", port=0), stop=asyncio.Event())


async def test_a_port_that_is_taken() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(EnvironmentProblem, match="is taken"):
            await play_pipeline(PIPELINE, Play(port=held.getsockname()[1]), stop=asyncio.Event())
