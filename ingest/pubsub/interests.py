"""Who wants which keys of which product, and what they were told last. No I/O.

A key's state is its latest rows: what was between two looks is not told. So a subscriber that lags costs a set of keys,
bounded by those it asked for, and is told the newest of each when it reads again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = tuple[str, ...]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class State:
    """The rows of a key.

    Attributes:
        version: of the product when they became what they are.
        rows: JSON array.
    """

    version: int
    rows: bytes


class Interests(Generic[S]):
    """Subscribers by product and key; a subscriber is anything hashable."""

    def __init__(self) -> None:
        self._wanted: dict[str, dict[Key, set[S]]] = {}
        self._by: dict[S, dict[str, frozenset[Key]]] = {}
        self._states: dict[str, dict[Key, State]] = {}

    def want(self, subscriber: S, product: str, keys: Iterable[Key]) -> frozenset[Key]:
        """Set the keys of a product that a subscriber wants, in place of those before; none: nothing of it.

        Returns:
            the keys that it wanted not before.
        """
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
        """A subscriber wants nothing any more."""
        for product in list(self._by.get(subscriber, ())):
            self.want(subscriber, product, ())

    def wanted(self, product: str) -> frozenset[Key]:
        """The keys of a product that somebody wants."""
        return frozenset(self._wanted.get(product, ()))

    def count(self, subscriber: S) -> int:
        """Keys that a subscriber wants, of all products."""
        return sum(len(keys) for keys in self._by.get(subscriber, {}).values())

    def state(self, product: str, key: Key) -> State | None:
        """What is known of a key that somebody wants."""
        return self._states.get(product, {}).get(key)

    def updated(self, product: str, version: int, rows: Mapping[Key, bytes]) -> dict[S, list[Key]]:
        """Take the rows of keys as of a version; who is to be told of which keys."""
        wanted = self._wanted.get(product, {})
        states = self._states.setdefault(product, {})
        told: dict[S, list[Key]] = {}
        for key, body in rows.items():
            old = states.get(key)
            if key not in wanted or (old is not None and old.rows == body):
                continue
            states[key] = State(version, body)
            for subscriber in wanted[key]:
                told.setdefault(subscriber, []).append(key)
        if not states:
            del self._states[product]
        return told

    def _forget(self, subscriber: S, product: str, key: Key) -> None:
        wanted = self._wanted[product]
        wanted[key].discard(subscriber)
        if not wanted[key]:
            del wanted[key]
            states = self._states.get(product, {})
            states.pop(key, None)
            if product in self._states and not states:
                del self._states[product]
