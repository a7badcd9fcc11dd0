"""The connections of a server, and how long each may take: a client that sends slowly, or nothing, is cut off.

One look a second at all of them, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingest.limits import Gate

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65_536
_LOOK_S = 1.0


class Timed(Protocol):
    """A connection.

    Attributes:
        busy_since: loop time at which the request that is coming in began; 0: none is.
        idle_since: loop time since which nothing has come in.
    """

    busy_since: float
    idle_since: float

    def expire(self, *, late: bool) -> None:
        """The time for a request is over (``late``), or the connection was idle for too long."""

    def shutdown(self) -> None:
        """The server stops."""


class Connections:
    """All connections of one server.

    Args:
        gate: counts them.
        request_s: the longest that a request may take to come in.
        idle_s: the longest that a connection may be idle; the web server's own have a limit there.
    """

    def __init__(self, gate: Gate, request_s: float, idle_s: float) -> None:
        self._gate = gate
        self._request_s = request_s
        self._idle_s = idle_s
        self._open: set[Timed] = set()
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Timed, *, moved: bool = False) -> bool:
        """Count one; False where there are too many, then it is to be closed.

        Args:
            connection: that was made.
            moved: it was counted already, under another protocol.
        """
        if not moved and not self._gate.connect():
            return False
        self._open.add(connection)
        return True

    def discard(self, connection: Timed, held: frozenset[tuple[str, str]], *, moved: bool = False) -> None:
        """It has ended, or goes over to another protocol (``moved``)."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        if moved:
            self._gate.release(held)
        else:
            self._gate.disconnect(held)

    async def watch(self) -> None:
        """Cut off what is too slow, until cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._request_s / 4))
            now = self.now()
            for connection in list(self._open):
                if connection.busy_since:
                    if now - connection.busy_since > self._request_s:
                        self.expired += 1
                        connection.expire(late=True)
                elif connection.idle_since and now - connection.idle_since > self._idle_s:
                    connection.expire(late=False)

    def shutdown(self) -> None:
        """The server stops."""
        for connection in list(self._open):
            connection.shutdown()


class TimedHttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol for what is not on the hot path, with a limit to the time that a request may take."""

    def __init__(self, *args: Any, timed: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timed = timed
        self.busy_since = 0.0
        self.idle_since = 0.0  # between requests uvicorn has its own limit
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        """It came from the hot path, with the beginning of a request."""
        super().connection_made(transport)
        self._timed.add(self, moved=True)
        self.busy_since = self._timed.now()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._timed.discard(self, frozenset())
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests; a head without end is not gathered without end."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and self.busy_since and not self._in_body and self.parser is not None:
            self.send_400_response("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self.busy_since = self._timed.now()
        self._in_body = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._in_body = True
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """It is there in whole."""
        self.busy_since = 0.0
        self._head_bytes = 0
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """From here on the connection is the WebSocket's, which has limits of its own."""
        self._timed.discard(self, frozenset())
        super().handle_websocket_upgrade()

    def expire(self, *, late: bool) -> None:
        """Too slow."""
        if not self.transport.is_closing():
            self.transport.close()
