"""Example meters: load by hour, completeness, the next hour's price and its alert, against plain Python."""

from __future__ import annotations

import json
from collections import defaultdict
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ingest.simulate.scenes import CUSTOMERS, SCENES
from tests.lakehouse.examples.play import START_MS, Event, Example, at, parts
from tests.lakehouse.lakes import eventually

pytestmark = pytest.mark.spark
HOUR_MS = 3_600_000
HOURS = 27


def scene() -> list[Event]:
    """Twenty-seven hours of five customers; one reading of c001 was lost before anybody had it."""
    found = islice(SCENES["meters"](3, START_MS), HOURS * 12 * CUSTOMERS)
    some = [event for event in found if event[1]["customer"] in ("c000", "c001", "c002", "c003", "c004")]
    return [event for event in some if (event[1]["customer"], event[1]["seq"]) != ("c001", 40)]


def hourly(events: list[Event]) -> dict[tuple[str, datetime], list[int]]:
    """Energy of each reading, by customer and hour."""
    found: dict[tuple[str, datetime], list[int]] = defaultdict(list)
    for _, reading in events:
        found[reading["customer"], at(reading["at"] // HOUR_MS * HOUR_MS)].append(reading["wh"])
    return found


def prices(events: list[Event]) -> dict[str, tuple[datetime, float]]:
    """Customer to the price of the next hour and when that hour begins, by the formula of docs/examples/meters.md."""
    full: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
    for (customer, hour), energies in hourly(events).items():
        if len(energies) == 12:
            full[customer].append((hour, sum(energies)))
    found = {}
    for customer, hours in full.items():
        newest = sorted(hours)[-24:]
        ratio = newest[-1][1] / (sum(wh for _, wh in newest) / len(newest))
        found[customer] = (newest[-1][0] + timedelta(hours=2), 30 * (0.7 + 0.3 * min(2, ratio)))
    return found


def priced(example: Example, wanted: dict[str, tuple[datetime, float]]) -> bool:
    found = example.rows("next_hour_price") if example.lake.table("gold", "next_hour_price").exists() else []
    return {
        row["customer"]: (row["valid_from"], pytest.approx(row["cents_per_kwh"], abs=0.0051)) for row in found
    } == wanted


def said(example: Example) -> dict[str, str]:
    """Customer to the state of the alert, for those whose price was ever high."""
    return {json.loads(row["key"])["customer"]: row["state"] for row in example.rows("alerts")}


def test_load_completeness_price_and_alert(tmp_path: Path, spark: SparkSession) -> None:
    events = scene()
    example = Example(tmp_path, "meters")
    seen: list[Event] = []
    was_dear: set[str] = set()
    with example.running(spark) as thread:
        for part in parts(events, [600, 60, 60, 60, 400]):
            example.write(part)
            seen += part
            example.wait(thread)
            wanted = prices(seen)
            eventually(partial(priced, example, wanted), alive=thread.is_alive)
            was_dear |= {customer for customer, (_, cents) in wanted.items() if cents >= 36}
        final = prices(events)
        due = {c: "raised" if cents >= 36 else "cleared" for c, (_, cents) in final.items() if not 33 <= cents < 36}
        eventually(
            lambda: {c: s for c, s in said(example).items() if c in due}.items() <= due.items(), 120, thread.is_alive
        )
        eventually(lambda: was_dear <= said(example).keys(), alive=thread.is_alive)
        eventually(lambda: {row["missing"] for row in example.rows("completeness")} == {0, 1}, alive=thread.is_alive)

    assert {
        (row["customer"], row["window_start"]): (row["readings"], row["wh"], row["most_wh"])
        for row in example.rows("hourly_load")
    } == {key: (len(found), sum(found), max(found)) for key, found in hourly(events).items()}
    missing = {row["customer"]: row["missing"] for row in example.rows("completeness")}
    assert missing == {"c000": 0, "c001": 1, "c002": 0, "c003": 0, "c004": 0}
    assert was_dear, "no price was high enough in this scene to raise an alert"
    verified = example.verified(spark)
    assert verified.pop("quarantine", True)
    assert verified == {"hourly_load": True, "completeness": True, "next_hour_price": True}
    rows = DeltaTable(str(example.lake.bronze("readings").path)).to_pyarrow_table(columns=["event_id"])
    assert len(set(rows["event_id"].to_pylist())) == len(events)  # every reading is there, for whatever is asked later
