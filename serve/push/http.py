"""Uvicorn's HTTP protocol with a time limit for the first request, and with streams of events taken out of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.push import sse

FIRST_REQUEST_S = 10.0


class ServingHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose first request (or upgrade) has not come in whole after :data:`FIRST_REQUEST_S`; hands
    one that asks for events to :class:`serve.push.sse.SseProtocol`."""

    _limit: asyncio.TimerHandle | None = None
    _events: tuple[str, dict[str, str]] | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._limit = self.loop.call_later(FIRST_REQUEST_S, self._too_late)

    def data_received(self, data: bytes) -> None:
        """Stop it when the request is there."""
        super().data_received(data)
        if self._events is not None and self.transport.get_protocol() is self:
            self._stream(*self._events)
        if self._limit is not None and (self.cycle is not None or self.transport.get_protocol() is not self):
            self._limit.cancel()
            self._limit = None

    def on_headers_complete(self) -> None:
        """A request for events gets no ASGI task. One behind another on the same connection is left to the routes."""
        url = httptools.parse_url(self.url)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._events is None and sse.wants_events(self.parser.get_method(), url.path or b"", headers):
            self._events = (url.query or b"").decode("latin-1"), headers
            return
        if self._events is None:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Of an ordinary request."""
        if self._events is None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Of an ordinary request."""
        if self._events is None:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def _stream(self, query: str, headers: dict[str, str]) -> None:
        """As uvicorn does for a WebSocket: another protocol takes the transport."""
        self.connections.discard(self)
        protocol = sse.SseProtocol(self.server_state, self.app_state)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.begin(query, headers)

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
