"""Which subscriber wants which keys of which product, and what changes of them.

A subscriber is anything hashable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ingest.answers.tables import ProductTables
from ingest.errors import RequestRefused

logger = logging.getLogger(__name__)

_RETRY_S = 1.0

Key = tuple[str, ...]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class KeyState:
    """The rows of a key as a JSON array, and the version of the product in which they last changed."""

    version: int
    rows: bytes


class Interests(Generic[S]):
    """Which subscriber wants which keys of which product, and what it was told last. No I/O.

    A key's state is its latest rows; states between two reads are skipped. So a slow subscriber costs a set of keys,
    not a queue. A subscriber is anything hashable.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, dict[Key, set[S]]] = {}
        self._by: dict[S, dict[str, frozenset[Key]]] = {}
        self._states: dict[str, dict[Key, KeyState]] = {}

    def want(self, subscriber: S, product: str, keys: Iterable[Key]) -> frozenset[Key]:
        """Replace the keys that a subscriber wants of a product. Returns the new ones among them."""
        new = frozenset(keys)
        mine = self._by.setdefault(subscriber, {})
        old = mine.get(product, frozenset())
        for key in old - new:
            self._forget(subscriber, product, key)
        wanted = self._wanted.setdefault(product, {})
        for key in new - old:
            wanted.setdefault(key, set()).add(subscriber)
        if new:
            mine[product] = new
        else:
            mine.pop(product, None)
        if not wanted:
            del self._wanted[product]
        if not mine:
            del self._by[subscriber]
        return new - old

    def gone(self, subscriber: S) -> None:
        """Forget a subscriber."""
        for product in list(self._by.get(subscriber, ())):
            self.want(subscriber, product, ())

    def wanted(self, product: str) -> frozenset[Key]:
        """The keys of a product that any subscriber wants."""
        return frozenset(self._wanted.get(product, ()))

    def count(self, subscriber: S) -> int:
        """Number of keys that a subscriber wants, over all products."""
        return sum(len(keys) for keys in self._by.get(subscriber, {}).values())

    def state(self, product: str, key: Key) -> KeyState | None:
        """The state of a wanted key, if it has been read."""
        return self._states.get(product, {}).get(key)

    def updated(self, product: str, version: int, rows: Mapping[Key, bytes]) -> dict[S, list[Key]]:
        """Take the rows of keys in a version. Returns the changed keys by subscriber."""
        wanted = self._wanted.get(product, {})
        states = self._states.setdefault(product, {})
        changed: dict[S, list[Key]] = {}
        for key, body in rows.items():
            old = states.get(key)
            if key not in wanted or (old is not None and old.rows == body):
                continue
            states[key] = KeyState(version, body)
            for subscriber in wanted[key]:
                changed.setdefault(subscriber, []).append(key)
        if not states:
            del self._states[product]
        return changed

    def _forget(self, subscriber: S, product: str, key: Key) -> None:
        wanted = self._wanted[product]
        wanted[key].discard(subscriber)
        if not wanted[key]:
            del wanted[key]
            states = self._states.get(product, {})
            states.pop(key, None)
            if product in self._states and not states:
                del self._states[product]


class ProductFollower(Generic[S]):
    """Follows the products that subscribers want, with one task a product, and tells subscribers of changed keys.

    The node reads the tables itself instead of relaying from a server: subscribers want the latest rows of keys, which
    needs neither filters nor positions; one watch a product serves every connection; and collecting continues without a
    server. docs/guide/collecting.md weighs the alternatives.
    """

    def __init__(
        self, interests: Interests[S], tables: ProductTables, tell: Callable[[S, str, Sequence[Key]], None]
    ) -> None:
        self._tell = tell
        self._interests = interests
        self._rows = tables.rows
        self._watch = tables.watch
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, asyncio.Event] = {}

    def follow(self, product: str) -> None:
        """Read the product now, because new keys of it are wanted, and follow it from here on."""
        self._asked.setdefault(product, asyncio.Event()).set()
        if product not in self._tasks:
            self._tasks[product] = asyncio.create_task(self._follow(product), name=f"follow {product}")

    def width(self, product: str) -> int | None:
        """Most values in a key of the product; None if it is not followed, or has not been read yet."""
        return self._rows.width(product) if product in self._tasks else None

    async def close(self) -> None:
        """Stop following."""
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
                except RequestRefused as error:
                    if error.status != 404:  # wait for a product that does not exist yet
                        logger.warning("%s is not followed: %s", product, error)
                        return
                except Exception:  # subscribers of other products are not affected
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
