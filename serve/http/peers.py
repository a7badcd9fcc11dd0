"""The server processes of one port as peers: each can ask the others for what only they know.

Each listens on a loopback port of its own, noted in ``LAKE/_millrace/run/peers``, which only its owner can read. A
request is one line: JSON with the time, and its HMAC by a secret that the lake's processes share. The answer is another
line. Peers end statements and gather metrics; the hot path does not use them. A peer that answers too late is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_PATIENCE_S = 2.0
_MOST_BYTES = 16_777_216  # of an answer
_MOST_ASKED = 65_536  # bytes of a request
_FRESH_S = 10.0  # so that an overheard request cannot be replayed later
_MAC_CHARS = 64

Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class Peers:
    """One process among its peers.

    Args:
        folder: of the notes.
        name: of this process, e.g. ``serve-1``.
        secret: shared by the processes of the lake.
        answers: functions by name that peers may call, JSON in and out.
    """

    def __init__(self, folder: Path, name: str, secret: bytes, answers: Mapping[str, Answer]) -> None:
        self.name = name
        self._folder = folder
        self._secret = secret
        self._answers = answers
        self._note = folder / f"{name}-{os.getpid()}.json"

    async def run(self) -> None:
        """Answer other processes until cancelled."""
        server = await asyncio.start_server(self._serve, _HOST, 0, limit=_MOST_ASKED)
        try:
            port = server.sockets[0].getsockname()[1]
            await asyncio.to_thread(self._write, orjson.dumps({"name": self.name, "port": port}))
            await server.serve_forever()
        finally:
            self._note.unlink(missing_ok=True)
            server.close()

    async def ask(self, what: str, **content: Any) -> dict[str, Any]:
        """Answers of the other processes by their names."""
        notes = await asyncio.to_thread(self._others)
        found = await asyncio.gather(*(self._ask(path, port, {"ask": what, **content}) for path, _, port in notes))
        return {name: answer for (_, name, _), answer in zip(notes, found, strict=True) if answer is not None}

    def _write(self, note: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._note.write_bytes(note)

    def _others(self) -> list[tuple[Path, str, int]]:
        found = []
        for path in sorted(self._folder.glob("*.json")):
            if path != self._note:
                with contextlib.suppress(OSError, ValueError, KeyError):  # it is being written or removed
                    note = orjson.loads(path.read_bytes())
                    found.append((path, str(note["name"]), int(note["port"])))
        return found

    async def _ask(self, note: Path, port: int, content: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_connection(_HOST, port, limit=_MOST_BYTES)
                try:
                    writer.write(self._signed(orjson.dumps({**content, "at": time.time()})))
                    await writer.drain()
                    return orjson.loads(await reader.readline())
                finally:
                    writer.close()
        except ConnectionRefusedError:  # it was killed
            await asyncio.to_thread(note.unlink, missing_ok=True)
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("peer %s does not answer: %s", note.stem, error)
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                line = await reader.readline()
                body = line[_MAC_CHARS:-1]
                if hmac.compare_digest(line, self._signed(body)):
                    asked = orjson.loads(body)
                    answer = self._answers.get(asked.pop("ask"))
                    if abs(time.time() - asked.pop("at")) <= _FRESH_S and answer is not None:
                        writer.write(orjson.dumps(await answer(asked)) + b"\n")
                        await writer.drain()
        writer.close()

    def _signed(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, "sha256").hex().encode() + body + b"\n"


class _Gathered(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Metrics of several processes as one text; each sample gets the label ``process``, the key in ``texts``."""
    families: dict[str, Metric] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.samples.append(sample._replace(labels={**sample.labels, "process": process}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gathered(families))
    return generate_latest(registry)
