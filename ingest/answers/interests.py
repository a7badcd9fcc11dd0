"""Which subscriber wants which keys of which product, and what changes of them.

A subscriber is anything hashable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ingest.answers.tables import ProductTables, TenantRows
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
        self._wanted: dict[TenantRows, dict[Key, set[S]]] = {}
        self._by: dict[S, dict[TenantRows, frozenset[Key]]] = {}
        self._states: dict[TenantRows, dict[Key, KeyState]] = {}

    def want(self, subscriber: S, part: TenantRows, keys: Iterable[Key]) -> frozenset[Key]:
        """Replace the keys that a subscriber wants of a product. Returns the new ones among them."""
        new = frozenset(keys)
        mine = self._by.setdefault(subscriber, {})
        old = mine.get(part, frozenset())
        for key in old - new:
            self._forget(subscriber, part, key)
        wanted = self._wanted.setdefault(part, {})
        for key in new - old:
            wanted.setdefault(key, set()).add(subscriber)
        if new:
            mine[part] = new
        else:
            mine.pop(part, None)
        if not wanted:
            del self._wanted[part]
        if not mine:
            del self._by[subscriber]
        return new - old

    def gone(self, subscriber: S) -> None:
        for part in list(self._by.get(subscriber, ())):
            self.want(subscriber, part, ())

    def wanted(self, part: TenantRows) -> frozenset[Key]:
        """The keys of a product that any subscriber wants."""
        return frozenset(self._wanted.get(part, ()))

    def count(self, subscriber: S) -> int:
        """Number of keys that a subscriber wants, over all products."""
        return sum(len(keys) for keys in self._by.get(subscriber, {}).values())

    def state(self, part: TenantRows, key: Key) -> KeyState | None:
        """The state of a wanted key, if it has been read."""
        return self._states.get(part, {}).get(key)

    def updated(self, part: TenantRows, version: int, rows: Mapping[Key, bytes]) -> dict[S, list[Key]]:
        """Take the rows of keys in a version. Returns the changed keys by subscriber."""
        wanted = self._wanted.get(part, {})
        states = self._states.setdefault(part, {})
        changed: dict[S, list[Key]] = {}
        for key, body in rows.items():
            old = states.get(key)
            if key not in wanted or (old is not None and old.rows == body):
                continue
            states[key] = KeyState(version, body)
            for subscriber in wanted[key]:
                changed.setdefault(subscriber, []).append(key)
        if not states:
            del self._states[part]
        return changed

    def _forget(self, subscriber: S, part: TenantRows, key: Key) -> None:
        wanted = self._wanted[part]
        wanted[key].discard(subscriber)
        if not wanted[key]:
            del wanted[key]
            states = self._states.get(part, {})
            states.pop(key, None)
            if part in self._states and not states:
                del self._states[part]


class ProductFollower(Generic[S]):
    """Follows the products that subscribers want, with one task a product, and tells subscribers of changed keys.

    The node reads the tables itself instead of relaying from a server: subscribers want the latest rows of keys, which
    needs neither filters nor positions; one watch a product serves every connection; and collecting continues without a
    server. docs/guide/collecting.md weighs the alternatives.
    """

    def __init__(
        self, interests: Interests[S], tables: ProductTables, tell: Callable[[S, TenantRows, Sequence[Key]], None]
    ) -> None:
        self._tell = tell
        self._interests = interests
        self._rows = tables.rows
        self._watch = tables.watch
        self._tasks: dict[TenantRows, asyncio.Task[None]] = {}
        self._asked: dict[TenantRows, asyncio.Event] = {}

    def follow(self, part: TenantRows) -> None:
        """Read the product now, because new keys of it are wanted, and follow it from here on."""
        self._asked.setdefault(part, asyncio.Event()).set()
        if part not in self._tasks:
            self._tasks[part] = asyncio.create_task(self._follow(part), name=f"follow {part.product}")

    def width(self, part: TenantRows) -> int | None:
        """Most values in a key of the product; None if it is not followed, or has not been read yet."""
        return self._rows.width(part.product) if part in self._tasks else None

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, part: TenantRows) -> None:
        asked = self._asked[part]
        try:
            while keys := self._interests.wanted(part):
                asked.clear()
                version = -1
                try:
                    version, rows = await asyncio.to_thread(self._rows.by_keys, part, keys)
                except RequestRefused as error:
                    if error.status != 404:  # wait for a product that does not exist yet
                        logger.warning("%s is not followed: %s", part.product, error)
                        return
                except Exception:  # subscribers of other products are not affected
                    logger.exception("the rows of %s cannot be read", part.product)
                    await asyncio.sleep(_RETRY_S)
                    continue
                else:
                    for subscriber, changed in self._interests.updated(part, version, rows).items():
                        self._tell(subscriber, part, changed)
                await self._until_newer(part, version, asked)
        finally:
            del self._tasks[part]
            del self._asked[part]

    async def _until_newer(self, part: TenantRows, version: int, asked: asyncio.Event) -> None:
        newer = asyncio.create_task(self._watch.newer(part.product, version))
        wanted = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait((newer, wanted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            newer.cancel()
            wanted.cancel()
