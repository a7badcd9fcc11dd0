"""Questions to Count-Min sketches (Cormode and Muthukrishnan, "An improved data stream summary", J. Algorithms 2005).

Apache DataSketches' ``count_min_sketch`` answers point queries; ranges and inner products are built on it here. Each
estimate is never too low, and too high by more than ``2 N / width`` (N: the weight of all) with a probability of at
most ``2^-depth``: 1.6 % of N at 99.6 % for 8 times 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import datasketches
import numpy as np
import numpy.typing as npt

from lakehouse.errors import BadSketch

_PREAMBLE = 16  # bytes before the total weight and the counters, doubles all; a sketch that saw nothing ends here


@dataclass(frozen=True, slots=True)
class Estimate:
    """An answer with its bounds.

    Attributes:
        estimate: the answer.
        lower: no less, with the probability ``confidence``.
        upper: no more, with the probability ``confidence``.
        confidence: that the truth lies within, at least; 1 where the bounds are certain.
    """

    estimate: float
    lower: float
    upper: float
    confidence: float


def point(sketch: datasketches.count_min_sketch, item: str | int) -> Estimate:
    """How often an item was counted."""
    return _above(sketch.get_estimate(item), 2 * sketch.total_weight / sketch.num_buckets, sketch.num_hashes)


def count_range(levels: Sequence[datasketches.count_min_sketch], low: int, high: int) -> Estimate:
    """How many of the counted integers lie from ``low`` to ``high``, both included.

    Args:
        levels: sketches of the items shifted right by 0, 1, 2, … bits: a range is a sum of at most two blocks a level
            (dyadic decomposition, section 4.2 of the paper). The bound is the sum of theirs.

    Raises:
        BadSketch: there are no levels.
    """
    if not levels:
        raise BadSketch("it keeps no ranges: declare range_bits")
    estimate = error = 0.0
    blocks = 0
    for level, block in dyadic(max(0, low), min(high, 2 ** len(levels) - 1), len(levels)):
        sketch = levels[level]
        estimate += sketch.get_estimate(block)
        error += 2 * sketch.total_weight / sketch.num_buckets
        blocks += 1
    total = levels[0].total_weight
    found = _above(min(estimate, total), error, levels[0].num_hashes)
    return Estimate(found.estimate, found.lower, found.upper, max(0.0, 1 - blocks * 2.0 ** -levels[0].num_hashes))


def dyadic(low: int, high: int, levels: int) -> Iterator[tuple[int, int]]:
    """Blocks ``(level, number)`` that make up ``low`` to ``high``: block b of level l is [b 2^l, (b + 1) 2^l - 1]."""
    while low <= high:
        level = min((low & -low).bit_length() - 1 if low else levels - 1, levels - 1)
        while low + (1 << level) - 1 > high:
            level -= 1
        yield level, low >> level
        low += 1 << level


def inner_product(one: datasketches.count_min_sketch, other: datasketches.count_min_sketch) -> Estimate:
    """The sum over all items of their count here times their count there, e.g. the size of an equi-join.

    Raises:
        BadSketch: the sketches differ in depth, width or seed.
    """
    shapes = [(s.num_hashes, s.num_buckets, s.seed) for s in (one, other)]
    if shapes[0] != shapes[1]:
        raise BadSketch(f"sketches of {shapes[0]} and {shapes[1]} (depth, width, seed) have no inner product")
    estimate = float((counters(one) * counters(other)).sum(axis=1).min())
    return _above(estimate, 2 * one.total_weight * other.total_weight / one.num_buckets, one.num_hashes)


def counters(sketch: datasketches.count_min_sketch) -> npt.NDArray[np.float64]:
    """The sketch's table, depth times width."""
    shape = (sketch.num_hashes, sketch.num_buckets)
    if sketch.is_empty():
        return np.zeros(shape)
    return np.frombuffer(sketch.serialize(), "<f8", offset=_PREAMBLE + 8).reshape(shape)


def _above(estimate: float, error: float, depth: int) -> Estimate:
    return Estimate(estimate, max(0.0, estimate - error), estimate, 1 - 2.0**-depth)
