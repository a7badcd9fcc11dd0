"""What the server asks of a subscriber's connection, whatever the transport.

A transport is three things: a :class:`~serve.push.codec.Codec`, which makes a message's bytes once for everybody; a
link, which takes them to one subscriber; and whoever reads the request and hands a
:class:`~serve.subscriber.Subscriber` with the link to :meth:`serve.tables.Tables.join`. Everything else (what comes
next, how far behind it is, when it is told and cut) is the hub's. In return a transport tells the hub
:meth:`~serve.hub.Hub.paused` and :meth:`~serve.hub.Hub.drained` when its buffer fills and empties,
:meth:`~serve.hub.Hub.acknowledged` where the other side says so, and :meth:`~serve.hub.Hub.unsubscribed` at the end.
"""

from __future__ import annotations

from typing import Protocol


class Link(Protocol):
    """One connection. Nothing here waits but :meth:`drained`."""

    def write(self, data: bytes) -> None:
        """Take bytes of whole messages, now. Called by the hub's deliveries only while the subscriber is live, and for
        what is told out of turn (heartbeats, ``slow``)."""

    def pump(self) -> None:
        """Fetch from :meth:`serve.hub.Hub.data_to_send` and write, until it gives nothing or the socket is full."""

    def close(self, code: int, reason: str) -> None:
        """Say why, then close; abort if the other side does not take it. The code is docs/protocol.md's."""

    def buffered(self) -> int:
        """Bytes that the socket has not taken yet: when they get fewer, somebody reads."""

    async def drained(self) -> None:
        """Returns when the socket takes more, or is gone. Used by replays only, which make data at its pace."""
