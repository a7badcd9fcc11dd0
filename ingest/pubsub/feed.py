"""Follows the products that somebody is interested in, and says whom to tell: one task a product, whoever listens.

The tables are read here, by the node, and not relayed from a server: what is asked for is the latest rows of keys,
which needs neither filters nor positions; one watch a product serves every connection, where a relay would need one
a car; and collecting goes on with no server there. docs/collecting.md weighs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ingest.errors import LookupRefused
from ingest.productrows import ProductRows
from ingest.pubsub.interests import Interests, Key
from ingest.watch import Watch

logger = logging.getLogger(__name__)

S = TypeVar("S")
_RETRY_S = 1.0


class Feed(Generic[S]):
    """Keeps the states of wanted keys true.

    Args:
        interests: who wants what.
        rows: reads the products.
        watch: follows them.
        tell: called with a subscriber, the product, and the keys that changed.
    """

    def __init__(
        self, interests: Interests[S], rows: ProductRows, watch: Watch, tell: Callable[[S, str, Sequence[Key]], None]
    ) -> None:
        self._interests = interests
        self._rows = rows
        self._watch = watch
        self._tell = tell
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Event] = {}

    def look(self, product: str) -> None:
        """Somebody wants further keys of this product: look now, and follow it from here."""
        self._asked.setdefault(product, asyncio.Event()).set()
        if product not in self._tasks:
            self._tasks[product] = asyncio.create_task(self._follow(product), name=f"feed {product}")

    def width(self, product: str) -> int | None:
        """How many values a key of the product has at most; None where it is not followed, or not read yet."""
        return self._rows.width(product) if product in self._tasks else None

    async def close(self) -> None:
        """Follow nothing any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, product: str) -> None:
        asked = self._asked[product]
        try:
            while keys := self._interests.wanted(product):
                asked.clear()
                version = -1
                try:
                    version, rows = await asyncio.to_thread(self._rows.by_keys, product, keys)
                except LookupRefused as error:
                    if error.status != 404:  # a product that is not there yet is waited for
                        logger.warning("%s is not followed: %s", product, error)
                        return
                except Exception:  # whatever it is, others go on being told
                    logger.exception("the rows of %s cannot be read", product)
                    await asyncio.sleep(_RETRY_S)
                    continue
                else:
                    for subscriber, changed in self._interests.updated(product, version, rows).items():
                        self._tell(subscriber, product, changed)
                await self._until_newer(product, version, asked)
        finally:
            del self._tasks[product]
            del self._asked[product]

    async def _until_newer(self, product: str, version: int, asked: asyncio.Event) -> None:
        newer = asyncio.create_task(self._watch.newer(product, version))
        wanted = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait((newer, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            newer.cancel()
            wanted.cancel()
