"""The client of an upstream that sends JSON lines in a response without end (chunked HTTP): one line is one event.

With ``resume_param`` the upstream is asked for the line after the last one in the log (empty lines do not count);
without it a reconnect is reported as a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest.collectors import Place
from ingest.collectors.httpstream import open_stream, request_headers
from ingest.collectors.upstream import UpstreamClient
from ingest.source import Intake
from lakehouse.contract.collector import CollectorSpec

_KINDS = ("application/x-ndjson", "application/jsonl", "application/json", "application/json-seq", "text/plain")


def build(spec: CollectorSpec, place: Place) -> LinesCollector:
    """The collector that the pipeline declares."""
    return LinesCollector(
        place.url,
        place.intake,
        headers=request_headers(spec.headers, source=place.intake.border.source.name),
        resume_param=spec.resume_param,
        backoff_max_s=place.backoff_max_s,
    )


class LinesCollector(UpstreamClient):
    """Reads one upstream of JSON lines until cancelled.

    Args:
        headers: of the request.
        options: of :class:`UpstreamClient`.
    """

    def __init__(self, url: str, intake: Intake, *, headers: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(url, intake, **options)
        self._headers = dict(headers or {})

    async def _session(self) -> None:
        splitter = LineSplitter(self._most_bytes)
        async with open_stream(self._address(), {**self._headers, "Accept": _KINDS[0]}, kinds=_KINDS) as body:
            self._opened()
            async for chunk in body:
                for line in splitter.feed(chunk):
                    if line is None:
                        await self._skip_oversize("line")
                    else:
                        await self._received(line)


class LineSplitter:
    """Bytes in, lines out, without their line ends; empty ones are passed over. A cut-off last line is none.

    Args:
        max_bytes: bound of a line; a longer one comes out as None.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._rest: list[bytes] = []
        self._size = 0
        self._cut = False

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """The lines that this chunk completes."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        found: list[bytes | None] = []
        for piece in others:
            line = b"".join(self._rest).strip(b"\r \t")
            if self._cut:
                found.append(None)
            elif line:
                found.append(line)
            self._rest, self._size, self._cut = [], 0, False
            self._add(piece)
        return found

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max:
            self._cut, self._rest = True, []
        elif piece:
            self._rest.append(piece)
