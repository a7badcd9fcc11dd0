"""Every publish/subscribe connection of a node: what they share, and whether they are still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from ingest.collectors.door import Door
from ingest.pubsub.feed import Feed
from ingest.pubsub.interests import Interests, Key
from ingest.pubsub.protocol import StreamProtocol
from lakehouse.contract.pipeline import Pipeline

if TYPE_CHECKING:
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)

_PING_S = 20.0


class Streams:
    """Every publish/subscribe connection of a node.

    Args:
        door: keys, limits, tokens, and the sources that may be published to: those that take events by HTTP.
        interests: who wants what.
        pipeline: its products with a channel may be subscribed to.
        most: connections at a time.
        until_ready: waits until the node takes so many bytes of events.

    Attributes:
        feed: set by the node once it is made.
        connections: there are now.
    """

    def __init__(
        self,
        door: Door,
        interests: Interests[StreamProtocol],
        pipeline: Pipeline,
        most: int,
        until_ready: Callable[[int], Awaitable[None]],
    ) -> None:
        self.door = door
        self.interests = interests
        self.pipeline = pipeline
        self.most = most
        self.until_ready = until_ready
        self.feed: Feed[StreamProtocol]
        self.connections: set[StreamProtocol] = set()

    def tell(self, subscriber: StreamProtocol, product: str, keys: Sequence[Key]) -> None:
        """Keys of a product changed; for :class:`Feed`."""
        subscriber.tell(product, keys)

    def protocol(
        self, config: object, server_state: ServerState, app_state: dict[str, Any], _loop: object = None
    ) -> StreamProtocol:
        """What uvicorn calls for an upgrade request."""
        return StreamProtocol(self, server_state.connections)

    async def keep_alive(self) -> None:
        """Ping every connection now and then; one that answers nothing from one ping to the next but one is cut."""
        while True:
            await asyncio.sleep(_PING_S)
            for connection in list(self.connections):
                try:
                    connection.ping()
                except Exception:  # whatever it is, the node and the other connections go on
                    logger.exception("a connection cannot be asked whether it is there")
