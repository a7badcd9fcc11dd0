"""From events as they happen to events as they arrive."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

Happening = tuple[int, str, dict[str, object]]
_LATEST_MS = 120_000  # held back at the most, so that the heap is bounded


def arriving(happenings: Iterator[Happening], rng: random.Random, late: float = 0.02) -> Iterator[Happening]:
    """The same events in the order in which a network brings them.

    Args:
        happenings: time in ms (never going back), source, payload.
        rng: chooses the delays.
        late: the share that is held back for up to two minutes; others take some tens of milliseconds.
    """
    waiting: list[tuple[int, int, Happening]] = []
    for number, event in enumerate(happenings):
        now = event[0]
        delay = rng.randrange(_LATEST_MS) if rng.random() < late else int(rng.expovariate(1 / 40))
        heapq.heappush(waiting, (now + delay, number, event))
        while waiting and waiting[0][0] <= now:
            yield heapq.heappop(waiting)[2]
