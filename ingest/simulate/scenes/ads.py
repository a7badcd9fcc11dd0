"""Advertising: impressions on pages, and the clicks that follow some of them."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from ingest.simulate.scenes.arrival import Happening, arriving

CAMPAIGNS = tuple(
    f"{kind}-{thing}" for kind in ("spring", "sale", "new") for thing in ("shoes", "bikes", "tea", "maps")
)
_PAGES = ("front", "news", "sport", "weather", "forum")
_EVERY_MS = 20.0  # between two impressions, on average
_SLOW_CLICK = 0.04  # of clicks: comes after the ten minutes that the pipeline counts
_TWICE = 0.03  # of clicks: the visitor clicks again


def events(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
    """``impressions``: impression_id, at (ms), campaign, page, visitor; ``clicks``: click_id, at, impression_id."""
    rng = random.Random(f"ads {seed}")
    for _, source, payload in arriving(_happenings(rng, start_ms), random.Random(f"network {seed}")):
        yield source, payload


def click_rate(campaign: str) -> float:
    """The share of the campaign's impressions that are clicked at least once."""
    return 0.01 + 0.012 * CAMPAIGNS.index(campaign)


def _happenings(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    clicks: list[tuple[int, str, str]] = []  # to come: time, click, impression
    now, number = float(start_ms), 0
    while True:
        at, impression = int(now), f"i{number}"
        while clicks and clicks[0][0] <= at:
            when, click, clicked = heapq.heappop(clicks)
            yield when, "clicks", {"click_id": click, "at": when, "impression_id": clicked}
        campaign = CAMPAIGNS[min(int(rng.expovariate(0.35)), len(CAMPAIGNS) - 1)]
        yield (
            at,
            "impressions",
            {
                "impression_id": impression,
                "at": at,
                "campaign": campaign,
                "page": rng.choice(_PAGES),
                "visitor": f"v{rng.randrange(50_000)}",
            },
        )
        if rng.random() < click_rate(campaign):
            for times in range(1 + (rng.random() < _TWICE)):
                heapq.heappush(clicks, (at + _click_delay_ms(rng), f"c{number}.{times}", impression))
        number += 1
        now += rng.expovariate(1 / _EVERY_MS)


def _click_delay_ms(rng: random.Random) -> int:
    if rng.random() < _SLOW_CLICK:
        return int(rng.uniform(600_001, 900_000))
    return min(600_000, int(rng.lognormvariate(9.2, 1.0)))  # ten seconds at the median
