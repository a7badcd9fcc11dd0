"""Bronze, silver and gold in drivers of their own, which spark-submit starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from lakehouse.session import JVM_OPTIONS
from tests.chaos.agent import dice
from tests.crash_points import points_of
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture

pytestmark = [pytest.mark.spark, pytest.mark.broker]
ROOT = Path(__file__).parents[2]
QUICK = ("--driver-java-options", JVM_OPTIONS)  # what a driver of ours has by itself


def metrics_of(log: Path) -> dict[str, float]:
    """What a driver serves at the address that its log names: its JVM and its queries too."""
    address = re.findall(r"metrics at (\S+)", log.read_text())[-1]
    with urllib.request.urlopen(address, timeout=30) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, _, value in lines}
    assert found["millrace_lakehouse_spark_up"] == 1
    assert found["jvm_process_resident_memory_bytes"] > found["process_resident_memory_bytes"] > 0
    return found


def test_stages_in_drivers_of_their_own_by_spark_submit_one_of_them_killed(new_site: Callable[[], Site]) -> None:
    """kill -9 of bronze's driver or of gold's at one of its crash points; CHAOS_SEED says which."""
    chance = dice("stages")
    point = chance.choice(points_of("bronze.", "live."))
    killed = "bronze" if point.startswith("bronze.") else "gold"
    place = new_site()
    place.send(mixture(0, 60))
    binaries = Path(sys.executable).parent
    environ = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "MILLRACE_SPARK_REHEARSE": "false"}
    environ.pop("SPARK_HOME", None)
    drivers: dict[str, subprocess.Popen[bytes]] = {}

    def submit(name: str, crash_at: str = "") -> None:
        command = [str(binaries / "spark-submit"), "--driver-memory", "512m", *QUICK, "jobs/run_pipeline.py"]
        command += ["--only", name, "--lake", str(place.lake.root), "--pipeline", place.settings.pipeline]
        if name == "bronze":
            command += ["--set", f"kafka={place.bootstrap}"]
        env = {**environ, "MILLRACE_CRASH_AT": crash_at}
        with (place.lake.root.parent / f"{name}.log").open("ab") as log:
            drivers[name] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    try:
        for name in ("bronze", "silver", "gold"):
            submit(name, f"{point}:{chance.randint(1, 3)}" if name == killed else "")
        number = 100
        while drivers[killed].poll() is None:
            place.send(mixture(number := number + 20, 20))
            with contextlib.suppress(subprocess.TimeoutExpired):
                drivers[killed].wait(1)
        assert drivers[killed].returncode == 128 + signal.SIGKILL  # as Java tells it of its Python
        submit(killed)
        alive = lambda: all(process.poll() is None for process in drivers.values())  # noqa: E731
        eventually(place.arrived(), 600, alive)
        last = mixture(30, 60)
        place.send(last)
        eventually(place.arrived(), 600, alive)
        every = len(place.records)
        for name in drivers:
            least = len(last) if name == killed else every  # its counts died with it

            def told(name: str = name, least: int = least) -> bool:
                taken = f'millrace_lakehouse_events_total{{query="{name}-clicks",what="taken"}}'
                return least <= metrics_of(place.lake.root.parent / f"{name}.log").get(taken, 0) <= every

            eventually(told, 60, alive)
        share = 'millrace_lakehouse_retention_share{source="clicks"}'
        eventually(lambda: metrics_of(place.lake.root.parent / "bronze.log").get(share, 1.0) < 0.1, 60, alive)
    finally:
        for process in drivers.values():
            os.killpg(process.pid, signal.SIGTERM)
        for process in drivers.values():
            process.wait(120)
    assert_exact(place.lake, place.pipeline, place.records)
    replay = [sys.executable, "-m", "jobs.cli", "replay", "--lake", str(place.lake.root)]
    done = subprocess.run([*replay, "--pipeline", place.settings.pipeline], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0
