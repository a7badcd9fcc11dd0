"""Both queries, from a real broker to real tables: exact, whatever is lost or killed on the way."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from jobs.local.broker import ensure_topics
from lakehouse.bronze.table import progress
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.errors import QueryFailed, TableBusy, TopicReplaced
from lakehouse.live import LiveProducts
from lakehouse.lock import WriterLocks
from lakehouse.replay import digest, verify
from lakehouse.session import JVM_OPTIONS
from tests.crash_points import points_of
from tests.lakehouse.lakes import (
    Sent,
    Site,
    assert_exact,
    ends,
    eventually,
    mixture,
    pipeline_in,
    produce,
    result,
    site,
)

pytestmark = [pytest.mark.spark, pytest.mark.broker]
ROOT = Path(__file__).parents[2]
QUICK = ("--driver-java-options", JVM_OPTIONS)  # what a driver of ours has by itself


def verified(spark: SparkSession, place: Site) -> list[tuple[str, bool]]:
    return [(found.table, found.equal) for found in verify(spark, place.settings, place.pipeline)]


ALL_EQUAL = [(name, True) for name in ("per_city", "totals", "top_tags", "visitors", "quarantine")]


def digests(place: Site) -> dict[str, str]:
    return {name: digest(result(place.lake, place.pipeline, name)) for name in place.pipeline.products}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, broker: EmbeddedBroker, spark: SparkSession) -> Site:
    """A lake that has run, for several tests: each leaves it whole."""
    place = site(tmp_path_factory.mktemp("kept"), broker.bootstrap, f"clicks-{uuid.uuid4().hex[:8]}")
    place.send(mixture(0, 150))
    with place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        place.send(mixture(100, 150))  # fifty ids again, among others
        eventually(place.arrived(), alive=alive)
    return place


def test_products_are_exact(kept: Site, spark: SparkSession) -> None:
    assert_exact(kept.lake, kept.pipeline, kept.records)
    assert verified(spark, kept) == ALL_EQUAL


def test_a_lost_checkpoint_a_lost_index_and_all_state_lost(kept: Site, spark: SparkSession) -> None:
    state = kept.lake.state
    admin = KafkaAdminClient(bootstrap_servers=kept.bootstrap)
    admin.create_partitions({kept.topic: 5})  # more than the pipeline declares
    admin.close()
    for number, lost in enumerate([state / "checkpoints", state / "seen", state]):
        before = digests(kept)
        shutil.rmtree(lost)
        with kept.running(spark) as alive:
            eventually(kept.arrived(), alive=alive)
            assert digests(kept) == before
            kept.send(mixture(1_000 + 100 * number, 20))
            kept.send(kept.records[:20])
            eventually(kept.arrived(), alive=alive)
        assert_exact(kept.lake, kept.pipeline, kept.records)
    assert verified(spark, kept) == ALL_EQUAL
    rows = DeltaTable(str(kept.lake.bronze("clicks").path)).to_pyarrow_table(columns=["partition", "offset"])
    assert rows.num_rows == len(kept.records)  # bronze took nothing twice


def test_lost_tables_are_built_again_and_kept_up_to_date(kept: Site, spark: SparkSession) -> None:
    before = digests(kept)
    for table in (kept.lake.table("gold", "top_tags"), kept.lake.table("silver", "per_city"), kept.lake.quarantine()):
        shutil.rmtree(table.path)
    with kept.running(spark) as alive:
        assert digests(kept) == before
        kept.send(mixture(2_000, 30))
        eventually(kept.arrived(), alive=alive)
    assert_exact(kept.lake, kept.pipeline, kept.records)
    assert verified(spark, kept) == ALL_EQUAL


def test_a_tampered_product_is_found(kept: Site, spark: SparkSession) -> None:
    table = DeltaTable(str(kept.lake.table("gold", "totals").path))
    start = min(table.to_pyarrow_table()["window_start"].to_pylist())
    place = f"window_start = arrow_cast('{start.isoformat()}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
    try:
        table.update({"n": "n + 1"}, predicate=place)
        found = dict(verified(spark, kept))
        assert found == {name: name != "totals" for name, _ in ALL_EQUAL}
    finally:
        table.update({"n": "n - 1"}, predicate=place)


def test_a_tampered_quarantine_is_found(kept: Site, spark: SparkSession) -> None:
    table = DeltaTable(str(kept.lake.quarantine().path))
    before = table.version()
    try:
        table.delete("reason = 'expectation price_not_negative failed'")
        assert dict(verified(spark, kept)) == {name: name != "quarantine" for name, _ in ALL_EQUAL}
    finally:
        table.restore(before)


def test_a_second_writer_is_refused(kept: Site, spark: SparkSession) -> None:
    with WriterLocks(kept.lake, ["visitors"]):
        with pytest.raises(TableBusy, match="another process writes visitors"), kept.running(spark):
            pytest.fail("it started")
        command = [
            sys.executable,
            "jobs/run_pipeline.py",
            "--only",
            "gold",
            "--lake",
            str(kept.lake.root),
            "--pipeline",
        ]
        done = subprocess.run(
            [*command, kept.settings.pipeline],
            cwd=ROOT,
            env={**os.environ, "MILLRACE_SPARK_REHEARSE": "false", "MILLRACE_SPARK_DRIVER_MEMORY": "512m"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "another process writes" in done.stderr.splitlines()[-1]


def test_a_query_that_fails_says_which_and_why(new_site: Callable[[], Site], spark: SparkSession) -> None:
    place = new_site()
    place.send(mixture(0, 5))
    with pytest.raises(QueryFailed) as caught, place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        # The rows that a batch must be merged with are gone: going on would make the product wrong.
        shutil.rmtree(place.lake.table("gold", "visitors").path)
        place.send(mixture(100, 5))
        eventually(lambda: not alive())
    assert (caught.value.query, caught.value.condition) == ("live-clicks", "FileNotFoundError")
    assert "gold/visitors" in str(caught.value)
    place.run_until_arrived(spark)  # built again from bronze
    assert_exact(place.lake, place.pipeline, place.records)


def made_again(place: Site) -> None:
    """The topic as it is after its broker's disk was lost: of the same name, and empty."""
    admin = KafkaAdminClient(bootstrap_servers=place.bootstrap)

    def created() -> bool:
        try:  # it is gone some time after the broker has said so
            admin.create_topics({place.topic: {"num_partitions": 2, "replication_factor": 1}})
        except KafkaError:
            return False
        return True

    admin.delete_topics([place.topic])
    eventually(created, 60)
    eventually(lambda: not ends(place.bootstrap, place.topic), 60)
    admin.close()


def copied(place: Site, topic: str) -> None:
    """As docs/operations/running.md says: all records of the site's topic to another one, with their headers."""
    found = ends(place.bootstrap, place.topic)
    reader = KafkaConsumer(bootstrap_servers=place.bootstrap, auto_offset_reset="earliest", metrics_enabled=False)
    writer = KafkaProducer(bootstrap_servers=place.bootstrap, acks="all")
    try:
        reader.assign([TopicPartition(place.topic, number) for number in range(len(found))])
        left = sum(found.values())
        while left:
            for records in reader.poll(timeout_ms=1_000).values():
                for one in records:
                    writer.send(topic, one.value, one.key, headers=one.headers, partition=one.partition)
                left -= len(records)
        writer.flush(60)
    finally:
        writer.close()
        reader.close()


def test_products_that_die_two_batches_behind_take_both_from_bronze(
    new_site: Callable[[], Site], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one batch in hand and one waits; the next commit to bronze waits for them."""
    place, die = new_site(), threading.Event()
    bronze = DeltaLog(place.lake.bronze("clicks").path)

    def dies(*_: object) -> None:
        die.wait(120)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(LiveProducts, "_step", dies)
        with pytest.raises(QueryFailed), place.running(spark) as alive:
            first = bronze.newest()
            for number in range(3):
                place.send(mixture(40 * number, 60))  # twenty ids again each time
                eventually(lambda n=number: bronze.newest() == min(first + 2, first + 1 + n), alive=alive)
            planned = place.lake.checkpoint("bronze-clicks") / "offsets"
            eventually(lambda: (planned / "2").exists(), alive=alive)  # Spark has the third batch in hand
            time.sleep(2)
            assert bronze.newest() == first + 2
            die.set()
            eventually(lambda: not alive())
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert verified(spark, place) == ALL_EQUAL


def test_a_start_takes_its_first_events_apart_and_a_crash_behind_them_is_as_any_other(
    new_site: Callable[[], Site], spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, bronze = new_site(), []

    def dies(live: LiveProducts, _: int) -> None:
        bronze.append(DeltaTable(str(place.lake.bronze(live.source.name).path)).to_pyarrow_dataset().to_table())
        raise ZeroDivisionError

    place.send(mixture(0, 2_500))
    with monkeypatch.context() as patch:
        patch.setattr(LiveProducts, "wait_taken", dies)
        with pytest.raises(QueryFailed, match="ZeroDivisionError"), place.running(spark) as alive:
            eventually(lambda: not alive())
    [taken] = bronze
    sent = Counter(record.partition for record in place.records)
    found = Counter(taken["partition"].to_pylist())
    assert found == {partition: math.ceil(count * 1_000 / len(place.records)) for partition, count in sent.items()}
    for partition, count in found.items():  # its first ones
        rows = taken.filter(pc.equal(taken["partition"], partition))
        assert sorted(rows["offset"].to_pylist()) == list(range(count))
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert verified(spark, place) == ALL_EQUAL


def test_a_topic_that_begins_anew_is_refused_until_the_source_has_another(
    new_site: Callable[[], Site], spark: SparkSession, tmp_path: Path
) -> None:
    place = new_site()
    place.send(mixture(0, 80))
    with pytest.raises(TopicReplaced, match="offset was changed from"), place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
        made_again(place)
        eventually(lambda: not alive())
    bronze = place.lake.bronze("clicks")
    taken = progress(bronze).offsets
    others: list[Sent] = []
    for count in (20, 200):  # ends before what bronze has taken, and behind it
        new = mixture(5_000 + len(others), count)
        others += new
        produce(place.bootstrap, place.topic, new)
        found = ends(place.bootstrap, place.topic)
        assert {found[at] > end for at, end in taken.items()} == {count == 200}
        with pytest.raises(TopicReplaced, match="its id was"), place.running(spark, accept_loss=count == 20):
            pytest.fail("it started")
    assert progress(bronze).offsets == taken
    pipeline = pipeline_in(place.pipeline.path.parent, f"{place.topic}-again")
    ensure_topics(pipeline.sources.values(), place.bootstrap)
    moved = Site(place.settings, pipeline, place.bootstrap, place.records + others)
    copied(place, moved.topic)
    moved.run_until_arrived(spark)
    assert_exact(moved.lake, moved.pipeline, moved.records)
    rows = DeltaTable(str(bronze.path)).to_pyarrow_table(columns=["topic", "partition", "offset"])
    assert rows.num_rows == len(moved.records)


def driver(place: Site, crash_at: str) -> subprocess.Popen[bytes]:
    """All stages in a process of their own."""
    place.wait_for_locks()
    command = [sys.executable, "jobs/run_pipeline.py", "--lake", str(place.lake.root)]
    command += ["--pipeline", place.settings.pipeline, "--set", f"kafka={place.bootstrap}"]
    command += ["--set", f"work={place.settings.work_folder()}"]
    changed = {"MILLRACE_SPARK_REHEARSE": "false", "MILLRACE_SPARK_DRIVER_MEMORY": "1g", "MILLRACE_CRASH_AT": crash_at}
    log = (place.folder / "driver.log").open("ab")
    with log:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **changed}, stdout=log, stderr=log, start_new_session=True
        )


@pytest.mark.soak  # test_crashes.py goes on from here: each point at each of its first passages
def test_killed_at_every_crash_point_nothing_is_lost_or_counted_twice(
    new_site: Callable[[], Site], spark: SparkSession
) -> None:
    place = new_site()
    for number, point in enumerate(points_of("bronze.", "live.")):
        place.send(mixture(100 * number, 60))
        process = driver(place, point)
        try:
            assert process.wait(400) == -signal.SIGKILL, point
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    place.send(mixture(0, 30))
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert verified(spark, place) == ALL_EQUAL
