"""Uvicorn's HTTP protocol with a time limit for the first request: a connection that says nothing is not kept."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FIRST_REQUEST_S = 10.0


class TimedHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose first request (or upgrade) has not come in whole after :data:`FIRST_REQUEST_S`."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self._limit = self.loop.call_later(FIRST_REQUEST_S, self._too_late)

    def data_received(self, data: bytes) -> None:
        """Stop it when the request is there."""
        super().data_received(data)
        if self._limit is not None and (self.cycle is not None or self.transport.get_protocol() is not self):
            self._limit.cancel()
            self._limit = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop it."""
        if self._limit is not None:
            self._limit.cancel()
        super().connection_lost(exc)

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
