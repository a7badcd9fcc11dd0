"""A lake in an object store: drivers, care, replay and server's tails on a real S3-compatible server.

What else runs there is in the tests that take ``bucket`` or ``lake`` for an argument.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable
from kafka import KafkaAdminClient, TopicPartition
from pyspark.sql import SparkSession

from jobs.local.supervise import Child, Supervisor
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import TableRef
from lakehouse.maintain import care
from lakehouse.replay import verify
from serve.tables.state import TableReader
from serve.tables.tables import Opened, Tail
from tests.lakehouse.lakes import Site, assert_exact, ends, eventually, mixture
from tests.lakehouse.test_stream import ALL_EQUAL
from tests.s3 import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.s3, pytest.mark.soak]
ROOT = Path(__file__).parents[2]


def command(place: Site, *words: str) -> list[str]:
    settings = place.settings
    options = ["--lake", str(settings.lake), "--pipeline", settings.pipeline]
    options += ["--set", f"work={settings.work}", "--set", f"kafka={place.bootstrap}", "--set", "spark.rehearse=false"]
    return [sys.executable, "-m", "jobs.cli", words[0], *options, *words[1:]]


def test_a_second_driver_is_refused_and_takes_over_when_the_first_is_killed(
    new_site: Callable[..., Site], s3: str, s3_server: S3Server
) -> None:
    """It is on a machine that knows nothing of the first one's, and its supervisor starts it again and again."""
    place, second, environ = new_site(s3), Supervisor(), {"MILLRACE_SPARK_DRIVER_MEMORY": "700m"}
    other, logs = place.moved(), (place.folder / "first.log", place.folder / "second.log")
    with logs[0].open("ab") as log:
        first = subprocess.Popen(command(place, "run"), cwd=ROOT, env={**os.environ, **environ}, stdout=log, stderr=log)
    try:
        place.send(mixture(0, 60))
        eventually(place.arrived(), alive=lambda: first.poll() is None)
        second.start(Child("run", command(other, "run")[3:], logs[1], environ))
        eventually(lambda: second.tend() or second.restarts["run"] > 1)
        assert first.poll() is None
        assert "error: another process writes" in logs[1].read_text(encoding="utf-8")
        place.send(mixture(40, 60))
        first.kill()
        killed_at = time.time()
        place.send(mixture(100, 20))
        arrived = place.arrived()
        eventually(lambda: second.tend() or arrived())
    finally:
        first.kill()
        first.wait()
        second.stop()
    locks = s3_server.file(place.lake.shared / "locks" / "totals.lock").iterdir()
    taken_after = min(at for file in locks if (at := file.stat().st_mtime - killed_at) > 0)
    print(f"taken over after {taken_after:.0f} s")
    assert taken_after < 60
    assert_exact(place.lake, place.pipeline, place.records)
    done = subprocess.run(
        command(place.moved("third"), "replay"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [found for found in place.lake.root.parent.iterdir() if found.name == "work"]


def test_two_machines_take_turns(new_site: Callable[..., Site], s3: str, spark: SparkSession) -> None:
    """The first one's checkpoint names records that Kafka no longer has, and bronze took from the second."""
    place = new_site(s3)
    place.send(mixture(0, 60))
    place.run_until_arrived(spark)
    place.send(mixture(30, 60))
    place.moved().run_until_arrived(spark)
    admin = KafkaAdminClient(bootstrap_servers=place.bootstrap)
    gone = {TopicPartition(*divided(at)): end for at, end in ends(place.bootstrap, place.topic).items()}
    admin.delete_records(gone)
    admin.close()
    place.send(mixture(60, 60))
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    rows = DeltaTable(str(place.lake.bronze("clicks").path)).to_pyarrow_table(columns=["offset"])
    assert rows.num_rows == len(place.records)


def divided(at: str) -> tuple[str, int]:
    topic, _, number = at.rpartition("/")
    return topic, int(number)


class Following:
    """The rows of a table, as a server follows them, in a thread."""

    def __init__(self, table: TableRef) -> None:
        self.table = table
        self.rows: dict[tuple[object, ...], tuple[object, ...]] = {}
        self.version = -1
        self.breaks: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._task = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)

    def close(self) -> None:
        """End it. Raises what has ended it before."""
        if not self._task.cancel():
            self._task.result()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _follow(self) -> None:
        async for found in Tail(TableReader(self.table.path), poll_ms=50).follow():
            if isinstance(found, Opened):
                state = found.state
                self.breaks += [found.detail] if found.detail else []
            self.rows, self.version = dict(state.rows), state.version


def test_care_beside_the_queries_and_who_follows_them(
    new_site: Callable[..., Site], s3: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are put together and removed after each batch, and logs are cut, as in a lake of many hours."""
    place = new_site(s3)
    for name in ("LOOK_EVERY_S", "TIDY_EVERY_S", "SWEEP_EVERY_S"):
        monkeypatch.setattr(care, name, 0.0)
    done: list[object] = []

    def noted(function: Callable[..., object], *arguments: object, **options: object) -> object:
        done.append(found := function(*arguments, **options))
        return found

    eager = {"compact_bronze": {"many": 2}, "compact_product": {"many": 2}, "checkpoint_log": {"every": 1}}
    for name, options in eager.items():
        monkeypatch.setattr(care, name, partial(noted, getattr(care, name), **options))
    bronze = place.lake.bronze("clicks")
    tables = [place.lake.table(product.layer, product.name) for product in place.pipeline.products.values()]
    with ExitStack() as stack:
        followed = [stack.enter_context(closing(Following(table))) for table in tables]
        with place.running(spark) as alive, care.Caretaker(place.lake, place.pipeline):
            for number in range(12):
                place.send(mixture(20 * number, 30))
                eventually(place.arrived(), alive=alive)
                if number in (3, 10):  # at last they are long enough again for the proof, which reads an older version
                    kept = f"interval {'0 seconds' if number == 3 else '1 day'}"
                    properties = {f"delta.{what}RetentionDuration": kept for what in ("log", "deletedFile")}
                    DeltaTable(str(bronze.path)).alter.set_table_properties(properties)
            eventually(lambda: DeltaLog(bronze.path).checkpoints() != [], alive=alive)
        assert {"folded", "log checkpoint"} <= {found for found in done if isinstance(found, str)}
        assert any(isinstance(found, int) and found > 0 for found in done)
        assert_exact(place.lake, place.pipeline, place.records)
        assert [(found.table, found.equal) for found in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL
        for one in followed:
            eventually(lambda one=one: one.version == DeltaLog(one.table.path).newest(), 60)
            assert (one.breaks, one.rows) == ([], TableReader(one.table.path).load().rows), one.table.name
