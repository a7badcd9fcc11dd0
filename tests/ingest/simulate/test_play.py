"""Playing for a source."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from websockets.asyncio.client import connect

from ingest.simulate import Play, play_source
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source

SOURCE = Source(topic="t", schema="rsvp_id BIGINT", event_time="now()", event_id="{rsvp_id}:{mtime}")


async def test_made_up_rsvps_until_halted_by_signal() -> None:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(play_source(SOURCE, Play(rate=2_000.0, port=0), ready=url.set_result, stop=stop))
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
        await play_source(SOURCE, Play(tmp_path / "gone.jsonl", port=0))
    (tmp_path / "no.gz").write_bytes(b"not packed")
    with pytest.raises(EnvironmentProblem, match=r"no\.gz"):
        await play_source(SOURCE, Play(tmp_path / "no.gz", port=0))


async def test_a_port_that_is_taken() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(EnvironmentProblem, match="is taken"):
            await play_source(SOURCE, Play(count=1, port=held.getsockname()[1]))
