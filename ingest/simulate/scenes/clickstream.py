"""A shop: visitors look at pages, put things into the cart, take some out again, buy, and come back another time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from ingest.simulate.scenes.arrival import Happening, arriving

VISITORS = 400
_PAGES = ("home", "search", "product", "product", "product", "reviews", "help")
_THINK_MS = 25_000.0
_AWAY_MS = 2_700_000.0  # on top of the half hour that ends a session


def events(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
    """``actions``: action_id, at (ms), visitor, kind (view, add, remove, buy), page, sku (null for a plain page)."""
    rng = random.Random(f"clickstream {seed}")
    for _, source, payload in arriving(_happenings(rng, start_ms), random.Random(f"network {seed}")):
        yield source, payload


def _happenings(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    # Time, visitor, and the cart: who is due next does next.
    due: list[tuple[int, str, list[str]]] = [(start_ms, "u0", [])]
    due += [(start_ms + int(rng.expovariate(1 / _AWAY_MS)), f"u{n}", []) for n in range(1, VISITORS)]
    heapq.heapify(due)
    number = 0
    while True:
        now, visitor, cart = heapq.heappop(due)
        kind, page, sku = _act(rng, cart)
        yield (
            now,
            "actions",
            {"action_id": number, "at": now, "visitor": visitor, "kind": kind, "page": page, "sku": sku},
        )
        number += 1
        pause = rng.expovariate(1 / _THINK_MS)
        if kind == "buy" or rng.random() < 0.09:  # leaves
            pause = 1_800_001 + rng.expovariate(1 / _AWAY_MS)
            cart = []
        heapq.heappush(due, (now + 1 + int(pause), visitor, cart))


def _act(rng: random.Random, cart: list[str]) -> tuple[str, str, str | None]:
    """What the visitor does next: kind, page, article. Changes the cart."""
    chance = rng.random()
    if cart and chance < 0.08:
        return "remove", "cart", cart.pop(rng.randrange(len(cart)))
    if cart and chance < 0.14:
        cart.clear()
        return "buy", "checkout", None
    sku = f"s{int(300 * rng.random() ** 2)}"
    if chance < 0.30:
        cart.append(sku)
        return "add", "product", sku
    page = rng.choice(_PAGES)
    return "view", page, sku if page in ("product", "reviews") else None
