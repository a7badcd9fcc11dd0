"""Sources that start, stop and change while a node runs; and which collectors a source gets."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ingest.broker import EmbeddedBroker
from ingest.node import CollectorNode, changed, with_upstream
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.folder import PipelineFiles
from lakehouse.contract.pipeline.source import CollectorSpec
from tests.ingest.conftest import Upstream, consume, event, get, pipeline_of, request, running_node, settings_of

PIPELINE = """
[sources.clicks]
topic = "TOPIC-clicks"
schema = "id BIGINT, who STRING"
event_time = "received_at"
event_id = "{id}"
collectors = [{ kind = "http" }]
"""
MORE = """
[sources.visits]
topic = "TOPIC-visits"
schema = "id BIGINT, who STRING"
event_time = "received_at"
event_id = "{id}"
collectors = [{ kind = "http" }, { kind = "websocket", url = "URL", resume_param = "from" }]
"""
JSON = {"content_type": "application/json"}


async def when(check: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    """Wait until an asynchronous check holds."""
    deadline = time.monotonic() + timeout_s
    while not await check():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.1)


@pytest.mark.broker
async def test_the_pipelines_file_is_followed(broker: EmbeddedBroker, tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    file = folder / "pipeline.toml"
    stamps = iter(range(10, 100))

    def write(text: str) -> None:
        file.write_text(text.replace("TOPIC", "follow"), encoding="utf-8")
        at = time.time() + next(stamps)  # two edits in one tick of the clock are two edits
        os.utime(file, (at, at))

    write(PIPELINE)
    async with Upstream() as upstream:
        upstream.limit = 20
        more = MORE.replace("URL", upstream.url)
        pipeline = load_pipeline(folder)
        files = PipelineFiles(folder, tmp_path / "sources")
        files.load()
        async with running_node(settings_of(tmp_path / "lake"), pipeline, broker.bootstrap, files=files) as url:

            async def answers(source: str, status: int) -> bool:
                return (await request(url, "POST", f"/v1/{source}", event(1), **JSON))[0] == status

            assert await answers("clicks", 202)
            assert await answers("visits", 404)
            write(PIPELINE + more)
            await when(lambda: answers("visits", 202))
            records = await asyncio.to_thread(consume, broker.bootstrap, "follow-visits", 20, 60)
            assert {Envelope.from_headers(r.headers).event_id for r in records} == {str(n) for n in range(20)}
            write(PIPELINE.replace("event_id", "event_di") + more)
            await asyncio.sleep(1.5)
            assert await answers("clicks", 202), "a file that cannot be used changes nothing"
            write(PIPELINE.replace('"{id}"', '"{who}:{id}"') + more)
            before = upstream.requests[:]

            async def renamed() -> bool:
                await request(url, "POST", "/v1/clicks", event(5), **JSON)
                found = await asyncio.to_thread(consume, broker.bootstrap, "follow-clicks", 1, 60)
                return any(Envelope.from_headers(r.headers).event_id == "k5:5" for r in found)

            await when(renamed)
            assert upstream.requests == before, "the other source went on undisturbed"
            write(PIPELINE)
            await when(lambda: answers("visits", 404))
            await when(lambda: answers("clicks", 202))  # it is changed too, and away for a moment
            _, _, stats = await get(url, "/v1/stats")
            assert list(stats["sources"]) == ["clicks"]
            extra = MORE.partition("[sources.visits]")[2].replace("TOPIC", "follow").replace("URL", upstream.url)
            (tmp_path / "sources").mkdir()
            (tmp_path / "sources" / "extra.toml").write_text(extra, encoding="utf-8")
            await when(lambda: answers("extra", 202))
            assert await answers("clicks", 202)


@pytest.mark.broker
async def test_from_within(broker: EmbeddedBroker, tmp_path: Path) -> None:
    made: list[CollectorNode] = []
    pipeline = pipeline_of("within-1", "http")
    async with running_node(settings_of(tmp_path), pipeline, broker.bootstrap, made=made.append) as url:
        node = made[0]
        other = replace(pipeline.sources["clicks"], name="other", topic="within-2")
        await node.add_source(other)
        assert (await request(url, "POST", "/v1/other", event(1), **JSON))[0] == 202
        await asyncio.to_thread(consume, broker.bootstrap, "within-2", 1, 60)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
            taken.bind(("127.0.0.1", 0))
            udp = (CollectorSpec("http"), CollectorSpec("udp", port=taken.getsockname()[1]))
            with pytest.raises(EnvironmentProblem, match="cannot be bound"):
                await node.add_source(replace(other, name="third", topic="within-3", collectors=udp))
        assert set(node.sources) == {"clicks", "other"}
        assert (await request(url, "POST", "/v1/third", event(1), **JSON))[0] == 404, "nothing is left of it"
        await node.remove_source("other")
        assert (await request(url, "POST", "/v1/other", event(2), **JSON))[0] == 404
        await node.remove_source("other")


def test_what_changes() -> None:
    a = pipeline_of("t").sources["clicks"]
    b, c = replace(a, topic="u"), replace(a, name="c")
    assert changed({"a": a, "b": a}, {"a": a, "b": b, "c": c}) == (["b"], ["b", "c"])
    assert changed({"a": a, "b": a}, {}) == (["a", "b"], [])


@pytest.mark.parametrize(
    ("url", "kinds"),
    [
        ("", ["http"]),
        ("ws://h/s", ["http", "websocket"]),
        ("https://h/s", ["http", "sse"]),
    ],
)
def test_an_upstream_that_is_asked_for(url: str, kinds: list[str]) -> None:
    assert [spec.kind for spec in with_upstream((CollectorSpec("http"),), url)] == kinds
    mine = (CollectorSpec("lines", "http://a/"),)
    assert with_upstream(mine, url) == list(mine), "there is one: its address is replaced, no other is added"


def test_a_kind_of_ones_own_must_be_there(tmp_path: Path) -> None:
    from ingest.collectors import CollectorContext, make_collector
    from tests.ingest.streams import SOURCE

    class Intake:
        class border:
            source = SOURCE

    for kind in ("no_such_module:build", "ingest.node:build"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            make_collector(CollectorSpec(kind), CollectorContext(Intake, "", 1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "least"), [(1_000_000, 1_026_651), (10, 86_016)])
async def test_a_log_that_could_never_take_an_event_is_refused_at_start(tmp_path: Path, size: int, least: int) -> None:
    pipeline = replace(pipeline_of("small-log", "http", max_event_bytes=size), path=tmp_path / "shop" / "pipeline.toml")
    with pytest.raises(ConfigError, match="would never fit") as caught:
        CollectorNode(settings_of(tmp_path, "127.0.0.1:1", log_bytes=least - 1), pipeline)
    assert (caught.value.file, caught.value.key) == (pipeline.path, "sources.clicks.max_event_bytes")
    assert f"collect.log_bytes to {least}" in caught.value.remedy
