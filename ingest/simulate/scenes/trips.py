"""Rides on hired bikes: one event at the end of each ride."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ingest.simulate.scenes.arrival import Happening, arriving

CITIES = ("Utrecht", "Gent", "Aarhus", "Graz", "Leeds", "Nantes")
_EVERY_MS = 50.0  # between two rides, on average


def events(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Source ``trips``: trip_id, at (end of the ride, ms), city, rider, age (years), metres, seconds."""
    rng = random.Random(f"trips {seed}")
    for _, source, payload in arriving(_happenings(rng, start_ms), random.Random(f"network {seed}")):
        yield source, payload


def _happenings(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    now, number = float(start_ms), 0
    while True:
        rider = int(30_000 * rng.random() ** 1.5)
        age = 16 + rider * 7_919 % 62
        speed = max(1.5, rng.gauss(5.2 - 0.03 * abs(age - 32), 0.8))  # metres a second
        seconds = int(rng.lognormvariate(6.3, 0.6)) + 60
        city = CITIES[min(int(rng.expovariate(0.6)), len(CITIES) - 1)]
        payload: dict[str, object] = {
            "trip_id": number,
            "at": int(now),
            "city": city,
            "rider": rider,
            "age": age,
            "metres": int(speed * seconds),
            "seconds": seconds,
        }
        yield int(now), "trips", payload
        number += 1
        now += rng.expovariate(1 / _EVERY_MS)
