"""Products followed by version: one poll a product, whoever waits for it, and none while nobody does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from ingest.lakestate import Coordinates, LakeState

logger = logging.getLogger(__name__)

Reached = Callable[[int, Mapping[str, int]], bool]


class Watch:
    """Follows the products of a lake while somebody waits.

    Args:
        lake: reads the tables' logs.
        poll_s: pause between two looks.
    """

    def __init__(self, lake: LakeState, poll_s: float) -> None:
        self._lake = lake
        self._poll_s = poll_s
        self._waiting: dict[str, list[tuple[Reached, asyncio.Future[int]]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def holds(self, product: str, at: Coordinates) -> int:
        """Wait until the product holds the event at these coordinates; its version then."""
        place = f"{at.topic}/{at.partition}"
        return await self._until(product, lambda _, offsets: offsets.get(place, 0) > at.offset)

    async def newer(self, product: str, than: int) -> int:
        """Wait for a version above ``than``; the current one then."""
        return await self._until(product, lambda version, _: version > than)

    def close(self) -> None:
        """Stop looking; who still waits is cancelled."""
        for task in self._tasks.values():
            task.cancel()
        for waiting in self._waiting.values():
            for _, future in waiting:
                future.cancel()

    async def _until(self, product: str, reached: Reached) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (reached, future)
        waiting = self._waiting.setdefault(product, [])
        waiting.append(entry)
        if product not in self._tasks:
            self._tasks[product] = asyncio.create_task(self._look(product), name=f"watch {product}")
        try:
            return await future
        finally:
            if entry in waiting:
                waiting.remove(entry)

    async def _look(self, product: str) -> None:
        """Poll until nobody waits."""
        try:
            while waiting := self._waiting.get(product):
                try:
                    version, offsets = await asyncio.to_thread(self._lake.progress, product)
                except (OSError, ValueError) as error:  # the table is being made, or dropped
                    logger.warning("the log of %s cannot be read: %s", product, error)
                else:
                    for reached, future in list(waiting):
                        if not future.done() and reached(version, offsets):
                            future.set_result(version)
                waiting[:] = [entry for entry in waiting if not entry[1].done()]
                if waiting:
                    await asyncio.sleep(self._poll_s)
        finally:
            del self._tasks[product]
            if not self._waiting[product]:
                del self._waiting[product]
