"""The three styles of answers through everything: a collector's process, a broker, Spark, and the tables it commits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from ingest.broker import EmbeddedBroker
from jobs.local.broker import ensure_topics
from jobs.local.stack import free_port
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings
from tests.lakehouse.lakes import Site, eventually

pytestmark = [pytest.mark.spark, pytest.mark.broker]
ROOT = Path(__file__).parents[2]
SOURCE = """
[sources.STYLE]
topic = "TOPIC-STYLE"
schema = "id BIGINT, who STRING"
event_id = "{id}"
event_time = "received_at"
partitions = 1
respond = "STYLE"
[[sources.STYLE.collectors]]
kind = "http"
[sources.STYLE.answer]
product = "by_STYLE"
key = { who = "{who}" }
timeout = "5 minutes"
callback_hosts = ["127.0.0.1:PORT"]
[products.by_STYLE]
layer = "gold"
source = "STYLE"
sql = "SELECT who, count(*) AS n FROM STYLE GROUP BY who"
"""
STYLES = ("sync", "half_async", "full_async")


@contextmanager
def receiver() -> Iterator[tuple[int, Queue[dict[str, Any]]]]:
    """A server that answers are pushed to: its port, and what it got."""
    got: Queue[dict[str, Any]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, got
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def collector(place: Site, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command, ready; killed at the end."""
    command = [sys.executable, "-m", "jobs.cli", "collect", "--lake", str(place.settings.lake)]
    command += ["--pipeline", place.settings.pipeline]
    command += ["--set", f"kafka={place.bootstrap}", "--set", f"collect.port={port}"]
    with (place.settings.lake.parent / "collect.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120
        while not ready(port):
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it is not ready"
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_each_style_through_spark_and_a_callback_that_outlives_its_node(
    tmp_path: Path, broker: EmbeddedBroker, spark: SparkSession
) -> None:
    port, topic = free_port(), f"answers-{uuid.uuid4().hex[:8]}"
    with (
        receiver() as (callback_port, pushed),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=400, trust_env=False) as client,
    ):
        folder = tmp_path / "answers"
        folder.mkdir()
        texts = [SOURCE.replace("STYLE", style) for style in STYLES]
        text = "".join(texts).replace("TOPIC", topic).replace("PORT", str(callback_port))
        (folder / "pipeline.toml").write_text(text, encoding="utf-8")
        pipeline = load_pipeline(folder)
        ensure_topics(pipeline.sources.values(), broker.bootstrap)
        settings = load_settings({}, lake=tmp_path / "lake", pipeline=str(folder), kafka__bootstrap=broker.bootstrap)
        place = Site(settings, pipeline, broker.bootstrap, [])
        callback = f"/v1/full_async?callback=http://127.0.0.1:{callback_port}/done"

        with collector(place, port) as node:
            first = client.post(callback, json={"id": 1, "who": "ann"})
            assert first.status_code == 202
            node.send_signal(signal.SIGKILL)  # nobody computes answers yet
            node.wait()
        with place.running(spark), collector(place, port):
            for number in (1, 2):
                answer = client.post("/v1/sync", json={"id": number, "who": "ann"})
                assert (answer.status_code, answer.json()["product"]) == (200, "by_sync")
                assert answer.json()["rows"] == [{"who": "ann", "n": number}]

            taken = client.post("/v1/half_async", json={"id": 1, "who": "bob"})
            assert taken.status_code == 202
            answer = client.get(taken.headers["location"])
            assert (answer.status_code, answer.json()["rows"]) == (200, [{"who": "bob", "n": 1}])

            late = pushed.get(timeout=300)
            assert (late["token"], late["rows"]) == (first.json()["token"], [{"who": "ann", "n": 1}])
            second = client.post(callback, json={"id": 2, "who": "ann"})
            answer = pushed.get(timeout=300)
            assert (answer["token"], answer["rows"]) == (second.json()["token"], [{"who": "ann", "n": 2}])
            assert client.get(second.headers["location"]).json()["rows"] == answer["rows"]
            eventually(lambda: not list(place.lake.state.glob("collect/*/callbacks/*")))
            assert pushed.empty(), "each answer is pushed once"
