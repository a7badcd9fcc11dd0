"""The publishers of ``make bench-publishers``: WebSockets in one process, driven line by line from its standard input.

Each line is a JSON object with a ``do``, and is answered by one on standard output:

``open``   so many further publishers connect to ``/v1/stream``; answered when all of them are
``send``   so many of them publish for so many seconds: at ``rate`` events a second together, or (0) each the next event
           as soon as the one before is acknowledged
``close``  all end

Frames are masked with zeros, as RFC 6455 allows: the mask is for browsers' sake, and costs the client what it measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any

import uvloop

from tests.bench.collect_load import event

HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
TEXT, PING, PONG = 1, 9, 10
OPENING = 200  # connections at a time


def frame(opcode: int, body: bytes) -> bytes:
    """A masked frame of less than 64 KiB."""
    size = len(body)
    small = size < 126
    head = struct.pack("!BB", 0x80 | opcode, 0x80 | size) if small else struct.pack("!BBH", 0x80 | opcode, 254, size)
    return head + b"\0\0\0\0" + body


class Publisher(asyncio.Protocol):
    """One connection.

    Attributes:
        opened: done once the node has taken it.
        times: seconds from each event to its acknowledgement.
        refused: events that were.
        waiting: when each unacknowledged event was sent.
        next_event: called after each acknowledgement; None: nothing follows by itself.
    """

    __slots__ = ("_buffer", "next_event", "opened", "refused", "times", "transport", "waiting")

    def __init__(self) -> None:
        self._buffer = b""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.times: list[float] = []
        self.refused = 0
        self.waiting: deque[float] = deque()
        self.next_event: Any = None
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Ask for a WebSocket."""
        self.transport = transport
        transport.write(HANDSHAKE)

    def connection_lost(self, exc: Exception | None) -> None:
        """The node has ended it."""
        if not self.opened.done():
            self.opened.set_exception(ConnectionError("the node refused a publisher"))

    def data_received(self, data: bytes) -> None:
        """Acknowledgements and pings."""
        data = self._buffer + data
        if not self.opened.done():
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return
            if b" 101 " not in data[:20]:
                self.transport.close()
                return
            self.opened.set_result(None)
            data = data[end + 4 :]
        at = 0
        while len(data) - at >= 2:
            size, start = data[at + 1], at + 2
            if size == 126:
                size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            if start + size > len(data):
                break
            self._take(data[at] & 15, data[start : start + size])
            at = start + size
        self._buffer = data[at:]

    def publish(self, number: int) -> None:
        """Send this event."""
        self.waiting.append(time.perf_counter())
        self.transport.write(frame(TEXT, b'{"publish":"clicks","id":%d,"event":%b}' % (number, event(number))))

    def _take(self, opcode: int, body: bytes) -> None:
        if opcode == PING:
            self.transport.write(frame(PONG, body))
        elif opcode == TEXT:
            self.refused += not body.startswith(b'{"ack"')
            self.times.append(time.perf_counter() - self.waiting.popleft())
            if self.next_event is not None:
                self.next_event(self)


class Crowd:
    """All publishers of the process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._all: list[Publisher] = []
        self._number = 0

    async def open(self, count: int) -> dict[str, Any]:
        """Connect."""
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        for first in range(0, count, OPENING):
            few = min(OPENING, count - first)
            made = await asyncio.gather(
                *(loop.create_connection(Publisher, "127.0.0.1", self._port) for _ in range(few))
            )
            await asyncio.gather(*(protocol.opened for _, protocol in made))
            self._all += [protocol for _, protocol in made]
        return {"open": len(self._all), "seconds": time.perf_counter() - started}

    async def send(self, publishers: int, seconds: float, rate: float) -> dict[str, Any]:
        """Publish, and wait until everything is acknowledged."""
        busy = self._all[-publishers:]
        for publisher in busy:
            publisher.times, publisher.refused = [], 0
        first, started = self._number, time.perf_counter()
        until = started + seconds
        if rate:
            order = random.Random(1)
            while (now := time.perf_counter()) < until:
                due = int((now - started) * rate)
                while self._number - first < due:
                    self._publish(order.choice(busy))
                await asyncio.sleep(0.002)
        else:
            for publisher in busy:
                publisher.next_event = lambda who: self._publish(who) if time.perf_counter() < until else None
                self._publish(publisher)
            await asyncio.sleep(seconds)
        while any(publisher.waiting for publisher in busy):  # noqa: ASYNC110 - cheaper than an event an answer
            await asyncio.sleep(0.001)
        took = time.perf_counter() - started
        for publisher in busy:
            publisher.next_event = None
        times = sorted(t for publisher in busy for t in publisher.times)
        return {
            "events": len(times),
            "seconds": took,
            "p50_ms": times[len(times) // 2] * 1e3,
            "p99_ms": times[len(times) * 99 // 100] * 1e3,
            "refused": sum(publisher.refused for publisher in busy),
        }

    def _publish(self, publisher: Publisher) -> None:
        publisher.publish(self._number)
        self._number += 1

    def close(self) -> None:
        """End every connection."""
        for publisher in self._all:
            publisher.transport.abort()


async def serve(port: int) -> None:
    """Do what the lines say."""
    crowd = Crowd(port)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        do = asked.pop("do")
        if do == "close":
            break
        found = await (crowd.open(**asked) if do == "open" else crowd.send(**asked))
        print(json.dumps(found), flush=True)
    crowd.close()


def main() -> None:
    """``publishers_load PORT CORE``."""
    port, core = sys.argv[1:3]
    with suppress(OSError):
        os.sched_setaffinity(0, {int(core)})
    uvloop.run(serve(int(port)))


if __name__ == "__main__":
    main()
