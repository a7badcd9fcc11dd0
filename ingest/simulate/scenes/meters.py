"""Electricity meters: one reading per customer every five minutes.

Shaped after a household's measured power (UCI, "Individual household electric power consumption", February 2007): the
hourly profile, the mean (1.4 kW), the range (0.2 to 9.4 kW) and the voltage (240.5 V) are of that order. Nothing of the
recording is in here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ingest.simulate.scenes.arrival import Happening, arriving

CUSTOMERS = 40
EVERY_MS = 300_000
# Mean power in kW by hour of the day.
_PROFILE: tuple[float, ...] = (1.15, 1.0, 0.8, 0.75, 0.65, 0.8, 1.5, 2.0, 1.9, 1.55, 1.3, 1.25)
_PROFILE += (1.3, 1.15, 1.25, 1.2, 0.95, 0.95, 1.8, 2.45, 2.4, 2.3, 1.8, 1.45)
_LEAST_KW, _MOST_KW = 0.2, 9.4
_HOUR_MS = 3_600_000


def events(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
    """``readings``: customer, seq (its how manieth reading), at (end of the five minutes, ms), wh, voltage."""
    rng = random.Random(f"meters {seed}")
    for _, source, payload in arriving(_happenings(rng, start_ms), random.Random(f"network {seed}")):
        yield source, payload


def _happenings(rng: random.Random, start_ms: int) -> Iterator[Happening]:
    size = [rng.uniform(0.5, 1.6) for _ in range(CUSTOMERS)]  # of the household, against the mean
    mood = [1.0] * CUSTOMERS
    seq, now = 0, start_ms
    while True:
        hour = _PROFILE[now // _HOUR_MS % 24]
        for number in range(CUSTOMERS):
            mood[number] = max(0.3, min(3.0, mood[number] + rng.gauss(0, 0.15) + 0.05 * (1 - mood[number])))
            kw = max(_LEAST_KW, min(_MOST_KW, hour * size[number] * mood[number] * rng.lognormvariate(0, 0.25)))
            reading: dict[str, object] = {
                "customer": f"c{number:03}",
                "seq": seq,
                "at": now,
                "wh": round(kw * 1000 / 12),
                "voltage": round(rng.gauss(240.5 - kw * 0.6, 1.2), 2),
            }
            yield now, "readings", reading
        seq += 1
        now += EVERY_MS
