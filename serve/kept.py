"""Answers that are kept for those who ask the same, bounded by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

KEPT_BYTES = 33_554_432
ENTRY_BYTES = 256  # of one without a body


class Kept(Generic[K]):
    """The last answers, by what they are of; the least used go.

    Args:
        most: bytes together. None of them has more than a quarter of that.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most = most
        self._bodies: OrderedDict[K, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> bytes | None:
        """An answer, if it is there."""
        body = self._bodies.get(key)
        if body is not None:
            self._bodies.move_to_end(key)
        return body

    def put(self, key: K, body: bytes) -> None:
        """Keep one."""
        if key in self._bodies or len(body) > self._most // 4:
            return
        self._bodies[key] = body
        self._bytes += len(body) + ENTRY_BYTES
        while self._bytes > self._most:
            self._bytes -= len(self._bodies.popitem(last=False)[1]) + ENTRY_BYTES
