"""Where recordings of real streams are, which are never part of a clone; and the generated stream like them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from ingest.simulate.generator import RsvpGenerator

RECORDINGS = Path(os.environ.get("MILLRACE_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")
"""A folder beside the checkout, or that which MILLRACE_SHARED_DATA names; it may be missing."""


def generate(seed: int, start_ms: int | None = None, rate: float = 1_000.0) -> Iterator[bytes]:
    """The endless stream of :class:`RsvpGenerator` from its beginning."""
    generator = RsvpGenerator(seed, start_ms, rate)
    for number in count():
        yield from generator.block(number)
