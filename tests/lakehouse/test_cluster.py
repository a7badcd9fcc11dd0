"""The same jobs on a Spark standalone cluster: a master and two workers of our own, one of them killed on the way.

`make cluster`; some four minutes beside other work on two cores.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from lakehouse.replay import verify
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture
from tests.lakehouse.test_stream import ALL_EQUAL, ROOT

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.soak]
SPARK_HOME = Path(pyspark.__file__).parent
BINARIES = Path(sys.executable).parent


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Cluster:
    """A master and two workers, each with its executors in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def start(self) -> None:
        address = ["--host", "127.0.0.1", "--webui-port", "0"]
        self._start("master", "org.apache.spark.deploy.master.Master", *address, "--port", str(self._port))
        eventually(lambda: listens(self._port), alive=lambda: self._parts["master"].poll() is None)
        for name in ("worker-1", "worker-2"):
            sizes = ["--cores", "1", "--memory", "700m", "--work-dir", str(self._folder / name)]
            self._start(name, "org.apache.spark.deploy.worker.Worker", *address, *sizes, self.url)
        for name in ("worker-1", "worker-2"):
            eventually(lambda name=name: "Successfully registered" in self.log(name))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def executors(self, name: str) -> int:
        """Executors that a worker has started."""
        return self.log(name).count("Asked to launch executor")

    def kill(self, name: str) -> None:
        """SIGKILL to a part and to the executors it started."""
        process = self._parts.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for name in list(self._parts)[::-1]:
            self.kill(name)

    def _start(self, name: str, main: str, *arguments: str) -> None:
        memory = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(SPARK_HOME)}
        with (self._folder / f"{name}.log").open("wb") as log:
            self._parts[name] = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), main, *arguments],
                env={**os.environ, **memory},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@contextlib.contextmanager
def submitted(place: Site, cluster: Cluster) -> Iterator[Callable[[], bool]]:
    """The pipeline by spark-submit; yields a check that it runs."""
    environ = {**os.environ, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "MILLRACE_SPARK_REHEARSE": "false"}
    environ.pop("SPARK_HOME", None)
    command = [str(BINARIES / "spark-submit"), "--master", cluster.url, "--driver-memory", "1g"]
    command += ["--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=1"]
    command += ["jobs/run_pipeline.py", "--lake", str(place.lake.root), "--pipeline", place.settings.pipeline]
    command += ["--set", f"kafka={place.bootstrap}"]
    with (place.lake.root.parent / "driver.log").open("wb") as log:
        driver = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        yield lambda: driver.poll() is None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGTERM)
        try:
            driver.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def test_a_worker_is_killed_and_the_result_is_exact(
    new_site: Callable[[], Site], cluster: Cluster, spark: SparkSession
) -> None:
    place = new_site()
    place.send(mixture(0, 150))
    with submitted(place, cluster) as alive:
        eventually(place.arrived(), 300, alive)
        eventually(lambda: cluster.executors("worker-1") > 0 and cluster.executors("worker-2") > 0, 120, alive)
        for number in range(1, 6):
            place.send(mixture(1_000 * number, 100))
            if number == 2:
                cluster.kill("worker-1")  # with tasks of the batches in hand
        eventually(place.arrived(), 300, alive)
    assert_exact(place.lake, place.pipeline, place.records)
    found = verify(spark, place.settings, place.pipeline)
    assert [(item.table, item.equal) for item in found] == ALL_EQUAL
