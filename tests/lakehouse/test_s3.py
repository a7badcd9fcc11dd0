"""A lake in an object store: drivers, loader, replay and server on a real S3-compatible server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.broker import EmbeddedBroker
from jobs.local.broker import ensure_topics
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings
from tests.lakehouse.lakes import Site, assert_exact, eventually, mixture, pipeline_in

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.s3, pytest.mark.soak]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(s3: str, tmp_path: Path, broker: EmbeddedBroker) -> Site:
    """A lake below a prefix of its own."""
    pipeline = pipeline_in(tmp_path / "clicks", f"clicks-{uuid.uuid4().hex[:8]}")
    ensure_topics(pipeline.sources.values(), broker.bootstrap)
    settings = load_settings(
        {},
        lake=f"{s3}/{uuid.uuid4().hex}",
        work=str(tmp_path / "work"),
        pipeline=str(tmp_path / "clicks"),
        kafka__bootstrap=broker.bootstrap,
    )
    return Site(settings, pipeline, broker.bootstrap, [])


def command(place: Site, *words: str, work: Path | None = None) -> list[str]:
    settings = place.settings
    options = ["--lake", str(settings.lake), "--pipeline", settings.pipeline]
    options += ["--set", f"work={work or settings.work}", "--set", f"kafka={place.bootstrap}"]
    return [sys.executable, "-m", "jobs.cli", words[0], *options, *words[1:]]


@contextlib.contextmanager
def driver(place: Site, log: Path, work: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, "MILLRACE_SPARK_DRIVER_MEMORY": "700m", "MILLRACE_SPARK_REHEARSE": "false"}
    with log.open("ab") as file:
        process = subprocess.Popen(command(place, "run", work=work), cwd=ROOT, env=environ, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_exact_through_a_kill_and_on_another_machine(place: Site, tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    place.send(mixture(0, 60))
    with driver(place, log) as process:
        eventually(place.arrived(), alive=lambda: process.poll() is None)
        place.send(mixture(40, 60))
        process.send_signal(signal.SIGKILL)
        process.wait()
    killed_at = time.monotonic()
    place.send(mixture(100, 20))
    # Another machine: nothing of the first one's work folder, and its locks have to run out.
    other = tmp_path / "other"
    while time.monotonic() - killed_at < 120:
        with driver(place, log, other) as process:
            eventually(lambda: place.arrived()() or process.poll() is not None)
            if process.poll() is None:
                break
    assert_exact(place.lake, place.pipeline, place.records)
    again = Site(place.settings, place.pipeline, place.bootstrap, place.records)
    done = subprocess.run(
        command(again, "replay", "--verify", work=other), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [found for found in Lake.of(place.settings).root.parent.iterdir() if found.name == "work"]
