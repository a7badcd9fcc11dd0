"""What the server asks of a subscriber's connection, whatever the transport."""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """One connection. Nothing here waits but :meth:`drained`."""

    def write(self, data: bytes) -> None:
        """Hand bytes to the socket."""

    def pump(self) -> None:
        """Fetch from the hub and write for as long as the socket takes it."""

    def close(self, code: int, reason: str) -> None:
        """Say why, then close; abort if the other side does not take it."""

    def buffered(self) -> int:
        """Bytes that the socket has not taken yet."""

    async def drained(self) -> None:
        """Returns when the socket takes more, or is gone."""
