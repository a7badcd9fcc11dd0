"""The whole crash matrix: kill -9 at every point of the write path, at the first, second and third time it is passed.

`make crashes`; a minute a kill beside other work on two cores. test_stream.py kills once at each point, by default.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from lakehouse.contract.faults import CRASH_POINTS, REBUILD_CRASH_POINTS
from lakehouse.replay import verify
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture
from tests.lakehouse.test_evolution import redeclared
from tests.lakehouse.test_stream import ALL_EQUAL, driver

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.soak]
POINTS = [point for point in CRASH_POINTS if point.startswith(("bronze.", "live."))]


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


@pytest.mark.parametrize("time", [1, 2, 3])
def test_every_point_at_every_time(new_site: Callable[[], Site], spark: SparkSession, time: int) -> None:
    place = new_site()
    sent = 0

    def send() -> None:
        nonlocal sent
        place.send(mixture(20 * sent, 30))  # ten ids again each time
        sent += 1

    for point in POINTS:
        send()
        killed_at(place, f"{point}:{time}", send)
    place.run_until_arrived(spark)
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL


def test_building_again_is_begun_again(new_site: Callable[[], Site], spark: SparkSession) -> None:
    place = new_site()
    place.send(mixture(0, 100))
    place.run_until_arrived(spark)
    for number, point in enumerate(REBUILD_CRASH_POINTS):
        place = redeclared(place, (f"price >= {-number}", f"price >= {-number - 1}"))
        place.send(mixture(1_000 + 100 * number, 30))
        killed_at(place, point)
    place = redeclared(place, (f"price >= {-len(REBUILD_CRASH_POINTS)}", "price >= 0"))
    with place.running(spark) as alive:
        eventually(place.arrived(), alive=alive)
    assert_exact(place.lake, place.pipeline, place.records)
    assert [(f.table, f.equal) for f in verify(spark, place.settings, place.pipeline)] == ALL_EQUAL
