"""The client of a server-sent events upstream: each server-sent event is an event.

The client reconnects with the ``Last-Event-ID`` of the last event in the log. The id is stored with the event, and in
its Kafka headers as ``upstream_id``, so a crash resumes too. An upstream without ids, or with ids that no header can
carry, cannot resume: a reconnect is reported as a gap. ``retry:`` is honored, up to five minutes.

The parser follows the HTML standard (WHATWG, 9.2.6 "Interpreting an event stream"): a byte order mark at the start is
skipped; lines end with CR, LF or CRLF; a line that starts with a colon is a comment; ``data`` lines are joined by LF;
an ``id`` stays in force until the next one, and is ignored if it contains NUL; ``retry`` counts if it is all digits; an
event without ``data`` is none; an incomplete event at the end is dropped. Data stays bytes, even if not UTF-8: the
border judges it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingest.collectors import CollectorContext
from ingest.collectors.upstream import UpstreamClient, open_stream, request_headers
from ingest.intake import Intake
from lakehouse.contract.pipeline.source import CollectorSpec

MAX_ID_BYTES = 8_192
_MAX_RETRY_MS = 300_000
_FIELD_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")  # RFC 9110 §5.5
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


def build_sse(spec: CollectorSpec, context: CollectorContext) -> SseCollector:
    headers = request_headers(spec.headers, source=context.intake.border.source.name)
    return SseCollector(context.url, context.intake, headers=headers, backoff_max_s=context.backoff_max_s)


class SseCollector(UpstreamClient):
    """Reads one SSE upstream until cancelled.

    Args:
        headers: of the request.
        options: of :class:`UpstreamClient`.
    """

    def __init__(self, url: str, intake: Intake, *, headers: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(url, intake, **options)
        self._headers = dict(headers or {})

    @property
    def _resumes(self) -> bool:
        return _can_be_sent(self._lane.cursor or "")

    async def _session(self) -> None:
        headers = {**self._headers, "Accept": "text/event-stream", "Cache-Control": "no-store"}
        last_id = self._lane.cursor or ""
        if self._resumes:
            headers["Last-Event-ID"] = last_id
        parser = EventStreamParser(last_id, max_bytes=self._most_bytes)
        async with open_stream(self._url, headers, kinds=("text/event-stream",)) as body:
            self._opened()
            async for chunk in body:
                events = parser.feed(chunk)
                if parser.retry_ms is not None:
                    self._least_pause_s = min(parser.retry_ms, _MAX_RETRY_MS) / 1000
                for event in events:
                    await self._event(event)

    async def _event(self, event: ServerSentEvent) -> None:
        if event.oversize:
            await self._skip_oversize("server-sent event")
        elif _can_be_sent(event.id):
            await self._received_named(event.data, event.id)
        else:
            await self._received(event.data)


def _can_be_sent(name: str) -> bool:
    """Whether an event id can stand in a request header."""
    found = name.encode()
    return len(found) <= MAX_ID_BYTES and _FIELD_VALUE.fullmatch(found) is not None


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event.

    Attributes:
        data: lines joined by LF.
        type: ``message`` by default.
        id: last event id, or empty.
        oversize: the data exceeded the limit and is missing.
    """

    data: bytes
    type: str = "message"
    id: str = ""
    oversize: bool = False


class EventStreamParser:
    """Parses a stream in chunks, without I/O.

    Args:
        last_id: last event id of the previous connection, which stays in force.
        max_bytes: limit of an event's data and of a line.

    Attributes:
        retry_ms: pause before a reconnect that the stream asked for, or None.
        last_id: the id in force after the last complete event.
    """

    def __init__(self, last_id: str = "", *, max_bytes: int = 16 * 1024 * 1024) -> None:
        self.retry_ms: int | None = None
        self.last_id = last_id
        self._max = max_bytes
        self._begun = False
        self._after_cr = False
        self._head = b""  # start of the stream while it may be a byte order mark
        self._rest: list[bytes] = []  # of a line
        self._rest_bytes = 0
        self._cut = False  # the line is too long: the rest is skipped
        self._id = last_id
        self._type = b""
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._oversize = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that this chunk completes."""
        chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")  # the LF of a CRLF that two chunks share
        found: list[ServerSentEvent] = []
        at = 0
        for end in _LINE_END.finditer(chunk):
            event = self._line(self._whole(chunk[at : end.start()]))
            if event is not None:
                found.append(event)
            at = end.end()
        if chunk.endswith(b"\r"):
            self._after_cr = True
        self._keep(chunk[at:])
        return found

    def _without_bom(self, chunk: bytes) -> bytes:
        if self._begun:
            return chunk
        chunk, self._head = self._head + chunk, b""
        if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
            self._head = chunk
            return b""
        self._begun = True
        return chunk.removeprefix(_BOM)

    def _keep(self, piece: bytes) -> None:
        if self._rest_bytes + len(piece) > self._max:
            self._cut = True
            self._rest = self._rest or [piece[:6]]  # enough to identify the field
            return
        if piece:
            self._rest.append(piece)
            self._rest_bytes += len(piece)

    def _whole(self, piece: bytes) -> bytes:
        """The line that ends with this piece."""
        if not self._rest and not self._cut and len(piece) <= self._max:
            return piece
        self._keep(piece)
        line = b"".join(self._rest)
        if self._cut:
            self._oversize |= line.startswith(b"data")
            line = b":"
        self._rest, self._rest_bytes, self._cut = [], 0, False
        return line

    def _line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        field, colon, value = line.partition(b":")
        if colon and not field:
            return None
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max + 1:
                self._oversize, self._data = True, []
            else:
                self._data.append(value)
        elif field == b"event":
            self._type = value
        elif field == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit():
            self.retry_ms = int(value[:12])
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        self.last_id = self._id
        data, kind, oversize = self._data, self._type, self._oversize
        self._data, self._data_bytes, self._type, self._oversize = [], 0, b"", False
        if oversize:
            return ServerSentEvent(b"", kind.decode("utf-8", "replace") or "message", self.last_id, oversize=True)
        joined = b"\n".join(data)
        # The standard drops an event whose data buffer is empty: no data line at all. One empty line makes "\n".
        if not data:
            return None
        return ServerSentEvent(joined, kind.decode("utf-8", "replace") or "message", self.last_id)
