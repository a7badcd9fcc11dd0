"""The HTTP protocol of a collecting node: plain requests with events are taken here, all others by uvicorn.

As long as a connection sends only ``POST /v1/SOURCE HTTP/1.1`` with a ``Content-Length`` and known headers, its
requests are answered here. Any number of them may wait for their answers (pipelining, RFC 9112 §9.3.2). Answers go out
in order, as many in one write as are ready. From the first request of another kind on, uvicorn parses everything. So
only one parser ever judges a request that could be read in two ways: a request here has exactly one Content-Length, no
Transfer-Encoding, and no line that is folded or does not end with CR LF.

Heads repeat, so each distinct head is parsed once and then looked up. A single POST costs a quarter of what it costs
through uvicorn and Starlette (26 instead of 105 µs of CPU).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingest.errors import IngestError, LogFull, LogUnavailable, RequestRefused, problem_body
from ingest.intake import RequestIntake, presented_key
from ingest.log.segments import CommitGroup

MOST_WAITING = 1_000  # pending requests of one connection above which nothing is read
MAX_HEAD_BYTES = 16_384
HEAD_END = b"\r\n\r\n"
_MAX_WEB_HEAD_BYTES = 65_536  # of requests that uvicorn takes
_SMALL_BYTES = 65_536  # no memory is reserved for incoming bodies up to this size

_ACCEPTED = b"HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_NO_ANSWER = b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
_PROBLEM = b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n%b\r\n%b"

_BEGIN = b"POST /v1/"
_REQUEST_LINE = re.compile(rb"POST /v1/([A-Za-z0-9_]{1,63}) HTTP/1\.1")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?[ \t]*")
_PLAIN_HEADERS = frozenset(
    b"host user-agent accept accept-encoding accept-language content-type content-length authorization x-api-key "
    b"origin referer cache-control pragma traceparent x-request-id".split()
)
_KEEP_ALIVE = (b"keep-alive", b"")


class CollectorHttpProtocol(HttpToolsProtocol):
    """One connection; the limits of time are checked from outside, so a request costs no timer."""

    def __init__(self, requests: RequestIntake, **options: Any) -> None:
        super().__init__(**options)
        self._requests = requests
        self._gate = requests.gate
        self._plain = True  # every request so far
        self._counted = False
        self._buffer = bytearray()
        self._need = 0  # bytes in the buffer before the next attempt to parse
        self._reserved = 0  # bytes reserved for an incoming body
        self._answers: deque[tuple[tuple[CommitGroup, ...], bytes]] = deque()
        self._waits_for: CommitGroup | None = None
        self._held: frozenset[tuple[str, str]] = frozenset()
        self._paused = False
        self._writing = True
        self._handing = False
        self._closing = False
        self._deaf = False  # a request was refused before its body: incoming bytes are ignored
        self._head_bytes = 0  # of an incomplete head that uvicorn parses
        self._busy_since = 0.0  # a request is coming in
        self._idle_since = 0.0  # uvicorn limits the time between requests itself

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._idle_since = self.loop.time()
        self._counted = self._gate.connect()
        if not self._counted:
            self._closing = True
            refused = RequestRefused(
                "this node has too many connections", 503, code="too-many-connections", retry_after=1
            )
            self.transport.write(_render(refused))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._answers.clear()
        self._reserve(0)
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._plain:
            self._to_uvicorn(data)
            return
        if self._deaf:
            return
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need or self._handing or self._closing:
            return
        self._take_requests()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if not self._plain:
            return super().eof_received()
        self._closing = True
        return bool(self._answers)

    def pause_writing(self) -> None:
        """Read nothing while the client does not read its answers."""
        self._writing = False
        if self._plain:
            self._balance()
        else:
            super().pause_writing()

    def resume_writing(self) -> None:
        self._writing = True
        if self._plain:
            self._balance()
        else:
            super().resume_writing()

    def shutdown(self) -> None:
        """Take no further request, and close when the answers are out."""
        if not self._plain:
            super().shutdown()
            return
        self._closing = True
        if not self._answers and self.transport is not None:
            self.transport.close()

    def expire(self, request_s: float, idle_s: float) -> bool:
        """Close the connection if a request takes too long to come in (returns True), or if it was idle too long."""
        now = self.loop.time()
        late = bool(self._busy_since) and now - self._busy_since > request_s
        if late and self._plain and not self._answers and not self._deaf:
            self.transport.write(_render(RequestRefused("the request took too long to come in", 408), close=True))
        idle = not self._busy_since and self._idle_since and now - self._idle_since > idle_s
        if late or idle:
            self.transport.close()
        return late

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self._gate.disconnect(self._held)
            self._held = frozenset()

    # --- requests

    def _take_requests(self) -> None:
        buffer = self._buffer
        at, size = 0, len(buffer)
        self._need = 0
        if self._reserved:
            self._reserve(0)
        while at < size and not self._closing:
            end = buffer.find(HEAD_END, at, at + MAX_HEAD_BYTES)
            if end < 0:
                if size - at >= MAX_HEAD_BYTES:
                    self._closing = True
                    refused = RequestRefused(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)
                    self._answers.append(((), _render(refused, close=True)))
                elif not _BEGIN.startswith(bytes(buffer[at : at + len(_BEGIN)])):  # it cannot become a plain one
                    self._hand_over(at)
                    return
                break
            head = parse_head(bytes(buffer[at:end]))
            intake = None if head is None else self._requests.intakes.get(head.source)
            if head is None or (intake is not None and intake.border.source.respond):
                self._hand_over(at)
                return
            body = end + 4
            if size - body < head.length:
                if self._expect(head):
                    self._need = body - at + head.length
                break
            at = body + head.length
            with memoryview(buffer) as view:  # a slice of the buffer itself would be copied twice
                text = view[body:at].tobytes()
            self._take(head, text)
        if at:
            del buffer[:at]
        if buffer:
            if at or not self._busy_since:
                self._busy_since = self.loop.time()
            if self._deaf:
                buffer.clear()
        else:
            self._busy_since = 0.0
            self._idle_since = self.loop.time()
        self._settle()

    def _expect(self, head: Head) -> bool:
        """Whether a body that is incomplete may come; memory is reserved only for permitted senders."""
        if head.length <= _SMALL_BYTES:
            return True
        try:
            with suppress(LogUnavailable):  # the node may be ready when the body is complete
                self._requests.enter(head.source, head.kind, head.length, head.key)
            self._reserve(head.length)
        except RequestRefused as error:
            self._closing = self._deaf = True
            self._answers.append(((), _render(error, close=True)))
            return False
        return True

    def _reserve(self, size: int) -> None:
        self._gate.free(self._reserved)
        self._reserved = 0
        self._gate.reserve(size)
        self._reserved = size

    def _take(self, head: Head, body: bytes) -> None:
        try:
            intake, sender = self._requests.enter(head.source, head.kind, head.length, head.key)
            self._held = self._gate.hold(intake.border.source, sender, self._held)
            taken = self._requests.take(intake, sender, head.kind, body)
        except (RequestRefused, LogFull, LogUnavailable) as error:
            self._answers.append(((), _render(error)))
            return
        if taken.error is not None:
            answer = _render(taken.error)
        elif taken.answer:
            answer = _ACCEPTED % (len(taken.answer), taken.answer)
        else:
            answer = _NO_ANSWER
        self._answers.append((taken.groups, answer))

    # --- answers

    def _settle(self) -> None:
        """Write every answer that is due, in order, and wait for the group of the next one."""
        answers = self._answers
        out: list[bytes] = []
        while answers:
            groups, answer = answers[0]
            for group in groups:
                if not group.acknowledgeable:
                    break
            else:
                out.append(answer)
                answers.popleft()
                continue
            if self._waits_for is not group:
                self._waits_for = group
                group.then(self._group_closed)
            break
        if out:
            self.transport.write(b"".join(out))
        if not answers:
            if self._handing:
                self._give_away()
                return
            if self._closing:
                if self._deaf:  # closing now would reset the connection and lose the refusal (RFC 9112 §9.6)
                    with suppress(OSError):  # already closed
                        self.transport.write_eof()
                else:
                    self.transport.close()
                return
        self._balance()

    def _group_closed(self) -> None:
        self._waits_for = None
        if self._answers:
            self._settle()

    def _balance(self) -> None:
        """Read only while the client reads its answers and not too many are pending."""
        wanted = not self._writing or len(self._answers) >= MOST_WAITING or self._handing
        if wanted != self._paused and not self.transport.is_closing():
            self._paused = wanted
            if wanted:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # --- uvicorn

    def _hand_over(self, at: int) -> None:
        """Let uvicorn parse everything from byte ``at`` on, once earlier answers are out."""
        del self._buffer[:at]
        self._handing = True
        self._settle()

    def _give_away(self) -> None:
        rest, self._buffer = bytes(self._buffer), bytearray()
        self._plain = False
        if self._paused:
            self.transport.resume_reading()
        if not self._writing:
            super().pause_writing()
        self._gate.release(self._held)
        self._held = frozenset()
        self._busy_since, self._idle_since = self.loop.time(), 0.0
        self._to_uvicorn(rest)

    def _to_uvicorn(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_WEB_HEAD_BYTES and self._busy_since and self.parser is not None:
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self._busy_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = -(1 << 62)  # the body has its own limit
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._busy_since = 0.0
        self._head_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """The connection is now the WebSocket's, which has its own limits."""
        self._uncount()
        super().handle_websocket_upgrade()


def _render(error: IngestError, *, close: bool = False) -> bytes:
    status, body, headers = problem_body(error)
    if close:
        headers.append(("connection", "close"))
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
    return _PROBLEM % (status, HTTPStatus(status).phrase.encode(), len(body), extra, body)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a plain request.

    Attributes:
        kind: content type in lower case, without parameters.
        key: API key that was shown, or None.
    """

    source: str
    kind: str
    length: int
    key: str | None


@lru_cache(maxsize=4_096)
def parse_head(head: bytes) -> Head | None:
    """Parse the head of a plain request (without the empty line); None if it is not plain."""
    line, *lines = head.split(b"\r\n")
    target = _REQUEST_LINE.fullmatch(line)
    if target is None:
        return None
    found: dict[bytes, bytes] = {}
    for text in lines:
        match = _HEADER.fullmatch(text)
        if match is None:
            return None
        name, value = match[1].lower(), match[2] or b""
        if name in found:
            return None
        if name == b"connection":
            if value.lower() not in _KEEP_ALIVE:
                return None
        elif name not in _PLAIN_HEADERS:
            return None
        found[name] = value
    length = found.get(b"content-length", b"")
    if b"host" not in found or not length.isdigit() or len(length) > 10:
        return None
    kind = found.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    keys = [key for name, value in found.items() if (key := presented_key(name, value)) is not None]
    return Head(target[1].decode(), kind, int(length), keys[-1] if keys else None)
