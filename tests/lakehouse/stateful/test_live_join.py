"""Joins: exact whatever the query dies of and whatever of its state is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from ingest.simulate.scenes import SCENES
from lakehouse.contract.lake import Lake
from lakehouse.errors import BadProduct, QueryFailed
from lakehouse.lock import WriterLocks
from lakehouse.operators.aggregate import Join
from lakehouse.stateful import live_join
from lakehouse.stateful.join_index import JoinIndex, index_folder
from lakehouse.stateful.report import remembered
from tests.crash_points import JOIN_BUILD_CRASH_POINTS, JOIN_CRASH_POINTS
from tests.lakehouse.examples.play import START_MS, Event, Example
from tests.lakehouse.examples.test_ads import click_through, rates, time_to_click

pytestmark = pytest.mark.spark
ROOT = Path(__file__).parents[3]


def scene() -> Iterator[Event]:
    """Impressions that are all clicked or not by chance, quickly."""
    for source, e in SCENES["ads"](11, START_MS):
        if source == "impressions":
            yield source, e
            if int(e["impression_id"][1:]) % 3 == 0:  # type: ignore[index]
                yield (
                    "clicks",
                    {"click_id": f"x{e['impression_id']}", "at": e["at"], "impression_id": e["impression_id"]},
                )
        else:
            yield source, e


def take(events: Iterator[Event], count: int) -> list[Event]:
    """The next of them, a click in two before its impression."""
    found = [next(events) for _ in range(count)]
    return [*found[1::2], *found[::2]]


def assert_exact(example: Example, events: list[Event]) -> None:
    assert rates(example) == click_through(events)
    held = {row["page"]: (row["clicks"], row["waited_ms"], row["longest_ms"]) for row in example.rows("time_to_click")}
    assert held == time_to_click(events)


class AbortedError(RuntimeError):
    """Stands for the end of the process: nothing after it runs."""


@pytest.mark.soak  # make crashes
def test_aborted_at_every_step_and_with_state_lost(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = Example(tmp_path, "ads", repeats=0.1, layers=("gold",))
    upstream = scene()
    sent: list[Event] = []

    def send(count: int) -> None:
        events = take(upstream, count)
        sent.extend(events)
        example.write(events)

    @contextlib.contextmanager
    def aborted(point: str) -> Iterator[None]:
        def abort(name: str) -> None:
            if name == point:
                raise AbortedError(f"at {name}")

        with monkeypatch.context() as patched:
            patched.setattr(live_join, "crash_point", abort)
            yield

    for point in JOIN_CRASH_POINTS:
        send(60)
        with aborted(point), pytest.raises((QueryFailed, AbortedError), match=point), example.running(spark) as driver:
            send(60)
            example.wait(driver, alive=False)
            raise AssertionError("it went on")
    with example.running(spark) as driver:
        example.wait(driver)
    assert_exact(example, sent)
    state = example.lake.state
    losses = [
        state / "joins" / "click_through",
        state / "seen" / "join-click_through",
        example.lake.table("gold", "time_to_click").path,
        state / "readers",
    ]
    for lost in losses:
        shutil.rmtree(lost)
    send(60)
    for point in JOIN_BUILD_CRASH_POINTS:
        with aborted(point), pytest.raises(AbortedError, match=point), example.running(spark):
            raise AssertionError("it started")
    with example.running(spark) as driver:
        example.wait(driver)
        assert_exact(example, sent)
    product = example.pipeline.products["click_through"]
    index = JoinIndex(index_folder(example.lake, "click_through"), product)
    assert len(index) == len({f"{source} {event}" for source, event in sent})
    index.close()
    clicked = next(e["impression_id"] for source, e in sent if source == "clicks")
    found = remembered(example.lake, product, {"impression_id": clicked})
    assert {entry["side"] for entry in found} == {"impressions", "clicks"}  # Spark's join key is Python's
    DeltaTable(str(example.lake.table("gold", "time_to_click").path)).update({"clicks": "clicks + 1"})
    assert example.verified(spark) == {"click_through": True, "time_to_click": False}


@pytest.mark.soak  # make crashes
@pytest.mark.parametrize("time", [1, 2])
def test_killed_at_every_step(tmp_path: Path, lake: Lake, spark: SparkSession, time: int) -> None:
    """In an object store each driver is on a machine that knows nothing of the ones before."""
    example = Example(tmp_path, "ads", repeats=0.1, layers=("gold",), lake=lake)
    upstream = scene()
    sent: list[Event] = []
    command = [sys.executable, "jobs/run_pipeline.py", "--only", "gold", "--lake", str(example.lake.root)]
    command += ["--pipeline", "ads"]

    def send() -> None:
        events = take(upstream, 80)
        sent.extend(events)
        example.write(events)

    for point in JOIN_CRASH_POINTS:
        send()
        changed = {"MILLRACE_SPARK_REHEARSE": "false", "MILLRACE_SPARK_DRIVER_MEMORY": "1g"}
        environ = {**os.environ, **changed, "MILLRACE_CRASH_AT": f"{point}:{time}"}
        machine = ["--set", f"work={tmp_path / point if lake.remote else lake.state}"]
        with WriterLocks(lake, ["click_through"], patience_s=60):
            pass  # the locks of the driver that was killed before have run out
        with (tmp_path / "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, *machine], cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        try:
            while process.poll() is None:  # the first batch is a build: others must come after it
                send()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            assert process.returncode == -signal.SIGKILL, point
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    with WriterLocks(lake, ["click_through"], patience_s=60):
        pass
    with example.running(spark) as driver:
        example.wait(driver)
    assert_exact(example, sent)
    assert example.verified(spark) == {"click_through": True, "time_to_click": True}


@pytest.mark.parametrize(
    ("sql", "more", "says"),
    [
        ("SELECT i.k AS k, max(c.x) AS x, count(*) AS n FROM joined GROUP BY i.k", {"kind": "left_outer"}, "minimum"),
        ("SELECT i.k AS k, count(c.x) AS x FROM joined GROUP BY i.k", {"match": "first"}, "taken back"),
        ("SELECT i.k AS k, count(*) AS n FROM joined GROUP BY i.k", {"match": "first", "storage": "append"}, "partial"),
        ("SELECT i.k AS k, count(*) AS n FROM joined GROUP BY i.k", {"lateness": "1 hour"}, "lateness"),
    ],
)
def test_what_cannot_be_kept_is_refused(sql: str, more: dict[str, str], says: str) -> None:
    from lakehouse.contract.pipeline import Product

    product = Product("gold", "i", sql, operator="join", right="c", on=("k",), name="p", **more)  # type: ignore[arg-type]
    with pytest.raises(BadProduct, match=says):
        Join(product)
