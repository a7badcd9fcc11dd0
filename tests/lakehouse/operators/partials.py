"""Products of every operator over one stream, and the partial rows that Spark makes of a batch of it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP
from lakehouse.sketches.kinds import xxh64

START = datetime(2026, 1, 1, tzinfo=UTC)
SQL = "SELECT t, city, item, event_id FROM r"


@dataclass(frozen=True, order=True)
class Event:
    """An event: id, seconds after :data:`START`, city, and a small number."""

    id: int
    at: int
    city: str
    item: int


Rows = list[dict[str, Any]]


def panes(events: list[Event], seconds: int) -> dict[tuple[datetime, str], list[Event]]:
    """Events by the pane or window that they lie in and by city."""
    found: dict[tuple[datetime, str], list[Event]] = defaultdict(list)
    for event in events:
        found[START + timedelta(seconds=event.at // seconds * seconds), event.city].append(event)
    return found


def table(events: list[Event], seconds: int, rows: Callable[[list[Event]], Rows], schema: dict[str, Any]) -> pa.Table:
    """Partial rows with window and city in front."""
    made = [
        {"window_start": start, "window_end": start + timedelta(seconds=seconds), "city": city, **row}
        for (start, city), some in panes(events, seconds).items()
        for row in rows(some)
    ]
    kinds = {"window_start": TIMESTAMP, "window_end": TIMESTAMP, "city": pa.string(), **schema}
    return pa.Table.from_pylist(made, schema=pa.schema(list(kinds.items())))


def distinct(events: list[Event], seconds: int) -> pa.Table:
    """Of the operator of this name, as the others below."""

    def rows(some: list[Event]) -> Rows:
        sketch = datasketches.hll_sketch(12, datasketches.tgt_hll_type.HLL_8)
        for event in some:
            sketch.update(event.item)
        return [{"sketch": sketch.serialize_compact(), "r": len(some)}]

    return table(events, seconds, rows, {"sketch": pa.binary(), "r": pa.int64()})


def top_n(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        sketch = datasketches.frequent_strings_sketch(10)
        for event in some:
            sketch.update(str(event.item))
        return [{"sketch": sketch.serialize(), "seen": len(some)}]

    return table(events, seconds, rows, {"sketch": pa.binary(), "seen": pa.int64()})


def quantiles(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        sketch = datasketches.kll_doubles_sketch(200)
        for event in some:
            sketch.update(event.item)
        return [{"sketch": sketch.serialize(), "r": len(some)}]

    return table(events, seconds, rows, {"sketch": pa.binary(), "r": pa.int64()})


def frequency(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        counts = Counter(event.item if event.item < 32 else None for event in some)
        return [{"millrace_item": item, "millrace_count": count} for item, count in counts.items()]

    return table(events, seconds, rows, {"millrace_item": pa.int64(), "millrace_count": pa.int64()})


def membership(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        made = []
        for item, count in Counter(str(event.item).encode() for event in some).items():
            first = xxh64(item)
            hashes = {"millrace_first": first, "millrace_second": xxh64(item, first)}
            made.append({**{k: v - 2**64 if v >> 63 else v for k, v in hashes.items()}, "millrace_count": count})
        return made

    kinds = dict.fromkeys(("millrace_first", "millrace_second", "millrace_count"), pa.int64())
    return table(events, seconds, rows, kinds)


def reservoir(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        made = [
            {
                "seen": len(some),
                "event_id": str(event.id),
                "item": event.item,
                "priority": hashlib.sha256(f"0:{event.id}".encode()).hexdigest()[:32],
            }
            for event in some
        ]
        return sorted(made, key=lambda row: row["priority"])[:3]

    kinds = {"seen": pa.int64(), "event_id": pa.string(), "item": pa.int64(), "priority": pa.string()}
    return table(events, seconds, rows, kinds)


def aggregate(events: list[Event], seconds: int) -> pa.Table:
    def rows(some: list[Event]) -> Rows:
        items = [event.item for event in some]
        return [{"n": len(some), "total": sum(items), "most": max(items)}]

    return table(events, seconds, rows, dict.fromkeys(("n", "total", "most"), pa.int64()))


def product(operator: str, **options: Any) -> Product:
    """A product in windows of a minute, by city."""
    item = {} if operator == "reservoir" else {"item": "item"}
    return Product("gold", "r", SQL, operator=operator, time="t", by=("city",), name="p", **{**item, **options})


def plain(slide: str = "") -> Product:
    """The same of plain SQL."""
    every = f", '{slide}'" if slide else ""
    return Product(
        "gold",
        "r",
        "SELECT window.start AS window_start, window.end AS window_end, city, count(*) AS n, sum(item) AS total, "
        f"max(item) AS most FROM r GROUP BY window(t, '1 minute'{every}), city",
        name="p",
    )


OPERATORS: dict[str, tuple[Callable[[str], Product], Callable[[list[Event], int], pa.Table]]] = {
    "distinct": (lambda slide: product("distinct", slide=slide), distinct),
    "top_n": (lambda slide: product("top_n", n=3, slide=slide), top_n),
    "quantiles": (lambda slide: product("quantiles", slide=slide), quantiles),
    "frequency": (lambda slide: product("frequency", range_bits=5, slide=slide), frequency),
    "membership": (lambda slide: product("membership", items=50, slide=slide), membership),
    "reservoir": (lambda slide: product("reservoir", n=3, slide=slide), reservoir),
    "sql": (plain, aggregate),
}
"""Name to a maker of the product, given its slide or nothing, and of its partial rows, given the pane's seconds."""
