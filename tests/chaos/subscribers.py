"""Subscribers that share no code with the product: WebSocket, SSE and webhooks, as the protocol's page describes them.

Each holds the rows of one table as it was told of them, and notes what must not be: a change that does not begin where
the last one ended, a counter that falls, a row that goes away.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import random
from collections import Counter
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

log = logging.getLogger(__name__)

SILENT_S = 20.0  # of a server that sends a heartbeat every five
PAUSE_S = 0.3


class Mirror:
    """Rows of a table, from its messages.

    Attributes:
        name: for the report.
        rows: by key.
        position: of the last message that was applied whole; None: none yet.
        faults: what must not be, by kind: ``lost`` (a gap), ``out_of_order`` (a counter fell), ``twice`` (a row was
            deleted, and nothing deletes here).
        seen: messages by type.
    """

    def __init__(self, name: str, counter: str) -> None:
        self.name = name
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.position: str | None = None
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._counter = counter
        self._key: list[str] = []
        self._known: set[str] = set()
        self._draft: dict[tuple[Any, ...], dict[str, Any]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Apply a message."""
        kind = message["type"]
        self.seen[kind] += 1
        if kind == "snapshot":
            self._snapshot(message)
        elif kind == "change":
            self._change(message)

    def _snapshot(self, message: dict[str, Any]) -> None:
        self._key = message["key"]
        if message["first"]:
            self._draft = {}
        self._draft |= {self._name(row): row for row in message["rows"]}
        if message["last"]:
            for name, row in self.rows.items():
                if self._draft.get(name, {self._counter: 0})[self._counter] < row[self._counter]:
                    self.faults["out_of_order"] += 1
            self.rows = self._draft
            self._at(message["position"])

    def _change(self, message: dict[str, Any]) -> None:
        if message["position"] in self._known:
            return  # at least once on the wire
        if message["after"] != self.position:
            self.faults["lost"] += 1
            log.error("%s: a change after %s, but this is at %s", self.name, message["after"], self.position)
        for row in message["upserts"]:
            before = self.rows.get(self._name(row))
            if before is not None and row[self._counter] < before[self._counter]:
                self.faults["out_of_order"] += 1
            self.rows[self._name(row)] = row
        for row in message["deletes"]:
            self.faults["twice"] += 1
            self.rows.pop(self._name(row), None)
        self._at(message["position"])

    def _name(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[column] for column in self._key)

    def _at(self, position: str) -> None:
        self.position = position
        self._known.add(position)


async def by_websocket(mirror: Mirror, port: int, table: str) -> None:
    """Follow a table for ever, from the mirror's position."""
    while True:
        url = f"ws://127.0.0.1:{port}/v1/subscribe?table={table}"
        with contextlib.suppress(OSError, WebSocketException, TimeoutError):
            async with connect(f"{url}&from={mirror.position}" if mirror.position else url) as connection:
                while True:
                    async with asyncio.timeout(SILENT_S):
                        mirror.take(json.loads(await connection.recv()))
        await asyncio.sleep(PAUSE_S)


async def by_sse(mirror: Mirror, port: int, table: str) -> None:
    """The same as an EventSource does it: what is not ``data:`` is passed over, the last id is shown again."""
    timeout = httpx.Timeout(SILENT_S)
    async with httpx.AsyncClient(timeout=timeout, headers={"Accept": "text/event-stream"}) as client:
        while True:
            headers = {"Last-Event-ID": mirror.position} if mirror.position else {}
            with contextlib.suppress(httpx.HTTPError):
                url = f"http://127.0.0.1:{port}/v1/subscribe?table={table}"
                async with client.stream("GET", url, headers=headers) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data:"):
                            mirror.take(json.loads(line[5:]))
            await asyncio.sleep(PAUSE_S)


class Hook:
    """Receiver of a webhook: checks each signature, refuses some calls, and leaves some without an answer.

    Attributes:
        calls: what became of them.
    """

    def __init__(self, mirror: Mirror, chance: random.Random) -> None:
        self.calls: Counter[str] = Counter()
        self._mirror = mirror
        self._chance = chance
        self._secret = b""
        self._done: set[str] = set()

    async def run(self, port: int, table: str) -> None:
        """Register, then take calls for ever."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with server:
            await self._register(port, {"table": table, "url": url})
            await server.serve_forever()

    async def _register(self, port: int, wanted: dict[str, str]) -> None:
        async with httpx.AsyncClient() as client:
            while not self._secret:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.post(f"http://127.0.0.1:{port}/v1/webhooks", json=wanted)
                    if answer.status_code == 201:
                        self._secret = base64.b64decode(answer.json()["secret"].removeprefix("whsec_"))
                await asyncio.sleep(PAUSE_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in head[1:] if line)}
                body = await reader.readexactly(int(headers["content-length"]))
                status = self._answer(headers, body)
                if not status:
                    break
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
                await writer.drain()
        writer.close()

    def _answer(self, headers: dict[str, str], body: bytes) -> int:
        """Status; 0: none."""
        lot = self._chance.random()
        if not self._secret or lot < 0.05:
            self.calls["refused"] += 1
            return 503
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        mark = base64.b64encode(hmac.new(self._secret, signed, hashlib.sha256).digest()).decode()
        if not hmac.compare_digest(headers["webhook-signature"], f"v1,{mark}"):
            self.calls["forged"] += 1
            return 401
        if headers["webhook-id"] not in self._done:
            self._done.add(headers["webhook-id"])
            self._mirror.take(json.loads(body))
        unanswered = lot < 0.08
        self.calls["unanswered" if unanswered else "taken"] += 1
        return 0 if unanswered else 204
