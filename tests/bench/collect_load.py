"""The load client of ``make bench-collect``: raw sockets, in a process of its own, prints one JSON object.

Every connection keeps so many requests unanswered (pipelining), as a busy proxy or a batch of sensors does. The client
only times the answers; its own CPU is in no figure.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

PAD = "x" * 240


@dataclass(slots=True)
class Connection:
    """One keep-alive connection.

    Attributes:
        sock: non-blocking.
        out: bytes that the socket has not taken yet.
        rest: bytes of an answer that is not there in whole.
        sent: when each unanswered request was handed to the socket, and its events.
    """

    sock: socket.socket
    out: bytearray = field(default_factory=bytearray)
    rest: bytes = b""
    sent: list[tuple[float, int]] = field(default_factory=list)


def event(number: int) -> bytes:
    """An event of about 300 bytes."""
    return b'{"id":%d,"who":"visitor-%d","pad":"%s"}' % (number, number % 1_000, PAD.encode())


def request(first: int, batch: int) -> bytes:
    """A request with one event, or with a batch of them as lines."""
    body = event(first) if batch == 1 else b"\n".join(event(n) for n in range(first, first + batch)) + b"\n"
    kind = b"application/json" if batch == 1 else b"application/x-ndjson"
    head = b"POST /v1/clicks HTTP/1.1\r\nHost: bench\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


class Load:
    """Sends ``total`` events (in requests of ``batch``), at ``rate`` a second or as fast as they are answered."""

    def __init__(
        self, port: int, connections: int, depth: int, total: int, batch: int, first: int, rate: float
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = []
        for _ in range(connections):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            connection = Connection(sock)
            self._connections.append(connection)
            self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        self._depth = depth
        self._batch = batch
        self._rate = rate
        self._requests = [request(n, batch) for n in range(first, first + total, batch)]
        self._next = 0
        self.times: list[float] = []
        self.refused = 0

    def run(self) -> float:
        """Seconds from the first request to the last answer."""
        started = time.perf_counter()
        while len(self.times) < len(self._requests):
            due = len(self._requests)
            if self._rate:
                due = min(due, int((time.perf_counter() - started) * self._rate / self._batch) + 1)
            for connection in self._connections:
                self._fill(connection, due)
            for key, events in self._selector.select(0.001):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
        return time.perf_counter() - started

    def _fill(self, connection: Connection, due: int) -> None:
        while len(connection.sent) < self._depth and self._next < due:
            connection.out += self._requests[self._next]
            self._next += 1
            connection.sent.append((time.perf_counter(), self._batch))
        if connection.out:
            with suppress(BlockingIOError):
                del connection.out[: connection.sock.send(connection.out)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if self._selector.get_key(connection.sock).events != wanted:
            self._selector.modify(connection.sock, wanted, connection)

    def _read(self, connection: Connection) -> None:
        data = connection.sock.recv(1 << 20)
        if not data:
            raise ConnectionError("the collector closed the connection")
        data = connection.rest + data
        at = 0
        now = time.perf_counter()
        while (end := data.find(b"\r\n\r\n", at)) >= 0:
            place = data.find(b"content-length: ", at, end)
            body = end + 4 + int(data[place + 16 : data.find(b"\r", place)])
            if body > len(data):
                break
            self.refused += data[at + 9 : at + 12] != b"202"
            self.times.append(now - connection.sent.pop(0)[0])
            at = body
        connection.rest = data[at:]


def main() -> None:
    """``collect_load PORT CONNECTIONS DEPTH TOTAL BATCH FIRST RATE CORE``."""
    port, connections, depth, total, batch, first, rate, core = sys.argv[1:9]
    with suppress(OSError):
        os.sched_setaffinity(0, {int(core)})
    load = Load(int(port), int(connections), int(depth), int(total), int(batch), int(first), float(rate))
    took = load.run()
    times = sorted(load.times)
    print(
        json.dumps(
            {
                "seconds": took,
                "p50_ms": times[len(times) // 2] * 1e3,
                "p99_ms": times[len(times) * 99 // 100] * 1e3,
                "refused": load.refused,
            }
        )
    )


if __name__ == "__main__":
    main()
