"""Look-ups of a visitor's whole session by HTTP; ``make bench-lookup ARGS="--seconds 10"``.

A real Delta table of visits, ``millrace serve`` as it is, and an open-loop client on a few kept connections: times run
from when the request was due, so that one that waits for its turn counts as slow. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import uvloop
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract import lake as names
from tests.bench.bench_fanout import Server

_ACTION = pa.struct(
    [("at", pa.int64()), ("action_id", pa.int64()), ("kind", pa.string()), ("page", pa.string()), ("sku", pa.string())]
)
SCHEMA = pa.schema(
    [
        ("visitor", pa.string()),
        ("session_start", pa.int64()),
        ("views", pa.int64()),
        ("recent", pa.list_(_ACTION)),
        ("cart", pa.list_(_ACTION)),
    ]
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=1_000, help="look-ups a second")
    parser.add_argument("--visitors", type=int, default=20_000, help="with two sessions each")
    parser.add_argument("--actions", type=int, default=50, help="in a session, a fifth of them in the cart")
    parser.add_argument("--connections", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        visits(Path(folder) / "gold" / "visits", options.visitors, options.actions)
        server = Server(Path(folder), 0)
        try:
            found = uvloop.run(load(server, options))
        finally:
            server.stop()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["wrong"] == 0 else 1


def visits(folder: Path, visitors: int, actions: int) -> None:
    """Two sessions of each visitor."""
    folder.mkdir(parents=True)
    DeltaTable.create(
        folder, SCHEMA, configuration={names.PROPERTY_KEY: "visitor,session_start"}, raise_if_key_not_exists=False
    )
    kinds = ("view", "view", "add", "view", "view")
    recent = [
        {"at": 1_800_000_000_000 - n, "action_id": n, "kind": kinds[n % 5], "page": "product", "sku": f"s{n}"}
        for n in range(actions)
    ]
    cart = [action for action in recent if action["kind"] == "add"]
    for session in (1, 2):
        for first in range(0, visitors, 5_000):
            who = [f"v{number}" for number in range(first, min(visitors, first + 5_000))]
            rows = len(who)
            columns = [who, [session] * rows, [3] * rows, [recent] * rows, [cart] * rows]
            write_deltalake(folder, pa.table(columns, schema=SCHEMA), mode="append")


async def load(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, then ask at the rate; times in ms. ``late_p99_ms`` is how late this client itself was in asking."""
    address = urlsplit(server.url)
    idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    for _ in range(options.connections):
        idle.put_nowait(await asyncio.open_connection(address.hostname, address.port))
    whole = 2 * (options.actions + len(range(2, options.actions, 5)))
    times: list[float] = []
    late: list[float] = []
    wrong = 0

    async def ask(due: float) -> None:
        nonlocal wrong
        reader, writer = connection = await idle.get()
        late.append((time.monotonic() - due) * 1000)
        visitor = random.randrange(options.visitors)
        writer.write(f"GET /v1/tables/visits/v{visitor} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        body = await reader.readexactly(size)
        idle.put_nowait(connection)
        times.append((time.monotonic() - due) * 1000)
        wrong += b" 200 " not in head[:16] or body.count(b'"action_id"') != whole

    async def play(seconds: float) -> None:
        began, asked = time.monotonic(), []
        for number in range(int(seconds * options.rate)):
            due = began + number / options.rate
            if (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            asked.append(asyncio.create_task(ask(due)))
        await asyncio.gather(*asked)

    await play(2.0)
    times.clear()
    late.clear()
    wrong = 0
    began, cpu = time.monotonic(), server.cpu_s()
    await play(options.seconds)
    took, cpu = time.monotonic() - began, server.cpu_s() - cpu
    p50, p99 = (round(float(each), 2) for each in np.percentile(times, [50, 99]))
    return {
        "lookups_s": round(len(times) / took),
        "p50_ms": p50,
        "p99_ms": p99,
        "late_p99_ms": round(float(np.percentile(late, 99)), 2),
        "server_us_a_lookup": round(cpu / len(times) * 1e6),
        "wrong": wrong,
        "visitors": options.visitors,
        "actions": options.actions,
    }


if __name__ == "__main__":
    sys.exit(main())
