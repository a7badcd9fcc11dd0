"""How many of each part a load takes, by our measured costs: prints the table of docs/scale.md.

``python -m tests.bench.scale``. Loads are drawn and shared out as the parts do it: keys of events over partitions by
hash, with a few keys far more frequent than the rest (Zipf); ids over the ranges of the index of seen events;
subscribers over products, again Zipf, and products over hosts. The fullest share decides: there are as many shares as
it takes for that one to be :data:`FULL` full.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FULL = 0.7
KEYS = 1_000_000
DAYS = 1
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Costs:
    """What one of each carries, measured on cores of shared hosts (docs/reference/figures.md and decisions 4, 5 and 3).

    Attributes:
        collector: events/s of one collecting process, single events, durable before the answer.
        partition: events/s of one topic partition: a driver took 62,300 from two.
        driver: events/s of one driver with three products, on two cores.
        judged: events of a batch, whose keys an index of seen events judges in ``judge_ms`` and in ``run_ms`` a run.
        run_entries: entries of the largest runs.
        entry_bytes: of the index, an event.
        hub: subscribers of one server process.
        message_us: CPU of a server for a message of 1 KB.
        looks: a server's requests a second for a table that changes.
    """

    collector: float = 22_000
    partition: float = 31_000
    driver: float = 62_000
    judged: float = 14_000
    judge_ms: float = 10
    run_ms: float = 1
    run_entries: float = 8e6
    entry_bytes: float = 44
    hub: float = 10_000
    message_us: float = 15
    looks: float = 10


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        events: a second.
        subscribers: connected.
        products: that they subscribe to.
        messages: a subscriber gets a second.
    """

    events: float
    subscribers: float
    products: int
    messages: float = 0.5


LOADS = (
    Load(10_000, 10_000, 10),
    Load(100_000, 100_000, 30),
    Load(1_000_000, 10_000_000, 100),
    Load(10_000_000, 100_000_000, 1_000),
)


def zipf(count: int, exponent: float) -> Shares:
    """Shares of so many keys, the most frequent first."""
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return np.asarray(weights / weights.sum())


def shared_out(load: float, shares: Shares, capacity: float) -> int:
    """How many parts it takes to hash keys with these shares of a load to, so that the fullest is not too full."""
    draws = np.random.default_rng(1).random(len(shares))
    parts = max(1, math.ceil(load / (capacity * FULL)))
    while True:
        fullest = np.bincount((draws * parts).astype(np.int64), shares, parts).max() * load
        if parts == 1 or fullest <= capacity * FULL or parts * capacity > 100 * load:
            return parts if fullest <= capacity * FULL else 0  # 0: one key alone is too much
        parts = math.ceil(parts * 1.05)


def index_ranges(events: float, costs: Costs) -> int:
    """Ranges of the index of seen events, so that each is quick enough with all events of :data:`DAYS` in it."""
    ranges = 1
    while True:
        runs = events * 86_400 * DAYS / ranges / costs.run_entries
        judged = costs.judged / (costs.judge_ms + runs * costs.run_ms) * 1000
        if events / ranges <= judged * FULL:
            return ranges
        ranges = math.ceil(ranges * 1.05)


def servers(load: Load, costs: Costs) -> tuple[int, float]:
    """Server processes, each of one product or some small ones; and requests a second of their tails."""
    most = min(costs.hub, 1e6 * FULL / costs.message_us / load.messages)
    wanted = zipf(load.products, 1.0) * load.subscribers
    whole = np.floor(wanted / most)  # processes that one product fills
    bins: list[float] = []
    tails = whole.sum()
    for rest in sorted(wanted - whole * most, reverse=True):  # first fit, the largest first
        place = next((n for n, used in enumerate(bins) if used + rest <= most), None)
        tails += 1
        if place is None:
            bins.append(rest)
        else:
            bins[place] += rest
    return int(whole.sum()) + len(bins), float(tails * costs.looks)


def row(load: Load, costs: Costs) -> list[str]:
    shares = zipf(KEYS, 0.5)
    drivers = shared_out(load.events, shares, costs.driver)
    ranges = index_ranges(load.events, costs)
    index_tb = load.events * 86_400 * DAYS * costs.entry_bytes / 1e12
    processes, looks = servers(load, costs)
    found = [load.events, load.subscribers, shared_out(load.events, np.full(KEYS, 1 / KEYS), costs.collector)]
    found += [shared_out(load.events, shares, costs.partition), drivers, ranges]
    return [*(f"{number:,.0f}" for number in found), f"{index_tb:,.1f}", f"{processes:,}", f"{looks:,.0f}"]


def table(costs: Costs = Costs()) -> str:
    """The table, in Markdown."""
    head = ["events/s", "subscribers", "collectors", "partitions", "drivers", "index ranges"]
    head += [f"index of {DAYS} day, TB", "server processes", "requests/s of their tails"]
    lines = [head, ["---:"] * len(head), *(row(load, costs) for load in LOADS)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table())
