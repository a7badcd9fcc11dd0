"""The hot path of HTTP: plain requests with events are taken here, below the web server, on the same port.

Every connection begins here. As long as it sends only ``POST /v1/SOURCE HTTP/1.1`` with a ``Content-Length`` and known
headers, its requests are answered here. Any number of them may wait for their answers (pipelining, RFC 9112 §9.3.2).
Answers go out in order, as many in one write as are ready. With the first request of another kind the connection moves
to the web server for good, from that request's first byte on. So only one parser ever judges a request that could be
read in two ways: a request here has exactly one Content-Length, no Transfer-Encoding, and no line that is folded or
does not end with CR LF.

Heads repeat, so each distinct head is parsed once and then looked up. A client that sends slowly, or nothing, is cut
off; one check a second covers all connections, so a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingest.border.access import SenderGate
from ingest.errors import TITLES, EventRefused, IngestError, LogFull, LogUnavailable, problem_body
from ingest.intake import AdmittedRequest, RequestIntake, presented_key
from ingest.log.events import CommitGroup

logger = logging.getLogger(__name__)

MOST_WAITING = 1_000  # pending requests of one connection above which nothing is read
MAX_HEAD_BYTES = 16_384
HEAD_END = b"\r\n\r\n"
_MAX_FALLBACK_HEAD_BYTES = 65_536  # of requests that the web server takes
_SMALL_BYTES = 65_536  # no memory is reserved for incoming bodies up to this size
_CHECK_S = 1.0  # between two checks of the time limits

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

TimedConnection: TypeAlias = "EventPostProtocol | TimedHttpProtocol"


class EventPostProtocol(asyncio.Protocol):
    """One connection.

    Args:
        requests: takes its requests.
        connections: of the server.
        fallback: makes the web server's protocol.
        registry: the web server's set of connections.
    """

    __slots__ = (
        "_answers", "_buffer", "_closing", "_connections", "_deaf", "_fallback", "_handing", "_held", "_need",
        "_paused", "_registry", "_requests", "_reserved", "_transport", "_waits_for", "_writing", "busy_since",
        "idle_since",
    )  # fmt: skip

    def __init__(
        self,
        requests: RequestIntake,
        connections: Connections,
        fallback: Callable[[], asyncio.Protocol],
        registry: set[Any],
    ) -> None:
        self._requests = requests
        self._connections = connections
        self._fallback = fallback
        self._registry = registry
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
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
        self.busy_since = 0.0
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._registry.add(self)
        self.idle_since = self._connections.now()
        if not self._connections.add(self):
            refused = EventRefused(
                "this node has too many connections", 503, code="too-many-connections", retry_after=1
            )
            self._transport.write(_render(refused))
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._answers.clear()
        self._registry.discard(self)
        self._reserve(0)
        self._connections.discard(self, self._held)
        self._held = frozenset()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need or self._handing or self._closing:
            return
        self._take_requests()

    def eof_received(self) -> bool:
        self._closing = True
        return bool(self._answers)

    def pause_writing(self) -> None:
        """Read nothing while the client does not read its answers."""
        self._writing = False
        self._balance()

    def resume_writing(self) -> None:
        self._writing = True
        self._balance()

    def shutdown(self) -> None:
        """Take no further request, and close when the answers are out."""
        self._closing = True
        if not self._answers and self._transport is not None:
            self._transport.close()

    def expire(self, *, late: bool) -> None:
        """Close: a request took too long (``late``), or the connection was idle for too long."""
        if late and not self._answers and not self._deaf:
            self._transport.write(_render(EventRefused("the request took too long to come in", 408), close=True))
        self._transport.close()

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
                    refused = EventRefused(f"the head has more than {MAX_HEAD_BYTES} bytes", 431)
                    self._answers.append(((), _render(refused, close=True)))
                elif not may_be_plain(buffer, at):
                    self._hand_over(at)
                    return
                break
            head = parse_head(bytes(buffer[at:end]))
            if head is None or self._is_special(head.source):
                self._hand_over(at)
                return
            body = end + 4
            if size - body < head.length:
                if self._expect(head):
                    self._need = body - at + head.length
                break
            self._take(head, _copy(buffer, body, body + head.length))
            at = body + head.length
        if at:
            del buffer[:at]
        if buffer:
            if at or not self.busy_since:
                self.busy_since = self._connections.now()
            if self._deaf:
                buffer.clear()
        else:
            self.busy_since = 0.0
            self.idle_since = self._connections.now()
        self._settle()

    def _expect(self, head: Head) -> bool:
        """Whether a body that is incomplete may come; memory is reserved only for permitted senders."""
        if head.length <= _SMALL_BYTES:
            return True
        try:
            with suppress(LogUnavailable):  # the node may be ready when the body is complete
                self._requests.enter(head.source, head.kind, head.length, head.key)
            self._reserve(head.length)
        except EventRefused as error:
            self._closing = self._deaf = True
            self._answers.append(((), _render(error, close=True)))
            return False
        return True

    def _reserve(self, size: int) -> None:
        self._requests.gate.free(self._reserved)
        self._reserved = 0
        self._requests.gate.reserve(size)
        self._reserved = size

    def _is_special(self, source: str) -> bool:
        intake = self._requests.intakes.get(source)
        return intake is not None and bool(intake.border.source.respond)

    def _enter(self, head: Head) -> AdmittedRequest | None:
        """Judge the head of a complete request."""
        try:
            passed = self._requests.enter(head.source, head.kind, head.length, head.key)
            self._held = self._requests.gate.hold(passed.intake.border.source, passed.sender, self._held)
        except (EventRefused, LogFull, LogUnavailable) as error:
            self._answers.append(((), _render(error)))
            return None
        return passed

    def _take(self, head: Head, body: bytes) -> None:
        passed = self._enter(head)
        if passed is None:
            return
        try:
            taken = self._requests.take(passed, head.kind, body)
        except (EventRefused, LogFull, LogUnavailable) as error:
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
            open_group = next((group for group in groups if not group.acknowledgeable), None)
            if open_group is not None:
                if self._waits_for is not open_group:
                    self._waits_for = open_group
                    open_group.then(self._group_closed)
                break
            out.append(answer)
            answers.popleft()
        if out:
            self._transport.write(b"".join(out))
        if not answers:
            if self._handing:
                self._give_away()
                return
            if self._closing:
                self._end()
                return
        self._balance()

    def _end(self) -> None:
        if self._deaf:  # closing now would reset the connection and lose the refusal (RFC 9112 §9.6)
            with suppress(OSError):  # already closed
                self._transport.write_eof()
        else:
            self._transport.close()

    def _group_closed(self) -> None:
        self._waits_for = None
        if self._answers:
            self._settle()

    def _balance(self) -> None:
        """Read only while the client reads its answers and not too many are pending."""
        wanted = not self._writing or len(self._answers) >= MOST_WAITING or self._handing
        if wanted != self._paused and not self._transport.is_closing():
            self._paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # --- the web server

    def _hand_over(self, at: int) -> None:
        """Move the connection to the web server from byte ``at`` on, once earlier answers are out."""
        del self._buffer[:at]
        self._handing = True
        self._settle()

    def _give_away(self) -> None:
        transport, rest = self._transport, bytes(self._buffer)
        self._buffer = bytearray()
        if self._paused:
            self._paused = False
            transport.resume_reading()
        self._registry.discard(self)
        self._connections.discard(self, self._held, moved=True)
        self._held = frozenset()
        other = self._fallback()
        transport.set_protocol(other)
        other.connection_made(transport)
        other.data_received(rest)


def _copy(buffer: bytearray, start: int, end: int) -> bytes:
    """Copy a part of the buffer, once."""
    with memoryview(buffer) as view:
        return view[start:end].tobytes()


def _render(error: IngestError, *, close: bool = False) -> bytes:
    status, body, retry = problem_body(error)
    extra = b"retry-after: %d\r\n" % retry if retry else b""
    if status == 401:
        extra += b"www-authenticate: Bearer\r\n"
    if close:
        extra += b"connection: close\r\n"
    return _PROBLEM % (status, TITLES.get(status, "Error").encode(), len(body), extra, body)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a plain request.

    Attributes:
        source: from the path.
        kind: content type in lower case, without parameters.
        length: of the body.
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


def may_be_plain(buffer: bytearray, at: int) -> bool:
    """Whether the first bytes of an incomplete request may be the beginning of a plain one."""
    return _BEGIN.startswith(bytes(buffer[at : at + len(_BEGIN)]))


class Connections:
    """All connections of one server.

    Args:
        gate: counts them.
        request_s: longest time for a request to come in.
        idle_s: longest time a connection may be idle; the web server's own have a limit there.
    """

    def __init__(self, gate: SenderGate, request_s: float, idle_s: float) -> None:
        self._gate = gate
        self._request_s = request_s
        self._idle_s = idle_s
        self._open: set[TimedConnection] = set()
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: TimedConnection, *, moved: bool = False) -> bool:
        """Count a connection; False if there are too many and it must be closed.

        Args:
            connection: that was made.
            moved: it was already counted, under another protocol.
        """
        if not moved and not self._gate.connect():
            return False
        self._open.add(connection)
        return True

    def discard(self, connection: TimedConnection, held: frozenset[tuple[str, str]], *, moved: bool = False) -> None:
        """The connection has ended, or moves to another protocol (``moved``)."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        if moved:
            self._gate.release(held)
        else:
            self._gate.disconnect(held)

    async def watch(self) -> None:
        """Cut off slow connections, until cancelled."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self._request_s / 4))
            now = self.now()
            for connection in list(self._open):
                if connection.busy_since:
                    if now - connection.busy_since > self._request_s:
                        self.expired += 1
                        connection.expire(late=True)
                elif connection.idle_since and now - connection.idle_since > self._idle_s:
                    connection.expire(late=False)

    def shutdown(self) -> None:
        for connection in list(self._open):
            connection.shutdown()


class TimedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol for requests off the hot path, with a time limit for each request."""

    def __init__(self, *args: Any, timed: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timed = timed
        self.busy_since = 0.0
        self.idle_since = 0.0  # between requests uvicorn has its own limit
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timed.add(self, moved=True)
        self.busy_since = self._timed.now()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timed.discard(self, frozenset())
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Limit the size of a head."""
        self._head_bytes += len(data)
        super().data_received(data)
        if (
            self._head_bytes > _MAX_FALLBACK_HEAD_BYTES
            and self.busy_since
            and not self._in_body
            and self.parser is not None
        ):
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        self.busy_since = self._timed.now()
        self._in_body = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.busy_since = 0.0
        self._head_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """The connection is now the WebSocket's, which has its own limits."""
        self._timed.discard(self, frozenset())
        super().handle_websocket_upgrade()

    def expire(self, *, late: bool) -> None:
        if not self.transport.is_closing():
            self.transport.close()
