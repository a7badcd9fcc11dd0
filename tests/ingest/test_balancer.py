"""Two collectors on machines of their own behind a TCP balancer (haproxy), one of which is killed.

They share the lake, which is in an object store, and Kafka. Each has a work folder of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake

from ingest.broker import EmbeddedBroker
from ingest.node import CollectorNode, NodeOptions
from jobs.local.stack import free_port
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import lake_path
from tests.ingest.answers.test_respond import answering, get, request
from tests.ingest.conftest import at_broker, consume, event, eventually, settings_of
from tests.ingest.lakes import commit
from tests.ingest.test_relay import refining, two_step

pytestmark = [pytest.mark.broker, pytest.mark.s3, pytest.mark.soak]
ROOT = Path(__file__).parents[2]
SENDERS = 4
HAPROXY = """
defaults
  mode tcp
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  option redispatch
listen collectors
  bind 127.0.0.1:{port}
  option httpchk GET /readyz
  default-server check inter 200ms fall 1 rise 1
"""


@contextlib.contextmanager
def balancer(folder: Path, ports: list[int]) -> Iterator[str]:
    """haproxy before these ports; its address."""
    if (binary := shutil.which("haproxy", path="/usr/sbin:/usr/bin:/usr/local/sbin")) is None:
        pytest.skip("haproxy is not installed (Debian: apt-get install haproxy)")
    port, file = free_port(), folder / "haproxy.cfg"
    servers = "".join(f"  server node{port} 127.0.0.1:{port}\n" for port in ports)
    file.write_text(HAPROXY.format(port=port) + servers)
    process = subprocess.Popen([binary, "-db", "-q", "-f", file])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Nodes:
    """The collectors, each in a process that can be killed."""

    def __init__(self, folder: Path, lake: str, bootstrap: str, topic: str, *, front: bool) -> None:
        self.ports = [free_port(), free_port()]
        self._arguments = [str(folder), lake, bootstrap, topic, "front" if front else ""]
        self._running: dict[int, asyncio.subprocess.Process] = {}

    async def start(self, port: int) -> None:
        script = "import sys; from tests.ingest.test_balancer import collector; collector(*sys.argv[1:])"
        command = [sys.executable, "-c", script, *self._arguments, str(port)]
        self._running[port] = await asyncio.create_subprocess_exec(*command, cwd=ROOT)

    async def kill(self, port: int) -> None:
        process = self._running.pop(port)
        process.kill()
        await process.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            for port in self.ports:
                await self.start(port)
            for port in self.ports:
                await ready(f"http://127.0.0.1:{port}")
            yield
        finally:
            for port in list(self._running):
                await self.kill(port)


def settings_on(folder: Path, lake: str, machine: str) -> Settings:
    return replace(settings_of(folder), lake=lake_path(lake), work=str(folder / machine))


def collector(folder: str, lake: str, bootstrap: str, topic: str, front: str, port: str) -> None:
    """One node until it is killed."""
    logging.disable()
    pipeline = two_step(topic, Path(folder)) if front else answering(topic, "half_async")
    settings = at_broker(settings_on(Path(folder), lake, port), bootstrap)
    settings = replace(settings, collect=replace(settings.collect, port=int(port)))
    options = NodeOptions(f"node-{port}", front=bool(front))

    async def main() -> None:
        await CollectorNode(settings, pipeline, options).run(asyncio.Event())

    asyncio.run(main())


async def ready(url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(Exception):
                if (await get(url, "/readyz"))[0] == 200:
                    return
            await asyncio.sleep(0.05)


async def asked(url: str, path: str) -> tuple[int, dict[str, str], Any]:
    """A GET that is asked again if its connection breaks, as a client behind a balancer does."""
    async with asyncio.timeout(240):
        while True:
            with contextlib.suppress(Exception):
                found = await get(url, path)
                if found[0] not in (202, 503):  # not yet, or no node for the moment
                    return found
            await asyncio.sleep(0.05)


async def send(url: str, first: int, tokens: dict[int, str], stop: asyncio.Event) -> None:
    """Send every fourth number, each again and again until it is acknowledged."""
    number = first
    while not stop.is_set():
        with contextlib.suppress(Exception):  # the node was killed, or the balancer has none
            status, _, answer = await request(url, "POST", "/v1/clicks", event(number), content_type="application/json")
            if status == 202:
                tokens[number] = answer["token"]
                number += SENDERS
                continue
        await asyncio.sleep(0.02)


def into_bronze(lake: Lake, records: list[Any]) -> dict[str, int]:
    """The records in bronze, as the lakehouse puts them there; the next offset by place."""
    rows, ends = [], dict[str, int]()
    for record in records:
        envelope, place = Envelope.from_headers(record.headers), f"{record.topic}/{record.partition}"
        ends[place] = max(ends.get(place, 0), record.offset + 1)
        rows.append(
            {"event_id": envelope.event_id, "source": "clicks", "tenant": envelope.tenant, "reject": envelope.reject}
            | {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            | {"payload": record.value, "headers": list(record.headers)}
        )
    schema = pa.schema(
        [(name, pa.string()) for name in ("event_id", "source", "tenant", "reject", "topic")]
        + [("partition", pa.int32()), ("offset", pa.int64()), ("payload", pa.binary())]
        + [("headers", pa.map_(pa.string(), pa.binary()))]
    )
    properties = CommitProperties(custom_metadata={"userMetadata": json.dumps({"offsets": ends})})
    table = pa.Table.from_pylist(rows, schema)
    write_deltalake(str(lake.bronze("clicks").path), table, commit_properties=properties)
    return ends


@contextlib.asynccontextmanager
async def one_killed(nodes: Nodes, url: str, tokens: dict[int, str]) -> AsyncIterator[None]:
    """Events are sent all the time; before the block one node is killed, and after it started again."""
    stop = asyncio.Event()
    senders = [asyncio.create_task(send(url, first, tokens, stop)) for first in range(SENDERS)]
    try:
        await eventually(lambda: len(tokens) > 40, 120)
        yield
        await eventually(lambda: len(tokens) > 120, 120)
        await nodes.start(nodes.ports[0])
        await ready(f"http://127.0.0.1:{nodes.ports[0]}")
    finally:
        stop.set()
        await asyncio.gather(*senders)


async def test_answers_and_tokens_outlive_a_node(broker: EmbeddedBroker, s3: str, tmp_path: Path) -> None:
    name = f"balanced-{uuid.uuid4().hex[:8]}"
    nodes, tokens = Nodes(tmp_path, f"{s3}/{name}", broker.bootstrap, name, front=False), dict[int, str]()
    lake = Lake(lake_path(f"{s3}/{name}"), tmp_path)
    with balancer(tmp_path, nodes.ports) as url:
        async with nodes.running():
            async with one_killed(nodes, url, tokens):
                early = [tokens[number] for number in sorted(tokens)[:20]]
                waiting = [asyncio.create_task(asked(url, f"/v1/answers/{token}?wait=20")) for token in early]
                await asyncio.sleep(0.5)
                await nodes.kill(nodes.ports[0])
            records = await asyncio.to_thread(consume, broker.bootstrap, name, len(tokens))
            found = {int(Envelope.from_headers(record.headers).event_id) for record in records}
            assert found >= tokens.keys(), "acknowledged and lost"
            assert not any(task.done() for task in waiting), "they wait for the product"
            ends = await asyncio.to_thread(into_bronze, lake, records)
            rows = [{"who": f"k{n}", "score": n} for n in range(7)]
            await asyncio.to_thread(commit, lake, "scores", rows, key="who", through=ends)
            for number, task in zip(sorted(tokens), waiting, strict=False):
                status, _, answer = await task
                assert (status, answer["rows"]) == (200, [{"who": f"k{number % 7}", "score": number % 7}])
            for number in sorted(tokens)[::5]:
                status, _, state = await asked(url, f"/v1/acks/{tokens[number]}")
                assert (status, state["state"], state["event_id"]) == (200, "in_product", str(number))


async def test_tokens_of_front_nodes_outlive_a_node(broker: EmbeddedBroker, s3: str, tmp_path: Path) -> None:
    name = f"fronts-{uuid.uuid4().hex[:8]}"
    nodes, tokens = Nodes(tmp_path, f"{s3}/{name}", broker.bootstrap, name, front=True), dict[int, str]()
    lake = Lake(lake_path(f"{s3}/{name}"), tmp_path)
    with balancer(tmp_path, nodes.ports) as url:
        async with nodes.running():
            async with one_killed(nodes, url, tokens):
                await nodes.kill(nodes.ports[0])
            settings = settings_on(tmp_path, f"{s3}/{name}", "refiner")
            async with refining(settings, two_step(name, tmp_path), broker.bootstrap, "r"):
                records = await asyncio.to_thread(consume, broker.bootstrap, name, len(tokens))
            assert {int(Envelope.from_headers(record.headers).event_id) for record in records} >= tokens.keys()
            await asyncio.to_thread(into_bronze, lake, records)
            for number in sorted(tokens)[::5]:
                status, _, state = await asked(url, f"/v1/acks/{tokens[number]}")
                assert (status, state["state"], state["event_id"]) == (200, "in_bronze", str(number))
