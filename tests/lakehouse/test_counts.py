"""Events that arrive too late are counted for each source, without a product that asks for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest
from deltalake import DeltaTable
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from jobs.cli import app
from jobs.local.stack import DRIVER, PARTS, parts, write_note
from lakehouse.bronze.readers import too_late
from lakehouse.counts import TOO_LATE
from tests.lakehouse.lakes import T0, Sent, Site, click, eventually, sent
from tests.lakehouse.test_evolution import redeclared

pytestmark = [pytest.mark.spark, pytest.mark.broker]


def late(number: int, minutes: float, **changed: object) -> Sent:
    """An event that arrives this long after its event time: all of them arrive at T0 + 1 s."""
    return sent(click(number, at=int((T0.timestamp() + 1 - 60 * minutes) * 1000), **changed))


def metric() -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(TOO_LATE)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {one.labels["lateness"]: one.value for one in samples if one.labels["source"] == "clicks"}


def counted(place: Site) -> dict[str, int]:
    return too_late(place.lake, place.lake.bronze("clicks"))


def test_too_late_events_count_once_per_declared_lateness(new_site: Callable[[], Site], spark: SparkSession) -> None:
    TOO_LATE.clear()
    place = redeclared(
        new_site(),
        ("partitions = 2", 'partitions = 2\nlateness = "10 minutes"'),
        ("[products.totals]", '[products.totals]\nlateness = "1 hour"'),
    )
    place.send([late(n, 5) for n in range(20)])
    with place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        assert counted(place) == metric() == {"10 minutes": 0, "1 hour": 0}
        # At the limit is not too late. Copies and rejected events do not count.
        place.send([late(20, 10), late(21, 10.001), *[late(22, 30)] * 3, late(23, 90), late(24, 90, price=-1)])
        eventually(place.arrived(), alive=alive)
        # The products are ahead of the note of the position for a moment.
        eventually(lambda: counted(place) == {"10 minutes": 3, "1 hour": 1}, alive=alive)
        assert metric() == counted(place)
    rows = DeltaTable(str(place.lake.find("totals").path)).to_pyarrow_table()
    assert sum(rows["n"].to_pylist()) == 23, "what is later than its own hour is in no window of totals"

    place.send([late(25, 45), late(21, 10.001)])
    place.run_until_arrived(spark)
    assert counted(place) == {"10 minutes": 4, "1 hour": 1}, "a restart goes on from the noted counts"

    shutil.rmtree(place.lake.state)
    place.run_until_arrived(spark)
    assert counted(place) == {"10 minutes": 4, "1 hour": 1}, "lost counts come from bronze"

    place = redeclared(place, ('lateness = "1 hour"', 'lateness = "40 minutes"'))
    place.run_until_arrived(spark)
    assert counted(place) == {"10 minutes": 4, "40 minutes": 2}, "another lateness holds for the past too"

    where = ["--lake", str(place.lake.root), "--pipeline", place.settings.pipeline]
    told = CliRunner().invoke(app, ["tables", "--json", *where])
    facts = {entry["table"]: entry["too_late"] for entry in json.loads(told.stdout)}
    assert facts["clicks"] == counted(place)
    assert facts["totals"] == {}
    run = place.lake.state / "run"
    run.mkdir(exist_ok=True)
    write_note(run / PARTS, {"lakehouse": None})
    write_note(run / DRIVER, {})
    (driver,) = parts(place.lake)
    assert driver.remarks == "too late: clicks 4 (10 minutes), clicks 2 (40 minutes)"
