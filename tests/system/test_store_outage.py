"""The object store of a lake goes away, answers that it is busy, or has no room: nothing is lost, and all goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.broker import EmbeddedBroker
from jobs.local.broker import ensure_topics
from jobs.local.stack import free_port, get_json
from lakehouse.contract.settings import load_settings
from lakehouse.contract.storage import lake_path
from lakehouse.lock import GRACE_S, LIVES_S
from tests.chaos.agent import fill
from tests.chaos.disk import small_disk
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture, pipeline_in
from tests.s3 import CountingProxy, S3Server
from tests.serve.conftest import receive, subscribed, wait_until
from tests.serve.lakes import Product, top_topics, topics, window

pytestmark = pytest.mark.s3
ROOT = Path(__file__).parents[2]
GONE, BACK = "the object store cannot be", "the object store can be"
OUTAGE_S = float(os.environ.get("OUTAGE_S", "60"))


@contextlib.contextmanager
def serving(folder: Path, bucket: str) -> Iterator[tuple[S3Server, CountingProxy]]:
    """The store, whose variables are set for this process, and a proxy before it for the others."""
    server = S3Server(folder, bucket)
    server.start()
    with contextlib.ExitStack() as stops:
        stops.callback(server.stop)
        proxy = CountingProxy(server)
        stops.callback(proxy.close)
        stops.enter_context(server.in_environment())
        yield server, proxy


@contextlib.contextmanager
def millrace(log: Path, proxy: CountingProxy, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process of its own, which reaches the store by the proxy."""
    environ = {**os.environ, **proxy.variables, "PYTHONPATH": str(ROOT)}
    environ |= {"MILLRACE_SPARK_DRIVER_MEMORY": "700m", "MILLRACE_SPARK_REHEARSE": "false"}
    with log.open("ab") as file:
        command = [sys.executable, "-m", "jobs.cli", *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def test_a_server_on_another_machine_goes_on_after_an_outage(tmp_path: Path) -> None:
    """Its work folder is empty, and it reads all tables by the store."""
    lake, port, log = "s3://served/lake", free_port(), tmp_path / "serve.log"
    words = ["serve", "--lake", lake, "--set", f"serve.port={port}", "--set", f"work={tmp_path / 'work'}"]
    with serving(tmp_path / "s3", "served") as (_, store):
        product = top_topics(lake_path(lake))
        product.overwrite(topics(0, [1]), [window(0)])
        with millrace(log, store, *words):
            await followed_through_an_outage(store, product, f"http://127.0.0.1:{port}", log)
    said = log.read_text()
    assert "Traceback" not in said and said.count(GONE) == said.count(BACK) == 1 and "(SlowDown)" in said


async def followed_through_an_outage(store: CountingProxy, product: Product, url: str, log: Path) -> None:
    await wait_until(lambda: get_json(f"{url}/readyz") is not None)
    async with subscribed(url, "top_topics") as connection:
        assert len((await receive(connection, "snapshot"))["rows"]) == 1
        store.busy = True
        await wait_until(lambda: GONE in log.read_text())
        for number in (2, 3):
            await asyncio.to_thread(product.overwrite, topics(number, [number]), [window(number)])
        store.busy = False
        changes = [await receive(connection, "change") for _ in range(2)]
        assert [change["upserts"][0]["count"] for change in changes] == [2, 3]
        await wait_until(lambda: BACK in log.read_text())


class Place:
    """A lake in a store of its own, and drivers of it on several machines."""

    def __init__(self, folder: Path, broker: EmbeddedBroker, bucket: str) -> None:
        self.folder = folder
        pipeline = pipeline_in(folder / "clicks", f"clicks-{bucket}")
        ensure_topics(pipeline.sources.values(), broker.bootstrap)
        settings = load_settings(
            {}, lake=f"s3://{bucket}/lake", pipeline=str(folder / "clicks"), kafka__bootstrap=broker.bootstrap
        )
        self.site = Site(settings, pipeline, broker.bootstrap, [])
        self.sent = 0

    def send(self) -> None:
        """Some more events, of later windows and of earlier ones."""
        self.site.send(mixture(self.sent, 60))
        self.sent += 40

    @contextlib.contextmanager
    def driver(self, store: CountingProxy, machine: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A driver, and its log."""
        log, settings = self.folder / f"{machine}.log", self.site.settings
        words = ["run", "--lake", str(settings.lake), "--pipeline", settings.pipeline]
        words += ["--set", f"work={self.folder / machine}", "--set", f"kafka={self.site.bootstrap}"]
        with millrace(log, store, *words) as process:
            yield process, log


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.soak
def test_a_driver_goes_on_after_outages(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """The store is stopped, then busy, then its disk is full, each for longer than a lock's session lives."""
    with small_disk(tmp_path / "disk", "64m") as disk, serving(disk, "driven") as (server, store):
        place = Place(tmp_path, broker, "driven")
        place.send()
        with place.driver(store, "one") as (process, log):

            def recovered() -> None:
                eventually(place.site.arrived(), alive=lambda: process.poll() is None)

            eventually(place.site.arrived(), alive=lambda: process.poll() is None)
            server.stop()
            place.send()
            time.sleep(OUTAGE_S)
            server.start()
            recovered()
            store.busy = True
            place.send()
            time.sleep(OUTAGE_S)
            store.busy = False
            recovered()
            fill(disk / "ballast")
            place.send()
            time.sleep(OUTAGE_S)
            (disk / "ballast").unlink()
            recovered()
        assert_exact(place.site.lake, place.site.pipeline, place.site.records)
        said = log.read_text()
        print(json.dumps({"seconds": OUTAGE_S, "log": said.splitlines()}))
        assert 3 <= said.count(GONE) == said.count(BACK) <= 10, "read and written, once each"
        assert said.count("terminated with error") <= 3, "Spark says it once an outage"
        assert "ERROR py4j" not in said


@pytest.mark.spark
@pytest.mark.broker
@pytest.mark.soak
def test_a_lock_whose_session_ends_in_an_outage_never_has_two_writers(broker: EmbeddedBroker, tmp_path: Path) -> None:
    """A second driver waits at the door when the store comes back: one of them goes on, and the other one ends."""
    with serving(tmp_path / "s3", "contended") as (server, store):
        place = Place(tmp_path, broker, "contended")
        place.send()
        with place.driver(store, "one") as (one, _):
            eventually(place.site.arrived(), alive=lambda: one.poll() is None)
            server.stop()
            place.send()
            time.sleep(LIVES_S + GRACE_S + 5)
            server.start()
            with place.driver(store, "two") as (two, _):
                eventually(lambda: one.poll() is not None or two.poll() is not None)
                left, gone = (two, one) if two.poll() is None else (one, two)
                assert left.poll() is None
                eventually(place.site.arrived(), alive=lambda: left.poll() is None)
                place.send()
                eventually(place.site.arrived(), alive=lambda: left.poll() is None)
                said = (tmp_path / ("one.log" if gone is one else "two.log")).read_text()
                assert "another process writes" in said
        assert_exact(place.site.lake, place.site.pipeline, place.site.records)
