"""What a fan-out costs on this machine at the least: a bare uvloop protocol that writes the same bytes to everybody.

``python -m tests.bench.fanout_floor PROGRAM SUBSCRIBERS SECONDS``, where PROGRAM is the compiled load client: no table,
no tail, no positions, no heartbeats. bench_fanout runs it first, so that its figures can be read on any machine, idle
or not. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from serve.core.messages import header

_RATE = 2.0
_PAD = "x" * 960


def message(seq: int) -> bytes:
    """About 1 KB with what the load client looks for."""
    text = b'{"seq":%d,"at":%d,"pad":"%s"}' % (seq, time.monotonic_ns(), _PAD.encode())
    return header(0x81, len(text)) + text


class Broadcast(asyncio.Protocol):
    """Answers whatever it is asked with an upgrade and a first message."""

    def __init__(self, all_of_them: list[asyncio.Transport]) -> None:
        self._all = all_of_them
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The request follows."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """The request; nothing else is listened to."""
        if not self._begun:
            self._begun = True
            self._transport.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + message(0))
            self._transport.set_write_buffer_limits(0)
            self._all.append(self._transport)


async def floor(program: str, subscribers: int, seconds: float) -> dict[str, float]:
    """The figures."""
    transports: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Broadcast(transports), "127.0.0.1", 0, backlog=4_096)
    port = server.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        delays = Path(folder) / "delays"
        words = ["127.0.0.1", str(port), str(subscribers), "0", "1", "websocket", "0", str(delays)]
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(program, *words, stdin=pipe, stdout=pipe)
        assert client.stdin is not None and client.stdout is not None
        await client.stdout.readline()
        client.stdin.write(b"count\n")
        await asyncio.sleep(0.5)
        cpu, rounds = time.process_time(), int(seconds * _RATE)
        for number in range(1, rounds + 1):
            due, data = loop.time() + 1 / _RATE, message(number)
            for transport in transports:
                transport.write(data)
            await asyncio.sleep(max(0.0, due - loop.time()))
        cpu = time.process_time() - cpu
        client.stdin.write(b"end %d\n" % rounds)
        await client.communicate()
        times = np.fromfile(delays, np.float32).reshape(-1, 2)[:, 1]
    p50, p99 = (round(float(each), 1) for each in np.percentile(times, [50, 99]))
    took = cpu / max(1, len(times)) * 1e6
    return {"subscribers": subscribers, "p50_ms": p50, "p99_ms": p99, "server_us_a_message": round(took, 1)}


if __name__ == "__main__":
    found = uvloop.run(floor(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.write(json.dumps(found) + "\n")
