"""A receiver on a real socket, that answers as it is told and checks every signature."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from serve.webhooks.call import signature


@dataclass
class Receiver:
    """What came, in order; ``answers`` are the next statuses, after them 204. A body larger than ``most`` is not taken;
    while ``answering`` is not set, nothing is answered."""

    url: str = ""
    secret: str = ""
    answers: list[int] = field(default_factory=list)
    always: int = 204
    most: int = 1 << 30
    read: int = 0
    open: dict[asyncio.StreamWriter, asyncio.Task[Any]] = field(default_factory=dict)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    taken: list[dict[str, Any]] = field(default_factory=list)

    async def wait(self, number: int) -> list[dict[str, Any]]:
        """The messages taken, as soon as there are so many."""
        async with asyncio.timeout(60):
            while len(self.taken) < number:  # noqa: ASYNC110 - filled by another task
                await asyncio.sleep(0.01)
        return self.taken

    async def next(self) -> dict[str, Any]:
        """The message taken after the one that this gave last."""
        self.read += 1
        return (await self.wait(self.read))[self.read - 1]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open[writer] = task
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                content = json.loads(body)
                if self.secret:
                    ident, at = headers["webhook-id"], int(headers["webhook-timestamp"])
                    assert headers["webhook-signature"] == signature(base64.b64decode(self.secret[6:]), ident, at, body)
                status = self.answers.pop(0) if self.answers else self.always
                status = 413 if len(body) > self.most else status
                self.requests.append((head[0], headers, content))
                await self.answering.wait()
                if 200 <= status < 300 and content["type"] != "ping":
                    self.taken.append(content)
                extra = "Location: http://169.254.169.254/\r\n" if status == 302 else ""
                writer.write(f"HTTP/1.1 {status} X\r\n{extra}Content-Length: 0\r\n\r\n".encode())
                await writer.drain()
        del self.open[writer]
        writer.close()

    async def shut(self) -> None:
        """End what is open."""
        for writer, task in list(self.open.items()):
            task.cancel()
            writer.transport.abort()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def receiving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """One on the loopback address."""
    receiver = Receiver()
    receiver.answering.set()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?x=1"
    try:
        yield receiver
    finally:
        server.close()
        await receiver.shut()
