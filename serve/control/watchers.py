"""Which of our processes look at the state, and which revision each of them has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_AWAY_S = 3.0  # without a look: the process is gone, nobody waits for it
_MOST = 10_000


@dataclass(slots=True)
class _Node:
    revision: int
    seen: float
    looking: int = 0


class Watchers:
    """See the module. A look that is answered by a new state is acknowledged by the next one. One event loop."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._moved = asyncio.Event()
        self._revision = -1

    def committed(self, revision: int) -> None:
        """There is a newer state."""
        self._revision = max(self._revision, revision)
        self._notify()

    def began(self, name: str, revision: int) -> None:
        """A process looks, and has this revision."""
        now = asyncio.get_running_loop().time()
        if len(self._nodes) >= _MOST:
            self._nodes = {each: node for each, node in self._nodes.items() if self._here(node, now)}
        node = self._nodes.setdefault(name, _Node(revision, now))
        node.revision, node.seen, node.looking = revision, now, node.looking + 1
        self._notify()

    def ended(self, name: str) -> None:
        """Its look was answered."""
        if (node := self._nodes.get(name)) is not None:
            node.looking -= 1
            node.seen = asyncio.get_running_loop().time()

    async def newer(self, revision: int, most_s: float) -> None:
        """Return when there is a newer state than this, at the latest after so many seconds."""
        await self._until(lambda: self._revision > revision, most_s)

    async def known(self, revision: int, most_s: float) -> tuple[int, int]:
        """Wait until every process that looks knows a revision; how many do, of how many."""
        count = (0, 0)

        def all_know() -> bool:
            nonlocal count
            now = asyncio.get_running_loop().time()
            here = [node for node in self._nodes.values() if self._here(node, now)]
            count = sum(node.revision >= revision for node in here), len(here)
            return count[0] == count[1]

        await self._until(all_know, most_s)
        return count

    @staticmethod
    def _here(node: _Node, now: float) -> bool:
        return node.looking > 0 or now - node.seen < _AWAY_S

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _until(self, true: Callable[[], bool], most_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + most_s
        while not true():
            try:
                async with asyncio.timeout_at(deadline):
                    await self._moved.wait()
            except TimeoutError:
                true()
                return
