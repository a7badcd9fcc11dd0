"""Example trips: speed by age over sliding windows, every hundred rides of a city, drift, against plain Python."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from river import drift

from ingest.simulate.scenes import SCENES
from tests.lakehouse.examples.play import START_MS, Event, Example, at, parts

pytestmark = pytest.mark.spark
LENGTH, SLIDE = 1_800_000, 5_000


def scene() -> list[Event]:
    """A minute and a half of rides, and two that took no time."""
    found = list(islice(SCENES["trips"](3, START_MS), 1_500))
    return [
        *found[:700],
        *((source, {**e, "trip_id": -e["trip_id"], "seconds": 0}) for source, e in found[5:7]),
        *found[700:],
    ]


def valid(events: list[Event]) -> list[dict[str, Any]]:
    return [e for _, e in events if e["seconds"] > 0]


def group(age: int) -> str:
    return "under 25" if age < 25 else "25 to 39" if age < 40 else "40 to 59" if age < 60 else "60 and over"


def speeds(events: list[Event]) -> dict[tuple[Any, str], tuple[int, int, int]]:
    found: dict[tuple[Any, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for e in valid(events):
        last = e["at"] // SLIDE * SLIDE
        for start in range(last, last - LENGTH, -SLIDE):
            row = found[at(start), group(e["age"])]
            row[0] += 1
            row[1] += e["metres"]
            row[2] += e["seconds"]
    return {key: (row[0], row[1], row[2]) for key, row in found.items()}


def in_bronze_order(example: Example, commits: list[list[Event]]) -> list[dict[str, Any]]:
    """Events as bronze has them: by commit, then by partition and offset; copies left out."""
    source = example.pipeline.sources["trips"]
    found = []
    for events in commits:
        rows = [(example.partition(source, e), n, e) for n, (_, e) in enumerate(events) if e["seconds"] > 0]
        found += [e for _, _, e in sorted(rows, key=lambda row: row[:2])]
    return found


def hundreds(ordered: list[dict[str, Any]], size: int = 100) -> dict[tuple[str, int], tuple[Any, ...]]:
    cities: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for e in ordered:
        cities[e["city"]].append(e)
    found: dict[tuple[str, int], tuple[Any, ...]] = {}
    for city, rides in cities.items():
        for number in range(0, len(rides), size):
            some = rides[number : number + size]
            sums = (sum(e["metres"] for e in some), sum(e["seconds"] for e in some))
            ages = [e["age"] for e in some]
            found[city, number // size] = (len(some), len(some) == size, *sums, min(ages), max(ages))
    return found


def alarms(ordered: list[dict[str, Any]]) -> list[tuple[str, int, Any]]:
    detectors: dict[str, drift.ADWIN] = defaultdict(drift.ADWIN)
    counts: dict[str, int] = defaultdict(int)
    found = []
    for e in ordered:
        detectors[e["city"]].update(e["metres"] / e["seconds"])
        if detectors[e["city"]].drift_detected:
            counts[e["city"]] += 1
            found.append((e["city"], counts[e["city"]], at(e["at"])))
    return sorted(found)


def faster(events: list[Event]) -> list[Event]:
    """The same rides, three times as quick: tail wind."""
    return [(source, {**e, "metres": 3 * e["metres"]}) for source, e in events]


def test_speed_hundreds_and_drift(tmp_path: Path, spark: SparkSession) -> None:
    events = scene()
    example = Example(tmp_path, "trips")
    commits = list(parts(events, [300, 250, 200]))
    commits = [*commits[:2], faster(commits[2]), faster(commits[3])]
    example.write(commits[0])
    with example.running(spark) as driver:
        example.wait(driver)
        example.write(commits[1])
        example.wait(driver)
    with example.running(spark) as driver:
        for commit in commits[2:]:
            example.write(commit)
        example.wait(driver)
    everything = [event for commit in commits for event in commit]
    held = {
        (row["window_start"], row["age_group"]): (row["rides"], row["metres"], row["seconds"])
        for row in example.rows("speed_by_age")
    }
    assert held == speeds(everything)
    ordered = in_bronze_order(example, commits)
    columns = ("events", "complete", "metres", "seconds", "youngest", "oldest")
    windows = {(row["city"], row["number"]): tuple(row[c] for c in columns) for row in example.rows("hundred_rides")}
    assert windows == hundreds(ordered)
    assert sum(row[1] for row in windows.values()) > 5
    rows = [(row["city"], row["number"], row["at"]) for row in example.rows("speed_drift") if row["number"]]
    assert sorted(rows) == alarms(ordered)
    assert rows
    assert set(example.verified(spark).items()) == {
        (name, True) for name in ("speed_by_age", "hundred_rides", "speed_drift", "quarantine")
    }
