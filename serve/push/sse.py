"""Server-sent events (WHATWG HTML, 9.2): the WebSocket subscriber's ring with another frame.

:class:`ServingHttpProtocol` is uvicorn's HTTP protocol with a time limit for the first request. It parses the request
and hands the connection to :class:`SseConnection`, which needs neither a task nor a queue. ``id:`` is the position: a
browser that reconnects says in ``Last-Event-ID`` where it was, to whichever server it finds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.core import messages
from serve.core.messages import Message
from serve.errors import RequestError
from serve.push.base import SubscriberConnection
from serve.push.request import invalid, query_of, refused, subscription_of

if TYPE_CHECKING:
    from uvicorn.server import ServerState

PATH = b"/v1/subscribe"
KIND = "text/event-stream"
RETRY_MS = 1_000  # ± 50 %, so that not all clients of a lost server reconnect at the same moment
REQUEST_S = 10.0  # for head and body, which have some KiB
_CLOSE_S = 2.0


class SseCodec:
    """Unnamed events (``onmessage``); the type is in the data, one line of JSON."""

    name = "sse json"
    answers = False  # clients send nothing on this connection

    def frame(self, message: Message) -> bytes:
        if message.position is None:
            return b"data: " + message.body + b"\n\n"
        return b"id: " + str(message.head["position"]).encode() + b"\ndata: " + message.body + b"\n\n"

    def heartbeat(self, message: Message) -> bytes:
        return self.frame(message)


SSE = SseCodec()


def wants_events(method: bytes, path: bytes, headers: Mapping[str, str]) -> bool:
    return method == b"GET" and path == PATH and KIND in headers.get("accept", "")


class SseConnection(SubscriberConnection):
    """One stream, made by :class:`ServingHttpProtocol` from a parsed request."""

    def __init__(self, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(server_state, app_state, SSE)
        self._ended = False
        self._origin: str | None = None  # of the page, which the gate has checked

    def begin(self, query: str, headers: Mapping[str, str]) -> None:
        """Answer the request; call ``connection_made`` first."""
        try:
            [subscriber] = self.subscribers
            self._origin = headers.get("origin")
            subscriber.principal = self.admit(headers, query)
            wanted = query_of(query)
            if headers.get("last-event-id"):  # newer than the address, which the browser does not change
                wanted["from"] = headers["last-event-id"]
            request = subscription_of(wanted, self.hub.seal)
            if request.window:
                raise invalid("bad_request", "there is no way to acknowledge here, so no window")
        except RequestError as error:
            self.refuse(error)
            return
        self.subscribe(request, self._head)

    def data_received(self, data: bytes) -> None:
        """Nothing is expected after the request."""

    def close(self, code: int, reason: str) -> None:
        """Send the reason as the last event, then end the stream."""
        self.unsubscribe()
        if self.lost or self._ended:
            return
        if self.open:
            self.transport.write(SSE.frame(messages.closed(code, reason)))
        self._ended = True
        self.shut()
        self.transport.close()
        self.loop.call_later(_CLOSE_S, self.transport.abort)

    def _head(self) -> None:
        """Send the response head. The body lasts as long as the connection."""
        if self.lost or self._ended:
            return
        self.opened()  # from the head to the last event
        cors = b""
        if self._origin is not None:
            cors = b"access-control-allow-origin: %s\r\nvary: origin\r\n" % self._origin.encode("latin-1")
        retry = int(RETRY_MS * (0.5 + random.random()))
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"x-accel-buffering: no\r\nx-content-type-options: nosniff\r\nconnection: close\r\n"
            b"%s\r\nretry: %d\n\n" % (cors, retry)
        )

    def refuse(self, error: RequestError) -> None:
        """Before the stream, answer with a problem (RFC 9457): then an EventSource does not retry."""
        if self.open:
            self.transport.write(SSE.frame(messages.error(error.code, error.detail)))
            self.close(error.close, error.detail)
            return
        answer = refused(error)
        lines = [b"%s: %s" % header for header in answer.raw_headers]
        start = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
        head = b"\r\n".join([start, *lines, b"connection: close", b"", b""])
        self.transport.write(head + bytes(answer.body))
        self.close(error.close, error.detail)


class ServingHttpProtocol(HttpToolsProtocol):
    """Closes a connection if a request is not in after :data:`REQUEST_S`; hands requests for events to
    :class:`SseConnection`.
    """

    _limit: asyncio.TimerHandle | None = None
    _events: tuple[str, dict[str, str]] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit = self.loop.call_later(REQUEST_S, self._too_late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._events is not None and self.transport.get_protocol() is self:
            self._stream(*self._events)
        if self.transport.get_protocol() is not self:
            self._came_in()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._limit is None:
            self._limit = self.loop.call_later(REQUEST_S, self._too_late)

    def on_headers_complete(self) -> None:
        """Take requests for events out; pipelined ones are left to the routes."""
        url = httptools.parse_url(self.url)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._events is None and wants_events(self.parser.get_method(), url.path or b"", headers):
            self._events = (url.query or b"").decode("latin-1"), headers
            return
        if self._events is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._events is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._came_in()
        if self._events is None:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came_in()
        super().connection_lost(exc)

    def _came_in(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _stream(self, query: str, headers: dict[str, str]) -> None:
        """Hand the transport to another protocol, as uvicorn does for WebSockets."""
        self.connections.discard(self)
        protocol = SseConnection(self.server_state, self.app_state)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.begin(query, headers)

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
