"""Example ads: click-through of an outer join, time to click of an inner one, against plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ingest.simulate.scenes import SCENES
from tests.lakehouse.examples.play import START_MS, Event, Example, at, parts

pytestmark = pytest.mark.spark
WITHIN = 600_000


def scene() -> list[Event]:
    """Thirteen minutes: one clicked impression in ten and one in a hundred of the others; half of the clicks early."""
    every = list(islice(SCENES["ads"](5, START_MS), 40_000))
    clicked = {e["impression_id"] for source, e in every if source == "clicks"}
    found = [e for e in every if e[1]["impression_id"].endswith("3" if e[1]["impression_id"] in clicked else "13")]
    early = [n for n, (source, _) in enumerate(found) if source == "clicks" and n % 2]
    for n in early:
        found.insert(0, found.pop(n))
    return found


def pairs(events: list[Event]) -> dict[str, list[int]]:
    """Impression to the times of its clicks within the bound, in ms, in order."""
    shown = {e["impression_id"]: e for source, e in events if source == "impressions"}
    found: dict[str, list[int]] = defaultdict(list)
    for source, e in events:
        impression = shown.get(e["impression_id"]) if source == "clicks" else None
        if impression is not None and 0 <= e["at"] - impression["at"] <= WITHIN:
            found[e["impression_id"]].append(e["at"])
    return {impression: sorted(times) for impression, times in found.items()}


def click_through(events: list[Event]) -> dict[tuple[object, str], tuple[int, int]]:
    clicked = pairs(events)
    shown: Counter[tuple[object, str]] = Counter()
    clicks: Counter[tuple[object, str]] = Counter()
    for source, e in events:
        if source == "impressions":
            key = (at(e["at"] // 60_000 * 60_000), e["campaign"])
            shown[key] += 1
            clicks[key] += e["impression_id"] in clicked
    return {key: (count, clicks[key]) for key, count in shown.items()}


def time_to_click(events: list[Event]) -> dict[str, tuple[int, int, int]]:
    shown = {e["impression_id"]: e for source, e in events if source == "impressions"}
    found: dict[str, list[int]] = defaultdict(list)
    for impression, times in pairs(events).items():
        found[shown[impression]["page"]] += [time - shown[impression]["at"] for time in times]
    return {page: (len(waits), sum(waits), max(waits)) for page, waits in found.items()}


def test_click_through_and_time_to_click(tmp_path: Path, spark: SparkSession) -> None:
    events = scene()
    example = Example(tmp_path, "ads")
    chunks = list(parts(events, [170, 130, 200]))
    assert sum(len(times) for times in pairs(events).values()) > 50
    assert any(len(times) > 1 for times in pairs(events).values())
    example.write(chunks[0])  # built from bronze at the start
    with example.running(spark) as driver:
        example.wait(driver)
        example.write(chunks[1])
        example.wait(driver)
        assert rates(example) == click_through([*chunks[0], *chunks[1]])
    with example.running(spark) as driver:
        for chunk in chunks[2:]:
            example.write(chunk)
        example.wait(driver)
    assert rates(example) == click_through(events)
    held = {row["page"]: (row["clicks"], row["waited_ms"], row["longest_ms"]) for row in example.rows("time_to_click")}
    assert held == time_to_click(events)
    assert example.verified(spark) == {"click_through": True, "time_to_click": True}


def rates(example: Example) -> dict[tuple[object, str], tuple[int, int]]:
    rows = example.rows("click_through")
    return {(row["window_start"], row["campaign"]): (row["impressions"], row["clicks"]) for row in rows}
