"""Measured errors of the sketches against exact answers, beside the published bounds; ``make bench-sketches``.

Each sketch is merged from many parts, as products are. ``--full`` counts 10^9 distinct items too, with both ``lg_k``
(some minutes); without it 10^8 are the most. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from lakehouse.sketches.kinds import BloomFilter, canonical_hll, count_min_inner_product, count_min_range, xxh64
from tests.lakehouse.operators.partials import Event, product, reservoir

Result = dict[str, Any]
err = Console(stderr=True)


def _hll_part(task: tuple[int, int, int]) -> bytes:
    lg_k, first, last = task
    sketch = datasketches.hll_sketch(lg_k, datasketches.tgt_hll_type.HLL_8)
    deque(map(sketch.update, range(first, last)), maxlen=0)
    return bytes(sketch.serialize_compact())


def distinct(items: int, lg_k: int = 12, part: int = 10**6, processes: int = 2) -> Result:
    """The integers below ``items``, in parts of their own that overlap by a tenth, merged."""
    began = time.monotonic()
    union = datasketches.hll_union(lg_k)
    tasks = [(lg_k, first, min(items, first + part + part // 10)) for first in range(0, items, part)]
    with ProcessPoolExecutor(processes) as pool:
        for written in pool.map(_hll_part, tasks):
            union.update(datasketches.hll_sketch.deserialize(written))
    sketch = canonical_hll(union)
    return {
        "sketch": f"HLL, lg_k {lg_k}",
        "of": f"{items:.0e} distinct, {len(tasks)} merged",
        "bytes": len(sketch.serialize_compact()),
        "error": abs(sketch.get_estimate() / items - 1),
        "bound": 1.04 / 2 ** (lg_k / 2),
        "says": "standard error",
        "violations": int(not sketch.get_lower_bound(3) <= items <= sketch.get_upper_bound(3)),
        "seconds": time.monotonic() - began,
    }


def _zipf(events: int, items: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A skewed stream of integers below ``items``."""
    weights = 1 / np.arange(1, items + 1) ** 1.1
    return np.random.default_rng(seed).choice(items, events, p=weights / weights.sum())


def _count_min(stream: Any, parts: int, shape: tuple[int, int] = (8, 128)) -> datasketches.count_min_sketch:
    whole = datasketches.count_min_sketch(*shape)
    for part in np.array_split(stream, parts):
        sketch = datasketches.count_min_sketch(*shape)
        for item, count in zip(*np.unique(part, return_counts=True), strict=True):
            sketch.update(int(item), int(count))
        whole.merge(sketch)
    return whole


def frequency(events: int, items: int = 20_000, parts: int = 20) -> list[Result]:
    """Point, range and inner-product queries of sketches of 8 times 128; errors as a share of all events."""
    began = time.monotonic()
    stream, other = _zipf(events, items, 1), _zipf(events, items, 2)
    truth, other_truth = (np.bincount(found, minlength=items) for found in (stream, other))
    sketch, second = _count_min(stream, parts), _count_min(other, parts)
    estimates = np.array([sketch.get_estimate(item) for item in range(items)])
    too_much = (estimates - truth) / events
    bound = 2 / sketch.num_buckets
    said = {"bytes": len(sketch.serialize()), "bound": bound, "seconds": time.monotonic() - began}
    point = {
        "sketch": "Count-Min 8 × 128, point",
        "of": f"{events:.0e} events, {items:.0e} items",
        "error": float(np.quantile(too_much, 0.996)),
        "says": "of all events, for 99.6 % of items",
        "violations": int((too_much < 0).sum()) + int((too_much > bound).mean() > 0.004),
        **said,
    }
    product_ = count_min_inner_product(sketch, second)
    exact = float(truth @ other_truth)
    inner = {
        "sketch": "Count-Min 8 × 128, inner product",
        "of": f"two of {events:.0e} events",
        "error": (product_.estimate - exact) / events**2,
        "says": "of the product of both sums",
        "violations": int(not product_.lower <= exact <= product_.upper),
        **said,
    }
    return [point, _ranges(stream, parts), inner]


def _ranges(stream: Any, parts: int) -> Result:
    began = time.monotonic()
    bits = int(stream.max()).bit_length()
    levels = [_count_min(stream >> level, parts) for level in range(bits)]
    ordered, rng = np.sort(stream), np.random.default_rng(4)
    errors, violations = [], 0
    for _ in range(300):
        low, high = sorted(int(edge) for edge in rng.integers(0, 2**bits, 2))
        exact = int(np.searchsorted(ordered, high, "right") - np.searchsorted(ordered, low, "left"))
        found = count_min_range(levels, low, high)
        errors.append((found.estimate - exact) / len(stream))
        violations += not found.lower <= exact <= found.upper
    return {
        "sketch": "Count-Min 8 × 128, ranges",
        "of": f"300 ranges of {bits} bits",
        "bytes": sum(len(level.serialize()) for level in levels),
        "error": float(np.quantile(errors, 0.996)),
        "bound": 2 * (bits - 1) * 2 / 128,
        "says": "of all events, for 99.6 % of ranges",
        "violations": violations + int(min(errors) < 0),
        "seconds": time.monotonic() - began,
    }


def heavy_hitters(events: int, items: int = 20_000, lg_k: int = 10, parts: int = 50) -> Result:
    """Frequent items in far fewer counters than there are items: every interval must hold the truth."""
    began = time.monotonic()
    stream = _zipf(events, items, 3)
    whole = datasketches.frequent_strings_sketch(lg_k)
    for part in np.array_split(stream, parts):
        sketch = datasketches.frequent_strings_sketch(lg_k)
        for item, count in zip(*np.unique(part, return_counts=True), strict=True):
            sketch.update(str(item), int(count))
        whole.merge(datasketches.frequent_strings_sketch.deserialize(sketch.serialize()))
    truth = Counter({str(item): int(n) for item, n in enumerate(np.bincount(stream)) if n})
    found = whole.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
    error = max(upper - lower for _, _, lower, upper in found)
    wrong = sum(not lower <= truth[item] <= upper for item, _, lower, upper in found)
    named = {item for item, *_ in found}
    missing = sum(count > error and item not in named for item, count in truth.items())
    return {
        "sketch": f"top-n, {2**lg_k} slots",
        "of": f"{events:.0e} events, {items:.0e} items, {parts} merged",
        "bytes": len(whole.serialize()),
        "error": error / events,
        "bound": 3.5 / 2**lg_k,
        "says": "of all events",
        "violations": wrong + missing,
        "seconds": time.monotonic() - began,
    }


def membership(items: int, fpp: float = 0.01, parts: int = 10) -> Result:
    """No false negative, and about the declared share of false positives."""
    began = time.monotonic()
    whole = BloomFilter.sized(items, fpp)
    names = [f"item-{number}" for number in range(items)]
    for part in range(parts):
        found = BloomFilter.sized(items, fpp)
        first = [xxh64(name.encode()) for name in names[part::parts]]
        second = [xxh64(name.encode(), seed) for name, seed in zip(names[part::parts], first, strict=True)]
        found.update_hashed(np.array(first, np.uint64), np.array(second, np.uint64))
        whole.merge(BloomFilter.deserialize(found.serialize()))
    return {
        "sketch": f"Bloom filter, {fpp:.0%}",
        "of": f"{items:.0e} items, {parts} merged",
        "bytes": len(whole.serialize()),
        "error": sum(whole.query(f"other-{number}") for number in range(items)) / items,
        "bound": fpp,
        "says": "false positives",
        "violations": sum(not whole.query(name) for name in names),
        "seconds": time.monotonic() - began,
    }


def quantiles(values: int, k: int = 200, parts: int = 100, trials: int = 5) -> Result:
    """The largest error of rank over 99 ranks and several trials. KLL's bound holds for one rank at 99 %."""
    began = time.monotonic()
    worst, size, over = 0.0, 0, 0
    for trial in range(trials):
        data = np.random.default_rng(trial).lognormal(0, 2, values)
        whole = datasketches.kll_doubles_sketch(k)
        for part in np.array_split(data, parts):
            sketch = datasketches.kll_doubles_sketch(k)
            sketch.update(part)
            whole.merge(datasketches.kll_doubles_sketch.deserialize(sketch.serialize()))
        ordered = np.sort(data)
        ranks = np.arange(1, 100) / 100
        found = np.searchsorted(ordered, whole.get_quantiles(ranks, inclusive=True), "right") / values
        errors = np.abs(found - ranks)
        worst, size = max(worst, float(errors.max())), len(whole.serialize())
        over += int((errors > whole.normalized_rank_error(False)).sum())
    bound = datasketches.kll_doubles_sketch.get_normalized_rank_error(k, False)
    return {
        "sketch": f"KLL, k {k}",
        "of": f"{values:.0e} values, {parts} merged, {trials} times",
        "bytes": size,
        "error": worst,
        "bound": bound,
        "says": f"of rank; the worst of {99 * trials} ({over} of them over it)",
        "violations": int(over > 0.05 * 99 * trials),
        "seconds": time.monotonic() - began,
    }


def sample(windows: int, events: int = 50, n: int = 3) -> Result:
    """How evenly the places of a window are drawn: chi-squared a degree of freedom, 1 for a fair draw."""
    from lakehouse.operators.registry import operator_of

    began = time.monotonic()
    operator = operator_of(product("reservoir", n=n))
    drawn: Counter[int] = Counter()
    for window in range(windows):
        stream = [Event(window * events + place, 0, "a", place) for place in range(events)]
        rows: pa.Table | None = None
        for batch in (stream[::2], stream[1::2]):
            partial = reservoir(batch, 60)
            operator.describe(partial.schema)
            rows = operator.merge(rows, operator.prepare(partial))
        assert rows is not None
        drawn.update(rows["item"].to_pylist())
    expected = windows * n / events
    chi = sum((drawn[place] - expected) ** 2 for place in range(events)) / (expected * (1 - n / events))
    return {
        "sketch": f"reservoir, {n} of {events}",
        "of": f"{windows} windows in two batches",
        "bytes": 0,
        "error": chi / (events - 1),
        "bound": 1 + 4 * (2 / (events - 1)) ** 0.5,
        "says": "chi-squared a degree of freedom",
        "violations": int(sum(drawn.values()) != windows * n),
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10^9 distinct items too")
    parser.add_argument("--processes", type=int, default=2, help="that count distinct items")
    options = parser.parse_args()
    tasks: list[tuple[str, Callable[[], Result | list[Result]]]] = [
        ("10^7 distinct", lambda: [distinct(10**7, lg_k, processes=options.processes) for lg_k in (11, 12)]),
        ("10^8 distinct", lambda: distinct(10**8, processes=options.processes)),
        ("frequencies", lambda: frequency(1_000_000)),
        ("heavy hitters", lambda: heavy_hitters(2_000_000)),
        ("members", lambda: membership(100_000)),
        ("quantiles", lambda: quantiles(2_000_000)),
        ("samples", lambda: sample(1_000)),
    ]
    if options.full:
        tasks.append(
            (
                "10^9 distinct",
                lambda: [distinct(10**9, lg_k, 10**7, options.processes) for lg_k in (11, 12)],
            )
        )
    results: list[Result] = []
    for name, task in tasks:
        with err.status(f"{name} …"):
            found = task()
        results += found if isinstance(found, list) else [found]
    shown = Table("sketch", "of", "bytes", "error", "bound", "", "violations", "s")
    for row in results:
        shape = "{:.4%}" if row["bound"] < 1 else "{:.2f}"
        shown.add_row(
            row["sketch"],
            row["of"],
            f"{row['bytes']:,}",
            shape.format(row["error"]),
            shape.format(row["bound"]),
            row["says"],
            str(row["violations"]),
            f"{row['seconds']:.1f}",
        )
    Console(width=160).print(shown)
    sys.stdout.write(json.dumps(results) + "\n")
    return int(any(row["violations"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
