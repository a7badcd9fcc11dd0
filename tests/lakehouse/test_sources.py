"""Sources that are added, changed and removed while a driver runs: on a real broker, Spark and Delta."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.replay import verify
from tests.lakehouse.lakes import Sent, Site, assert_exact, ends, eventually, mixture, produce, through
from tests.lakehouse.test_evolution import redeclared

pytestmark = [pytest.mark.spark, pytest.mark.broker]

VISITS = """
topic = "TOPIC"
schema = "id BIGINT, who STRING"
event_id = "{id}"
event_time = "received_at"
[products.guests]
layer = "gold"
sql = "SELECT who, count(*) AS n FROM visits GROUP BY who"
"""


def running() -> dict[str, int]:
    """Thread of each source's products by its name: another one is another start."""
    return {thread.name: id(thread) for thread in threading.enumerate() if thread.name.startswith("live-")}


class Added:
    """A source in a file of its own, and its topic."""

    def __init__(self, place: Site) -> None:
        self.place = place
        self.topic = f"{place.topic}-visits"
        self.file = place.settings.control_state / "sources" / "visits.toml"

    def declare(self, *changes: tuple[str, str]) -> None:
        text = VISITS.replace("TOPIC", self.topic)
        for change in changes:
            text = text.replace(*change)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.file)

    def send(self, first: int, count: int) -> None:
        payloads = [json.dumps({"id": n, "who": f"w{n % 3}"}).encode() for n in range(first, first + count)]
        produce(self.place.bootstrap, self.topic, [Sent(payload, None) for payload in payloads])

    def holds(self, *names: str) -> Callable[[], bool]:
        targets = ends(self.place.bootstrap, self.topic)
        return lambda: through(self.place.lake, declared_pipeline(self.place.settings), targets, *names)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return DeltaTable(str(self.place.lake.table("gold", name).path)).to_pyarrow_table().to_pylist()  # type: ignore[no-any-return]


def test_sources_come_change_and_go_while_the_others_run(
    new_site: Callable[[], Site], spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    place = new_site()
    added = Added(place)
    place.send(mixture(0, 60))
    with place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        before = running()
        began = time.monotonic()
        added.declare()
        eventually(lambda: "live-visits" in running(), alive=alive)
        assert time.monotonic() - began < 60
        added.send(0, 30)
        eventually(added.holds("guests"), alive=alive)
        assert sorted((row["who"], row["n"]) for row in added.rows("guests")) == [("w0", 10), ("w1", 10), ("w2", 10)]

        undisturbed = running()
        added.declare(("who, count", "whom, count"))  # seen without Spark: nothing stops
        eventually(lambda: "there is no column 'whom'" in caplog.text, alive=alive)
        assert running() == undisturbed
        added.declare(("SELECT who, count(*)", "SELECT who, sum(size(who))"))  # seen by Spark alone
        eventually(lambda: "source visits goes on as it was declared before" in caplog.text, alive=alive)
        assert "DATATYPE_MISMATCH" in caplog.text
        added.send(30, 30)
        eventually(added.holds("guests"), alive=alive)
        assert sum(row["n"] for row in added.rows("guests")) == 60

        added.declare(("SELECT who, count(*)", "SELECT who, max(id) AS last, count(*)"), ('"{id}"', '"{id}:{who}"'))
        eventually(lambda: "last" in added.rows("guests")[0], alive=alive)
        added.send(55, 10)  # five of them copies
        eventually(added.holds("guests"), alive=alive)
        assert (
            sum(row["n"] for row in added.rows("guests")),
            max(row["last"] for row in added.rows("guests")),
        ) == (65, 64)
        assert running()["live-clicks"] == before["live-clicks"], "the other source went on"

        visits = running()["live-visits"]
        place = redeclared(place, ("price >= 0", "price >= -1"), ("[products.totals]", "[products.counts]"))
        eventually(lambda: running().get("live-clicks", visits) not in (before["live-clicks"], visits), alive=alive)
        eventually(place.arrived(), alive=alive)
        place = redeclared(place, ("price >= -1", "price >= 0"), ("[products.counts]", "[products.totals]"))
        place.send(mixture(40, 60))
        eventually(place.arrived(), alive=alive)
        eventually(lambda: len(running()) == 2, alive=alive)
        assert running()["live-visits"] == visits

        added.file.unlink()
        eventually(lambda: "live-visits" not in running(), alive=alive)
        place.send(mixture(200, 20))
        eventually(place.arrived(), alive=alive)
    assert_exact(place.lake, place.pipeline, place.records)
    assert all(found.equal for found in verify(spark, place.settings, place.pipeline))
    assert os.path.isdir(place.lake.table("gold", "guests").path), "tables of a removed source stay"


def test_a_source_that_cannot_start_keeps_no_driver_from_starting(
    new_site: Callable[[], Site], spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    place = new_site()
    added = Added(place)
    added.declare(("SELECT who, count(*)", "SELECT who, sum(size(who))"))
    place.send(mixture(0, 20))
    with place.running(spark) as alive:
        assert "source visits cannot start: [DATATYPE_MISMATCH" in caplog.text
        eventually(place.arrived(), alive=alive)
        added.declare()
        eventually(lambda: "live-visits" in running(), alive=alive)
    assert_exact(place.lake, place.pipeline, place.records)
