"""The whole crash matrix: kill -9 at every point of the write path, at the first, second and third time it is passed.

`make crashes`; a minute a kill beside other work on two cores. Joins are in stateful/test_live_join.py. By default one
driver is killed, at a point that a seed chooses (test_stages.py), and what needs no Spark (care, queries that are
cleared away, loads).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from jobs.local.broker import ensure_topics
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.load.commit import write_rows
from lakehouse.replay import digest, verify
from tests.crash_points import ADDED_CRASH_POINTS, REBUILD_CRASH_POINTS, points_of
from tests.lakehouse.derived.test_added import CITIES, Queries, by_city
from tests.lakehouse.lakes import Sent, Site, assert_exact, click, eventually, mixture, sent, site
from tests.lakehouse.test_evolution import redeclared
from tests.lakehouse.test_sources import Added
from tests.lakehouse.test_stream import ALL_EQUAL, driver

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.soak]
POINTS_OF_ONE_PRODUCT = ["bronze.before_append", "bronze.after_append", "live.before_commit", "live.after_commits"]
S3 = pytest.param("s3", 1, marks=pytest.mark.s3)
POINTS = points_of("bronze.", "live.")


STATEFUL = """
[sources.clicks]
topic = "TOPIC"
schema = "id BIGINT, at BIGINT, who STRING, price BIGINT, tags ARRAY<STRING>, place STRUCT<city: STRING, lat: DOUBLE>"
event_id = "{id}"
event_time = "timestamp_millis(at)"
required = ["id", "at", "who", "place.city"]
partitions = 1                           # so that the order, and with it the windows by count, is the same again

[sources.clicks.expectations]
price_not_negative = "price IS NULL OR price >= 0"

[products.visits]
layer = "gold"
source = "clicks"
operator = "sessions"
by = ["who"]
time = "event_time"
gap = "2 seconds"
aggregates = { n = "count(*)", most = "max(price)" }

[products.sevens]
layer = "gold"
source = "clicks"
operator = "count_window"
by = ["city"]
time = "event_time"
size = 7
aggregates = { n = "count(*)", total = "sum(price)" }
sql = "SELECT event_time, place.city AS city, price FROM clicks"

[products.prices]
layer = "gold"
source = "clicks"
operator = "drift"
by = ["city"]
time = "event_time"
value = "price"
detector = "page_hinkley"
parameters = { min_instances = 5, threshold = 3.0 }
sql = "SELECT event_time, place.city AS city, CAST(price AS DOUBLE) AS price FROM clicks"
"""


def stateful(folder: Path, bootstrap: str, topic: str) -> Site:
    """A lake of its own on a topic, with products that remember."""
    place = site(folder, bootstrap, topic)
    (folder / "clicks" / "pipeline.toml").write_text(STATEFUL.replace("TOPIC", topic), encoding="utf-8")
    return dataclasses.replace(place, pipeline=load_pipeline(folder / "clicks"))


def to_one_partition(records: Sequence[Sent]) -> list[Sent]:
    """Records for a topic of one partition."""
    return [OnlyPartition(record.payload, record.event_id, record.reject) for record in records]


class OnlyPartition(Sent):
    """A record of a topic that has one."""

    @property
    def partition(self) -> int:
        return 0


def digests_of(place: Site) -> dict[str, str]:
    stores = [(p, place.lake.table(p.layer, p.name)) for p in place.pipeline.products.values()]
    return {p.name: digest(DeltaTable(str(table.path)).to_pyarrow_table()) for p, table in stores}


@pytest.mark.parametrize("time", [1, 2])
def test_products_that_remember_at_every_point(
    tmp_path: Path, broker: EmbeddedBroker, spark: SparkSession, time: int
) -> None:
    """Sessions, windows by count and drift of one driver: as of a driver that nobody killed, and as a replay gives."""
    topic = f"clicks-{uuid.uuid4().hex[:8]}"
    (tmp_path / "first" / "clicks").mkdir(parents=True)
    (tmp_path / "first" / "clicks" / "pipeline.toml").write_text(STATEFUL.replace("TOPIC", topic), encoding="utf-8")
    ensure_topics(load_pipeline(tmp_path / "first" / "clicks").sources.values(), broker.bootstrap)  # with one partition
    place = stateful(tmp_path / "killed", broker.bootstrap, topic)
    sent = 0

    def send() -> None:
        nonlocal sent
        place.send(to_one_partition(mixture(20 * sent, 30)))  # ten ids again each time
        sent += 1

    for point in POINTS:
        send()
        killed_at(place, f"{point}:{time}", send)
    place.run_until_arrived(spark)
    whole = stateful(tmp_path / "whole", broker.bootstrap, topic)
    whole.run_until_arrived(spark)
    assert digests_of(place) == digests_of(whole)
    rows = {name: DeltaTable(str(place.lake.table("gold", name).path)) for name in place.pipeline.products}
    assert all(table.to_pyarrow_dataset().count_rows() > 3 for table in rows.values())
    found = {f.table: f.equal for f in verify(spark, place.settings, place.pipeline)}
    assert found == {"visits": True, "sevens": True, "prices": True, "quarantine": True}


def test_a_query_that_is_added_and_killed_as_it_begins(
    new_site: Callable[..., Site], spark: SparkSession, bucket: str
) -> None:
    """Events count in it from when it began; copies of earlier ones do not, whatever was noted when it died."""
    place, early = new_site(bucket), mixture(0, 80)
    queries = Queries(place)
    place.send(early)
    place.run_until_arrived(spark)
    queries.add("new_cities", CITIES)
    for point in ADDED_CRASH_POINTS:
        killed_at(place, point)
    assert queries.declared.state("new_cities").since
    place.send([*early[:20], *mixture(1_000, 60)])
    with place.moved().running(spark) as alive:
        before, everything = by_city(early), by_city(place.records)
        late = {
            city: (n - before.get(city, (0, 0))[0], total - before.get(city, (0, 0))[1])
            for city, (n, total) in everything.items()
        }
        eventually(lambda: queries.cities("new_cities") == late, alive=alive)
        assert {f.table: f.equal for f in verify(spark, place.settings, place.pipeline)}["new_cities"]


def killed_at(place: Site, point: str, send: Callable[[], None] = lambda: None) -> None:
    """Run a driver that dies at this point, feeding it until it does."""
    process = driver(place, point)
    try:
        while process.poll() is None:
            send()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert process.returncode == -signal.SIGKILL, point
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_source_that_changes_while_its_driver_dies(
    new_site: Callable[..., Site], spark: SparkSession, bucket: str
) -> None:
    """Stopped and not started; with products and without its query; forgotten and not built."""
    place = new_site(bucket)
    for number, point in enumerate(("source.after_stop", "source.after_products:2", "rebuild.after_forget")):
        waiting = [lambda n=number: redeclared(place, (f"price >= {-n}", f"price >= {-n - 1}"))]
        place.send(mixture(100 * number, 60))
        arrived = place.arrived()

        def change(arrived: Callable[[], bool] = arrived, waiting: list[Callable[[], Site]] = waiting) -> None:
            if waiting and arrived():
                waiting.pop()()

        killed_at(place, point, change)
        assert not waiting
    place = redeclared(place, ("price >= -3", "price >= 0"))
    place.send(mixture(50, 100))
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL


@pytest.mark.parametrize("point", ["source.after_products:2", *POINTS_OF_ONE_PRODUCT])
def test_a_source_that_is_added_while_its_driver_dies(
    new_site: Callable[[], Site], spark: SparkSession, point: str
) -> None:
    """Its events count once, also those that came before the driver knew the source."""
    place = new_site()
    place.send(mixture(0, 60))
    place.run_until_arrived(spark)  # so that the driver passes the point for the added source alone
    added, log = Added(place), place.folder / "driver.log"

    def add() -> None:
        if not added.file.exists() and "metrics at" in log.read_text(encoding="utf-8"):
            added.declare()
            ensure_topics(declared_pipeline(place.settings).sources.values(), place.bootstrap)
            added.send(0, 30)

    killed_at(place, point, add)
    assert added.file.exists()
    added.send(20, 20)  # ten of them again
    place.send(mixture(40, 40))
    with place.running(spark) as alive:
        eventually(added.holds("guests"), alive=alive)
        eventually(place.arrived(), alive=alive)
    assert {row["who"]: row["n"] for row in added.rows("guests")} == {"w0": 14, "w1": 13, "w2": 13}
    assert_exact(place.lake, place.pipeline, place.records)
    assert all(f.equal for f in verify(spark, place.settings, declared_pipeline(place.settings)))


@pytest.mark.parametrize(("bucket", "time"), [("folder", 1), ("folder", 2), ("folder", 3), S3], indirect=["bucket"])
def test_every_point_at_every_time(new_site: Callable[..., Site], spark: SparkSession, bucket: str, time: int) -> None:
    """In an object store two machines take turns, each with what it knew when it died."""
    place = new_site(bucket)
    sent = 0

    def send() -> None:
        nonlocal sent
        place.send(mixture(20 * sent, 30))  # ten ids again each time
        sent += 1

    for number, point in enumerate(POINTS):
        send()
        killed_at(place.moved() if number % 2 else place, f"{point}:{time}", send)
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL


@pytest.mark.parametrize("point", POINTS)
def test_a_loader_commits_before_and_behind_the_batch_that_dies(
    new_site: Callable[[], Site], spark: SparkSession, point: str
) -> None:
    """A batch is handed over in memory, the loader's commits around it are read from bronze; then nothing is known."""
    place, source = new_site(), "clicks"
    loaded: list[Sent] = []

    def load(first: int) -> None:
        some = [sent(click(number)) for number in range(first, first + 20)]
        payloads = [record.payload or b"" for record in some]
        assert write_rows(place.lake, place.pipeline.sources[source], f"from {first}", payloads) > 0
        loaded.extend(some)

    place.send(mixture(0, 60))
    load(1_000)
    again = iter(range(2_000, 100_000, 100))

    def both() -> None:
        place.send(mixture(next(again), 20))
        load(next(again))

    killed_at(place, f"{point}:2", both)  # the second time: it has taken a batch, and knows where it is
    load(next(again))
    place.send(place.records[:20])
    place.run_until_arrived(spark)
    place.records += loaded
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL


def test_building_again_is_begun_again(new_site: Callable[..., Site], spark: SparkSession, bucket: str) -> None:
    place = new_site(bucket)
    place.send(mixture(0, 100))
    place.run_until_arrived(spark)
    for number, point in enumerate(REBUILD_CRASH_POINTS):
        place = redeclared(place, (f"price >= {-number}", f"price >= {-number - 1}"))
        place.send(mixture(1_000 + 100 * number, 30))
        killed_at(place, point)
    place = redeclared(place, (f"price >= {-len(REBUILD_CRASH_POINTS)}", "price >= 0"))
    with place.moved().running(spark) as alive:
        eventually(place.arrived(), alive=alive)
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL
