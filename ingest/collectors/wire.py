"""The hot path of HTTP: plain requests with events are taken here, below the web server, on the same port.

A connection begins here. As long as it brings nothing but ``POST /v1/SOURCE HTTP/1.1`` with a ``Content-Length`` and
headers without surprises, its requests are answered from here: any number of them may wait for their answers at a time
(pipelining, RFC 9112 §9.3.2), and answers go out in order, as many in one write as are ready. With the first request
that is anything else the connection goes over to the web server for good, from that request's first byte on, so that
only one parser ever judges a request that could be read in two ways: a request here has exactly one Content-Length, no
Transfer-Encoding, no line that is folded or ends otherwise than CR LF.

Heads repeat: what a client says is parsed once and looked up after that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from ingest.collectors import door as doors
from ingest.collectors.door import Door, Pass, problem_body
from ingest.collectors.head import HEAD_END, MAX_HEAD_BYTES, Head, may_be_plain, parse_head
from ingest.collectors.timed import Connections
from ingest.errors import EventRefused, IngestError, LogFull, LogUnavailable
from ingest.events import Group

logger = logging.getLogger(__name__)

MOST_WAITING = 1_000  # requests of one connection; while so many wait, nothing more is read
_SMALL_BYTES = 65_536  # bodies up to here are not counted while they come in

_ACCEPTED = b"HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_NO_ANSWER = b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
_PROBLEM = b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\n%b\r\n%b"


class WireProtocol(asyncio.Protocol):
    """One connection.

    Args:
        door: what its requests go through.
        connections: of the server.
        fallback: makes the web server's protocol.
        registry: the web server's own set of connections, which it ends when it stops.
    """

    __slots__ = (
        "_answers", "_buffer", "_closing", "_connections", "_deaf", "_door", "_fallback", "_handing", "_held",
        "_need", "_paused", "_registry", "_reserved", "_transport", "_waits_for", "_writing", "busy_since",
        "idle_since",
    )  # fmt: skip

    def __init__(
        self,
        door: Door,
        connections: Connections,
        fallback: Callable[[], asyncio.Protocol],
        registry: set[Any],
    ) -> None:
        self._door = door
        self._connections = connections
        self._fallback = fallback
        self._registry = registry
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._buffer = bytearray()
        self._need = 0  # bytes of the buffer before it is worth looking again
        self._reserved = 0  # of them, for a body that is coming in
        self._answers: deque[tuple[tuple[Group, ...], bytes]] = deque()
        self._waits_for: Group | None = None
        self._held: frozenset[tuple[str, str]] = frozenset()
        self._paused = False
        self._writing = True
        self._handing = False
        self._closing = False
        self._deaf = False  # a request is refused whose body is still to come: nobody looks at what comes
        self.busy_since = 0.0  # loop time at which the request that is coming in began; 0: none is
        self.idle_since = 0.0

    # --- the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
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
        """It is gone; events whose acknowledgement nobody hears any more stay where they are."""
        self._closing = True
        self._answers.clear()
        self._registry.discard(self)
        self._reserve(0)
        self._connections.discard(self, self._held)
        self._held = frozenset()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self._deaf:
            return
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need or self._handing or self._closing:
            return
        self._take_requests()

    def eof_received(self) -> bool:
        """The client sends no more; it still gets its answers."""
        self._closing = True
        return bool(self._answers)

    def pause_writing(self) -> None:
        """The client does not read its answers: nothing more is read from it."""
        self._writing = False
        self._balance()

    def resume_writing(self) -> None:
        """It reads again."""
        self._writing = True
        self._balance()

    def shutdown(self) -> None:
        """The server stops: no further request, and the end when the answers are out."""
        self._closing = True
        if not self._answers and self._transport is not None:
            self._transport.close()

    def expire(self, *, late: bool) -> None:
        """The time for a request is over (``late``), or the connection was idle for too long."""
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
        """Whether a body that is not there in whole may come; room is kept for those alone who may send it."""
        if head.length <= _SMALL_BYTES:
            return True
        try:
            with suppress(LogUnavailable):  # the node may take events again by the time that it is there
                self._door.enter(head.source, head.kind, head.length, head.key)
            self._reserve(head.length)
        except EventRefused as error:
            self._closing = self._deaf = True
            self._answers.append(((), _render(error, close=True)))
            return False
        return True

    def _reserve(self, size: int) -> None:
        self._door.gate.free(self._reserved)
        self._reserved = 0
        self._door.gate.reserve(size)
        self._reserved = size

    def _is_special(self, source: str) -> bool:
        intake = self._door.intakes.get(source)
        return intake is not None and bool(intake.border.source.respond)

    def _enter(self, head: Head) -> Pass | None:
        """Judge the head of a request that is there in whole."""
        try:
            passed = self._door.enter(head.source, head.kind, head.length, head.key)
            self._held = self._door.gate.hold(passed.intake.border.source, passed.caller, self._held)
        except (EventRefused, LogFull, LogUnavailable) as error:
            self._answers.append(((), _render(error)))
            return None
        return passed

    def _take(self, head: Head, body: bytes) -> None:
        passed = self._enter(head)
        if passed is None:
            return
        try:
            taken = self._door.take(passed, head.kind, body)
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
        """Write every answer that is due, in order, and wait for what the next one waits for."""
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
        if self._deaf:  # closed at once the connection would be reset, and the refusal lost (RFC 9112 §9.6)
            with suppress(OSError):  # it is gone already
                self._transport.write_eof()
        else:
            self._transport.close()

    def _group_closed(self) -> None:
        self._waits_for = None
        if self._answers:
            self._settle()

    def _balance(self) -> None:
        """Read only while the client reads its answers and not too many wait."""
        wanted = not self._writing or len(self._answers) >= MOST_WAITING or self._handing
        if wanted != self._paused and not self._transport.is_closing():
            self._paused = wanted
            if wanted:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    # --- the web server

    def _hand_over(self, at: int) -> None:
        """From the byte ``at`` on the connection is the web server's, when the answers before it are out."""
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
    """A part of the buffer, copied once."""
    with memoryview(buffer) as view:
        return view[start:end].tobytes()


def _render(error: IngestError, *, close: bool = False) -> bytes:
    status, body, retry = problem_body(error)
    extra = b"retry-after: %d\r\n" % retry if retry else b""
    if status == 401:
        extra += b"www-authenticate: Bearer\r\n"
    if close:
        extra += b"connection: close\r\n"
    return _PROBLEM % (status, doors.TITLES.get(status, "Error").encode(), len(body), extra, body)
