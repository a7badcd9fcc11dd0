"""The same jobs on a Spark standalone cluster: a master and two workers of our own, one of them killed on the way.

`make cluster`; some ten minutes beside other work on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker, access_rules
from jobs.local.broker import ensure_topics, grant
from lakehouse.contract.settings import KafkaSettings, load_settings
from lakehouse.events import SMALL_BATCH
from lakehouse.replay import verify
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture, pipeline_in
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
        here = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}  # executors are told
        with (self._folder / f"{name}.log").open("wb") as log:
            self._parts[name] = subprocess.Popen(
                [str(SPARK_HOME / "bin" / "spark-class"), main, *arguments],
                env={**here, **memory},
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
def submitted(place: Site, cluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """The pipeline by spark-submit."""
    place.wait_for_locks()
    environ = {**os.environ, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "MILLRACE_SPARK_REHEARSE": "false"}
    environ.pop("SPARK_HOME", None)
    command = [str(BINARIES / "spark-submit"), "--master", cluster.url, "--driver-memory", "1g"]
    command += ["--conf", "spark.executor.memory=512m", "--conf", "spark.executor.cores=1"]
    command += ["jobs/run_pipeline.py", "--lake", str(place.lake.root), "--pipeline", place.settings.pipeline]
    command += ["--set", f"kafka={place.bootstrap}", "--set", f"work={place.settings.work_folder()}"]
    for name, value in dataclasses.asdict(place.settings.kafka.security).items():
        command += ["--set", f"kafka.{name}={value}"]
    with (place.folder / "driver.log").open("ab") as log:
        driver = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        yield driver
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGTERM)
        try:
            driver.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def runs(driver: subprocess.Popen[bytes]) -> Callable[[], bool]:
    """Check that it has not ended."""
    return lambda: driver.poll() is None


def test_a_worker_is_killed_and_the_result_is_exact(
    new_site: Callable[[], Site], cluster: Cluster, spark: SparkSession
) -> None:
    place = new_site()
    place.send(mixture(0, 150))
    with submitted(place, cluster) as driver:
        sent_while_a_worker_is_killed(place, cluster, driver)
        eventually(place.arrived(), 300, runs(driver))
    assert_exact(place.lake, place.pipeline, place.records)
    found = verify(spark, place.settings, place.pipeline)
    assert [(item.table, item.equal) for item in found] == ALL_EQUAL


def sent_while_a_worker_is_killed(place: Site, cluster: Cluster, driver: subprocess.Popen[bytes]) -> None:
    eventually(place.arrived(), 300, runs(driver))
    eventually(lambda: cluster.executors("worker-1") > 0 and cluster.executors("worker-2") > 0, 120, runs(driver))
    for number in range(1, 6):
        place.send(mixture(1_000 * number, 100))
        if number == 2:
            cluster.kill("worker-1")  # with tasks of the batches in hand


@pytest.fixture
def secured(tmp_path: Path, s3: str) -> Iterator[Site]:
    """A lake in an object store, and a broker with TLS, passwords and access rules that Millrace has not started."""
    broker = EmbeddedBroker(tmp_path / "kafka", heap_mb=256, die_with_parent=True, secure=True)
    broker.start(timeout_s=180)
    try:
        admin, login = broker.security("admin"), broker.security("lakehouse")
        pipeline = pipeline_in(tmp_path / "clicks", "clicks")
        ensure_topics(pipeline.sources.values(), broker.bootstrap, security=admin)
        grant(KafkaSettings(bootstrap=broker.bootstrap).secured_by(admin), access_rules(pipeline))
        settings = load_settings(
            {}, lake=f"{s3}/{uuid.uuid4().hex}", work=str(tmp_path / "work"), pipeline=str(tmp_path / "clicks")
        )
        kafka = dataclasses.replace(settings.kafka, bootstrap=broker.bootstrap).secured_by(login)
        yield Site(dataclasses.replace(settings, kafka=kafka), pipeline, broker.bootstrap, [], admin)
    finally:
        broker.stop()


@pytest.mark.s3
def test_on_an_object_store_a_worker_and_then_the_driver_are_killed(
    secured: Site, cluster: Cluster, spark: SparkSession
) -> None:
    """A second driver, on a machine that has nothing of the first one's, takes over once the locks have run out."""
    place = secured
    place.send(mixture(0, 150))
    with submitted(place, cluster) as driver:
        sent_while_a_worker_is_killed(place, cluster, driver)
        os.killpg(driver.pid, signal.SIGKILL)
    other = place.moved()
    other.send([*mixture(2_050, 100), *mixture(9_000, SMALL_BATCH)])  # a long batch, whose files the executors write
    with submitted(other, cluster) as driver:
        eventually(other.arrived(), 300, runs(driver))
        other.send(mixture(2_100, 100))  # fifty ids again
        eventually(other.arrived(), 300, runs(driver))
    assert_exact(other.lake, other.pipeline, other.records)
    found = verify(spark, other.settings, other.pipeline)
    assert [(item.table, item.equal) for item in found] == ALL_EQUAL
