from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ..conftest import receive, serving, subscribed
from ..lakes import top_topics


async def test_a_connection_without_a_request_is_closed_and_one_with_a_request_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.push.sse.FIRST_REQUEST_S", 0.2)
    top_topics(root)
    async with serving(root, heartbeat_ms=100) as url, subscribed(url, "top_topics") as good:
        host, port = url.removeprefix("http://").split(":")
        for head in (b"", b"GET /healthz HTTP/1.1\r\nHost:"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        for _ in range(5):
            await receive(good, "heartbeat" if _ else "snapshot")
