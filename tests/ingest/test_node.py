"""A whole node against a real broker and a real upstream."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ingest.broker import EmbeddedBroker
from lakehouse.contract.envelope import Envelope
from tests.ingest.conftest import Upstream, consume, event, get, pipeline_of, running_node, settings_of

pytestmark = pytest.mark.broker

NODE = """
import asyncio, logging, sys; logging.basicConfig()
from pathlib import Path
from ingest.node import CollectorNode
from tests.ingest.conftest import pipeline_of, settings_of
folder, bootstrap, topic, url = sys.argv[1:]
async def main():
    node = CollectorNode(settings_of(Path(folder), bootstrap), pipeline_of(topic, url=url))
    await node.run(asyncio.Event(), lambda base: print(base, flush=True))
asyncio.run(main())
"""


HTTP_NODE = """
import asyncio, logging, sys
logging.disable()
from dataclasses import replace
from pathlib import Path
from ingest.node import CollectorNode
from jobs.local.stack import free_port
from tests.ingest.conftest import pipeline_of, settings_of
folder, bootstrap, topic = sys.argv[1:]
port = free_port()
settings = settings_of(Path(folder), bootstrap)
settings = replace(settings, collect=replace(settings.collect, port=port))
async def main():
    node = asyncio.create_task(CollectorNode(settings, pipeline_of(topic, "http")).run(asyncio.Event()))
    while not node.done():
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
    print(f"http://127.0.0.1:{port}", flush=True)
    await node
asyncio.run(main())
"""


@asynccontextmanager
async def free_node(folder: Path, bootstrap: str, topic: str) -> AsyncIterator[str]:
    """A node with HTTP only, in a process of its own; yields its base URL without waiting until it is ready."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HTTP_NODE, str(folder), bootstrap, topic, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
    finally:
        child.kill()
        await child.wait()


@asynccontextmanager
async def child_node(folder: Path, bootstrap: str, topic: str, url: str, kill: bool = False) -> AsyncIterator[str]:
    """A node in a process of its own; yields its base URL when it is ready, and ends it one way or the other."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(folder), bootstrap, topic, url, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        yield (await asyncio.wait_for(child.stdout.readline(), 60)).decode().strip()
    finally:
        child.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        await child.wait()


async def test_events_go_through_untouched_with_their_envelope(broker: EmbeddedBroker, tmp_path: Path) -> None:
    async with Upstream() as upstream:
        upstream.limit = 100
        async with running_node(
            settings_of(tmp_path), pipeline_of("node-1", url=upstream.url), broker.bootstrap
        ) as url:
            records = await asyncio.to_thread(consume, broker.bootstrap, "node-1", 100)
            assert len(records) == 100
            by_id = {Envelope.from_headers(record.headers).event_id: record for record in records}
            assert {name: record.value for name, record in by_id.items()} == {str(n): event(n) for n in range(100)}
            found = Envelope.from_headers(by_id["5"].headers)
            assert (found.source, found.tenant, found.collector) == ("clicks", "default", "collector-1")
            assert not found.suspect and found.reject is None
            assert by_id["5"].key == b"k5"
            source = {"in_log": 100}
            while source["in_log"]:  # Kafka's answer comes after the records, within the test's own time limit
                _, _, stats = await get(url, "/v1/stats")
                source = stats["sources"]["clicks"]
            assert stats["ready"]
            assert {name: source[name] for name in ("received", "acknowledged", "published", "in_log", "failed")} == {
                "received": 100, "acknowledged": 100, "published": 100, "in_log": 0, "failed": 0
            }  # fmt: skip
            assert source["upstreams"][0]["connected"]
            assert source["upstreams"][0]["position"] == 100
        upstream.limit = 150
        async with running_node(
            settings_of(tmp_path), pipeline_of("node-1", url=upstream.url), broker.bootstrap
        ) as url:
            records = await asyncio.to_thread(consume, broker.bootstrap, "node-1", 150)
            assert len(records) == 150, "a clean restart sends nothing again"
            assert not any(Envelope.from_headers(record.headers).suspect for record in records)
        assert upstream.requests == ["/stream?from=0", "/stream?from=100"]


async def test_kill_in_the_middle_of_the_stream(broker: EmbeddedBroker, tmp_path: Path) -> None:
    total = 6000
    async with Upstream(rate=4000) as upstream:
        for limit in (2500, 4500):  # a machine so slow that it has all of these before it is killed goes on from there
            upstream.limit = limit
            async with child_node(tmp_path, broker.bootstrap, "node-kill", upstream.url, kill=True) as url:
                seen = await _stats_when(url, lambda source, most=limit: source["acknowledged"] > most - 2000)
                assert seen["acknowledged"] <= limit
        upstream.limit = total
        async with child_node(tmp_path, broker.bootstrap, "node-kill", upstream.url):
            records = await asyncio.to_thread(consume, broker.bootstrap, "node-kill", total)
    starts = [int(path.partition("=")[2]) for path in upstream.requests]
    assert starts[0] == 0 < starts[1] < starts[2] < total, "each run began where the log of the one before it ended"
    _check(records, total)


def _check(records: list, total: int) -> None:  # type: ignore[type-arg]
    seen: set[str] = set()
    order: dict[str, list[int]] = defaultdict(list)
    for record in records:
        found = Envelope.from_headers(record.headers)
        assert record.value == event(int(found.event_id))
        if found.event_id in seen:
            assert found.suspect, "what is sent again says so"
        else:
            seen.add(found.event_id)
            order[record.key.decode()].append(int(found.event_id))
    assert seen == {str(n) for n in range(total)}
    for key, numbers in order.items():
        assert numbers == sorted(numbers), f"order within {key}"
    assert sum(Envelope.from_headers(record.headers).suspect for record in records) < total / 2


@pytest.mark.soak  # tests/chaos/test_collect.py has a short one, by the other ways in
async def test_a_broker_that_goes_and_comes_back(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "broker", heap_mb=256, die_with_parent=True)
    bootstrap = broker.start()
    try:
        async with (
            Upstream(rate=2000) as upstream,
            child_node(tmp_path / "lake", bootstrap, "away", upstream.url) as url,
        ):
            upstream.limit = 500
            await asyncio.to_thread(consume, bootstrap, "away", 500)
            broker.kill()
            upstream.limit = 3000
            stats = await _stats_when(url, lambda source: source["acknowledged"] == 3000)
            assert stats["in_log"] >= 2500, "taken into the log while Kafka was away"
            broker.start()
            records = await asyncio.to_thread(consume, bootstrap, "away", 3000)
            _check(records, 3000)
            stats = await _stats_when(url, lambda source: source["in_log"] == 0)
            assert stats["published"] == 3000
    finally:
        broker.kill()


async def _stats_when(url: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        _, _, stats = await get(url, "/v1/stats")
        source: dict[str, Any] = stats["sources"]["clicks"]
        if holds(source):
            return source
        assert time.monotonic() < deadline, source
        await asyncio.sleep(0.05)
