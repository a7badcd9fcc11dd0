"""Example clickstream: pages by visitor and hour, visits with expiry, coupons, against plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from ingest.simulate.scenes import SCENES
from tests.lakehouse.examples.play import START_MS, Event, Example, at, parts
from tests.lakehouse.lakes import eventually

pytestmark = pytest.mark.spark
GAP = 1_800_000


def scene() -> list[Event]:
    """Some four hours, with the events of one visitor in ten an hour late."""
    found = list(islice(SCENES["clickstream"](2, START_MS), 9_000))
    few = [event for event in found if int(event[1]["visitor"][1:]) % 4 == 0]
    late = [event for event in few if event[1]["visitor"].endswith("8")]
    rest = [event for event in few if not event[1]["visitor"].endswith("8")]
    alike = {**found[0][1], "visitor": "exact", "kind": "view"}
    exact = [(found[0][0], {**alike, "action_id": 10**9 + n, "at": START_MS + n * GAP}) for n in range(3)]
    # Just the gap apart, two of them in one batch: three visits.
    return [*exact[:2], *rest[: len(rest) * 3 // 4], *late, *rest[len(rest) * 3 // 4 :], exact[2]]


def views(events: list[Event]) -> dict[tuple[Any, str], int]:
    hour = 3_600_000
    return dict(Counter((at(e["at"] // hour * hour), e["visitor"]) for _, e in events if e["kind"] == "view"))


def visits(events: list[Event]) -> dict[tuple[str, Any], tuple[Any, ...]]:
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, e in events:
        by[e["visitor"]].append(e)
    newest = max(e["at"] for _, e in events)
    found: dict[tuple[str, Any], tuple[Any, ...]] = {}
    for visitor, acts in by.items():
        groups: list[list[dict[str, Any]]] = []
        for e in sorted(acts, key=lambda e: e["at"]):
            if groups and e["at"] - groups[-1][-1]["at"] < GAP:
                groups[-1].append(e)
            else:
                groups.append([e])
        for some in groups:
            kinds = Counter(e["kind"] for e in some)
            removed = [e for e in some if e["kind"] == "remove"]
            last = max((f"{e['at']:014d} {e['sku']}" for e in removed), default=None)
            found[visitor, at(some[0]["at"])] = (
                at(some[-1]["at"]),
                newest - some[-1]["at"] >= GAP,
                len(some),
                *(kinds[kind] for kind in ("view", "add", "remove", "buy")),
                last,
            )
    return found


COLUMNS = ("session_end", "closed", "actions", "views", "added", "removed", "bought", "last_removed")


def held(example: Example) -> dict[tuple[str, Any], tuple[Any, ...]]:
    rows = example.rows("visits")
    return {(row["visitor"], row["session_start"]): tuple(row[name] for name in COLUMNS) for row in rows}


def coupons(events: list[Event]) -> set[tuple[str, Any, str]]:
    return {
        (visitor, start, row[7][15:])
        for (visitor, start), row in visits(events).items()
        if not row[1] and row[5] and not row[6]
    }


def test_views_visits_and_coupons(tmp_path: Path, spark: SparkSession) -> None:
    events = scene()
    example = Example(tmp_path, "clickstream")
    chunks = list(parts(events, [500, 400, 400]))
    example.write(chunks[0])
    with example.running(spark) as driver:
        example.wait(driver)
        assert held(example) == visits(chunks[0])
        example.write(chunks[1])
        example.wait(driver)
        assert held(example) == visits([*chunks[0], *chunks[1]])
    with example.running(spark) as driver:
        for chunk in chunks[2:]:
            example.write(chunk)
        example.wait(driver)
        wanted = coupons(events)
        shown = lambda: {(r["visitor"], r["session_start"], r["sku"]) for r in example.rows("coupons")}  # noqa: E731
        eventually(lambda: shown() == wanted, alive=driver.is_alive)
        assert wanted
    assert held(example) == visits(events)
    assert {row[1] for row in visits(events).values()} == {True, False}
    rows = {(row["window_start"], row["visitor"]): row["views"] for row in example.rows("views_by_hour")}
    assert rows == views(events)
    found = example.verified(spark)
    assert found["visits"]
    assert found["views_by_hour"]
    assert found["quarantine"]
