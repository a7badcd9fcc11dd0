"""The load client of bench_fanout where there is no C compiler: ``fanout_load.c`` in Python, which says what it takes.

A process of its own, on epoll, doing as little as possible a message; times are of CLOCK_MONOTONIC, which all processes
of a machine share.
"""

from __future__ import annotations

import array
import json
import resource
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

_SEQ, _AT = b'"seq":', b'"at":'
_PONG_MASK = b"\x00\x00\x00\x00"


class Subscriber:
    """One connection: what it has seen, and what of a message has not come whole."""

    __slots__ = ("missed", "repeated", "rest", "seen", "sock", "upgraded")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""
        self.upgraded = False
        self.seen = -1
        self.missed = 0
        self.repeated = 0


class Load:
    """All subscribers of this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.sse = options["transport"] == "sse"
        self.poll = select.epoll()
        self.subscribers: dict[int, Subscriber] = {}
        self.delays = array.array("f")  # in turn: number of the change, ms
        self.delivered = 0
        self.closed = 0
        self.snapshots = 0
        self.counting = False
        self.cpu_before = 0.0
        self.take = self._take_events if self.sse else self._take_frames

    def connect(self) -> None:
        """Open every connection, a few hundred at a time, and wait for their snapshots."""
        total = self.options["subscribers"]
        opened = 0
        while self.snapshots < total:
            while opened < total and opened - self.snapshots < 200:
                self._open(opened)
                opened += 1
            self.turn(1.0)
            if self.closed:
                raise SystemExit(f"{self.closed} connections were closed before the start")

    def _open(self, number: int) -> None:
        filters = self.options["filters"]
        target = "/v1/subscribe?table=fan"
        if filters > 1:
            where = f"part = 'p{(self.options['first'] + number) % filters}'"
            target += "&where=" + quote(where)
        sock = socket.create_connection((self.options["host"], self.options["port"]))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if number < self.options["stopped"]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        how = (
            "Accept: text/event-stream\r\n"
            if self.sse
            else "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        )
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: {self.options['host']}\r\n{how}\r\n".encode())
        sock.setblocking(False)
        self.subscribers[sock.fileno()] = Subscriber(sock)
        self.poll.register(sock.fileno(), select.EPOLLIN)

    def stop_some(self) -> None:
        """The first ones read no more."""
        for subscriber in list(self.subscribers.values())[: self.options["stopped"]]:
            self.poll.unregister(subscriber.sock.fileno())

    def turn(self, timeout: float) -> None:
        """Read whatever is there."""
        for number, _ in self.poll.poll(timeout, 512):
            subscriber = self.subscribers[number]
            try:
                data = subscriber.sock.recv(262_144)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self.closed += 1
                self.poll.unregister(number)
                continue
            now = time.monotonic_ns()
            if subscriber.rest:
                data = subscriber.rest + data
            if not subscriber.upgraded:
                head, found, data = data.partition(b"\r\n\r\n")
                if not found:
                    subscriber.rest = head
                    continue
                if not head.startswith((b"HTTP/1.1 101", b"HTTP/1.1 200")):
                    raise SystemExit(head.decode(errors="replace") + data.decode(errors="replace"))
                subscriber.upgraded = True
            subscriber.rest = self.take(subscriber, data, now)

    def _take_frames(self, subscriber: Subscriber, data: bytes, now: int) -> bytes:
        at, size = 0, len(data)
        while size - at >= 2:
            length, start = data[at + 1], at + 2
            if length == 126:
                if size - at < 4:
                    break
                length, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            elif length == 127:
                if size - at < 10:
                    break
                length, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
            end = start + length
            if end > size:
                break
            opcode = data[at] & 15
            if opcode == 9:
                subscriber.sock.send(b"\x8a" + bytes([0x80 | length]) + _PONG_MASK + data[start:end])
            elif opcode == 8:
                self.closed += 1
            else:
                self._message(subscriber, data, start, end, now)
            at = end
        return data[at:]

    def _take_events(self, subscriber: Subscriber, data: bytes, now: int) -> bytes:
        at = 0
        while (end := data.find(b"\n\n", at)) >= 0:
            self._message(subscriber, data, at, end, now)
            at = end + 2
        return data[at:]

    def _message(self, subscriber: Subscriber, data: bytes, start: int, end: int, now: int) -> None:
        place = data.find(_SEQ, start, end)
        if place < 0:
            return  # a heartbeat, or a change without a row for this subscriber
        seq = _number(data, place + len(_SEQ))
        if subscriber.seen < 0:
            self.snapshots += 1
        elif self.counting:
            self.delivered += 1
            delay = (now - _number(data, data.find(_AT, start, end) + len(_AT))) / 1e6
            self.delays.extend((seq, delay))
        if subscriber.seen >= 0:
            if seq <= subscriber.seen:
                subscriber.repeated += 1
            else:
                subscriber.missed += seq - subscriber.seen - 1
        subscriber.seen = max(seq, subscriber.seen)

    def result(self, last: int) -> dict[str, Any]:
        """Totals; ``last`` is the number of the last change, which every reader must have."""
        reading = list(self.subscribers.values())[self.options["stopped"] :]
        return {
            "delivered": self.delivered,
            "lost": sum(s.missed + max(0, last - s.seen) for s in reading),
            "twice": sum(s.repeated for s in reading),
            "closed": self.closed,
            "cpu_s": time.process_time() - self.cpu_before,
        }


def _number(data: bytes, start: int) -> int:
    end = start
    while 48 <= data[end] <= 57:
        end += 1
    return int(data[start:end])


def main() -> None:
    host, port, subscribers, first, filters, transport, stopped, file = sys.argv[1:]
    options: dict[str, Any] = {"host": host, "port": int(port), "transport": transport, "filters": int(filters)}
    options |= {"subscribers": int(subscribers), "first": int(first), "stopped": int(stopped)}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(options)
    load.connect()
    load.stop_some()
    print("ready", flush=True)
    commands = select.poll()
    commands.register(sys.stdin.fileno(), select.POLLIN)
    last = 0
    while True:
        load.turn(0.05)
        if commands.poll(0):
            words = sys.stdin.readline().split()
            if words[:1] == ["count"]:
                load.counting, load.cpu_before = True, time.process_time()
            elif words[:1] == ["end"]:
                last = int(words[1])
                break
    deadline = time.monotonic() + 20
    reading = list(load.subscribers.values())[options["stopped"] :]
    while time.monotonic() < deadline and any(s.seen < last for s in reading):
        load.turn(0.05)
    Path(file).write_bytes(load.delays.tobytes())
    sys.stdout.write(json.dumps(load.result(last)) + "\n")


if __name__ == "__main__":
    main()
