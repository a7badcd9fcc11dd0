"""A collector in a process of its own, and senders that note what was acknowledged, by every way into it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import random
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from jobs.local.stack import free_port
from tests.ingest.conftest import event, eventually
from tests.ingest.conftest import request as ask

log = logging.getLogger(__name__)

NODE = """
import asyncio, dataclasses, logging, resource, sys
logging.disable()
from pathlib import Path
from ingest.node import CollectorNode
from tests.ingest.conftest import pipeline_of, settings_of
folder, bootstrap, topic, port, log_bytes, file_bytes = sys.argv[1:]
if int(file_bytes):
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the bound then fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(file_bytes), resource.RLIM_INFINITY))
settings = settings_of(Path(folder), bootstrap, log_bytes=int(log_bytes))
collect = dataclasses.replace(settings.collect, port=int(port))
settings = dataclasses.replace(settings, collect=collect)
async def main():
    await CollectorNode(settings, pipeline_of(topic, "http")).run(asyncio.Event())
asyncio.run(main())
"""
PIPELINE = """
[sources.clicks]
topic = "TOPIC"
schema = "id BIGINT, who STRING"
event_id = "{id}"
event_time = "received_at"
key = "{who}"

[[sources.clicks.collectors]]
kind = "http"

[products.per_who]
layer = "gold"
source = "clicks"
sql = '''
SELECT window.start AS window_start, who, count(*) AS n, sum(id) AS total
FROM clicks GROUP BY window(event_time, '1 hour'), who
'''
"""
"""What the senders' source is, on the topic TOPIC, and a product that counts and sums its events by sender."""
LOG_BYTES = 64 * 1024 * 1024
KEYS = 7
WAYS = ("single", "ndjson", "stream")
MOST = 50  # events of one request, or under way on one connection


class Senders:
    """Senders of one source, which note what they were told.

    Each key has one sender and one of :data:`WAYS` into the collector. It sends one or several events at a time, those
    that were not acknowledged again, and only then the next: so the order of first appearance within a key is known
    whatever happens.

    Args:
        port: of the collector, or of a link to it.
        pause_s: of each sender after what was acknowledged.

    Attributes:
        acknowledged: numbers of the events whose senders were told that they are safe, in any order.
        sent: how often each event was sent, at most.
        by_way: acknowledged events by way.
        refused: requests that were told to come back later.
    """

    def __init__(self, port: int, *, pause_s: float = 0.0) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._pause_s = pause_s
        self.acknowledged: list[int] = []
        self.sent: Counter[int] = Counter()
        self.by_way: Counter[str] = Counter()
        self.refused = 0
        self._stopping = False

    async def more(self, count: int) -> None:
        """Return when so many more events were acknowledged."""
        wanted = len(self.acknowledged) + count
        await eventually(lambda: len(self.acknowledged) >= wanted, 120)

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        senders = [asyncio.create_task(self._send(key)) for key in range(KEYS)]
        try:
            yield
        finally:
            self._stopping = True
            async with asyncio.timeout(120):
                await asyncio.gather(*senders)

    async def _send(self, key: int) -> None:
        way, chance, number = WAYS[key % len(WAYS)], random.Random(key), key
        async with self._sender(way) as send:
            while not self._stopping:
                end = number + KEYS * (1 if way == "single" else chance.randint(1, MOST))
                left = list(range(number, end, KEYS))
                while left:
                    self.sent.update(left)
                    safe = await send(left)
                    self.acknowledged += left[:safe]
                    self.by_way[way] += safe
                    left = left[safe:]
                    if left:
                        await asyncio.sleep(0.02)
                number = end
                await asyncio.sleep(self._pause_s)

    @contextlib.asynccontextmanager
    async def _sender(self, way: str) -> AsyncIterator[Callable[[list[int]], Awaitable[int]]]:
        """Sends events in order; gives how many of them, from the first on, are acknowledged."""
        if way == "stream":
            stream = Stream(self.port)
            yield stream.publish
            self.refused += stream.refused
            await stream.close()
        else:
            yield self._post

    async def _post(self, numbers: list[int]) -> int:
        kind = "application/json" if len(numbers) == 1 else "application/x-ndjson"
        body = b"\n".join(event(number) for number in numbers)
        try:
            status, _, _ = await ask(self.url, "POST", "/v1/clicks", body, content_type=kind)
        except (OSError, http.client.HTTPException, ValueError) as error:  # or an answer that is cut off
            log.debug("%s", error)
            return 0
        self.refused += status in (429, 503)
        return len(numbers) if status == 202 else 0


class Rig(Senders):
    """The collector in a process of its own, and its senders.

    Args:
        folder: of the collector's log.
        bootstrap: of its broker.
        topic: that it fills.
        file_bytes: no file of its may grow beyond this; 0: any size.
        log_bytes: bound of its log.
    """

    def __init__(
        self,
        folder: Path,
        bootstrap: str,
        topic: str,
        *,
        file_bytes: int = 0,
        log_bytes: int = LOG_BYTES,
    ) -> None:
        super().__init__(free_port())
        self._arguments = [str(folder), bootstrap, topic, str(self.port), str(log_bytes), str(file_bytes)]
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.child = await asyncio.create_subprocess_exec(sys.executable, "-c", NODE, *self._arguments)

    @property
    def resident_mb(self) -> float:
        """Memory of the collector."""
        assert self.child is not None
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024

    async def kill(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.kill()
            await self.child.wait()

    def allow(self) -> None:
        """The disk has room again."""
        assert self.child is not None
        resource.prlimit(self.child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Stream:
    """Publishes on one connection, which is made again where it ended.

    Attributes:
        refused: events that were.
    """

    def __init__(self, port: int) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/stream"
        self._connection: ClientConnection | None = None
        self.refused = 0

    async def publish(self, numbers: list[int]) -> int:
        """Publish them all, then read their acknowledgements; gives how many came."""
        safe = 0
        try:
            if self._connection is None:
                self._connection = await connect(self._url, compression=None)
            for number in numbers:
                await self._connection.send(f'{{"publish":"clicks","id":{number},"event":{event(number).decode()}}}')
            for number in numbers:
                answer = json.loads(await self._connection.recv())
                if answer.get("ack") != number:
                    self.refused += 1
                    raise ConnectionError(answer)
                safe += 1
        except (OSError, WebSocketException) as error:
            log.debug("%s", error)
            await self.close()
        return safe

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
