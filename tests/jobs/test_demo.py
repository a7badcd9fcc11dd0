"""What a demo plays: which sources, where they are read, and how far they are; and where the demo listens."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import orjson
import pytest
from rich.console import Console
from websockets.asyncio.client import connect

from ingest.simulate.player import Play, scene_players
from ingest.simulate.scenes import SCENES
from ingest.simulate.server import play_pipeline
from jobs.account import covers, followed
from jobs.commands.parts import upstream_urls
from jobs.demo import DemoOptions, Playing, free_or_other
from jobs.local.stack import free_port
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.settings import conf_dir


def shipped(name: str) -> Pipeline:
    return load_pipeline(conf_dir() / "pipelines" / name)


@asynccontextmanager
async def played(pipeline: Pipeline, port: int, **options: object) -> AsyncIterator[str]:
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(play_pipeline(pipeline, Play(port=port, **options), ready=url.set_result, stop=stop))  # type: ignore[arg-type]
    done, _ = await asyncio.wait((task, url), return_when=asyncio.FIRST_COMPLETED, timeout=60)
    if task in done:
        task.result()
    yield await url
    stop.set()
    await task


async def test_every_source_of_a_scene_is_played(tmp_path: Path) -> None:
    pipeline = shipped("ads")
    playing = Playing(pipeline, "ads", DemoOptions())
    assert playing.sources == ["impressions", "clicks"]
    upstreams = playing.upstreams()
    assert len({url.partition("play=")[2].partition("&")[0] for url in upstreams.values()}) == 1
    port = int(playing.base.rpartition(":")[2])
    async with played(pipeline, port, seed=3, rate=5_000.0):
        for name, url in upstreams.items():
            async with connect(url + "&from=0", max_queue=None) as client:  # its end waits for nothing unread
                event = orjson.loads(await client.recv())
            wanted = next(payload for source, payload in SCENES["ads"](3, 0) if source == name)
            assert event.keys() == wanted.keys()
        async with asyncio.timeout(60):
            while True:
                progress = await asyncio.to_thread(playing.progress)
                if progress is not None and all(progress.sent.values()):
                    break
                await asyncio.sleep(0.05)
        ids, times = await asyncio.to_thread(playing.sent, "clicks", 1)
        assert (len(ids), len(times)) == (1, 1)
        assert isinstance(ids[0], str)
    assert playing.progress() is None, "nobody answers"


def test_shares_are_as_the_scene_mixes_them() -> None:
    pipeline = shipped("ads")
    players = scene_players(SCENES["ads"], pipeline, rate=100.0, seed=1)
    mix = [source for source, _ in islice(SCENES["ads"](1, 0), 2_000)]
    rates = {name: player.status()["rate"] for name, player in players.items()}
    assert sum(rates.values()) == pytest.approx(100.0)
    assert rates["clicks"] == pytest.approx(100.0 * mix.count("clicks") / 2_000)
    with pytest.raises(ConfigError, match="events of 'actions'"):
        scene_players(SCENES["clickstream"], pipeline, rate=1.0, seed=1)


def test_where_the_stream_is_read_by_the_kind_of_collector() -> None:
    pipeline = shipped("wikipedia")
    (url,) = Playing(pipeline, "wikipedia", DemoOptions()).upstreams().values()
    assert url.startswith("http://127.0.0.1:") and "/sse?play=" in url and url.endswith("&source=edits&from=0")
    (url,) = Playing(shipped("meetup"), "meetup", DemoOptions()).upstreams().values()
    assert url.startswith("ws://127.0.0.1:") and "/stream?play=" in url
    file = Playing(shipped("ads"), "ads", DemoOptions(input=Path("x.jsonl")))
    assert file.sources == ["impressions"], "a recording is of the first source"
    assert file.command()[-2:] == ["--input", "x.jsonl"]


async def test_a_pipeline_without_a_scene_says_so() -> None:
    unknown = replace(shipped("ads"), name="mine")
    with pytest.raises(ConfigError, match="no scene for the pipeline 'mine'"):
        async with played(unknown, 0):
            raise AssertionError("never")


def test_which_product_is_timed() -> None:
    assert {name: product.name for name, product in followed(shipped("meetup")).items()} == {"rsvps": "top_topics"}
    assert {name: product.name for name, product in followed(shipped("ads")).items()} == dict.fromkeys(
        ("impressions", "clicks"), "click_through"
    )
    assert covers({"t/0": 5}, {"t/0": 5})
    assert not covers({"t/0": 5}, {"t/0": 5, "t/1": 1})


def test_addresses_by_source() -> None:
    both = ["a", "b"]
    assert upstream_urls([], both) == {}
    assert upstream_urls(["ws://h/s?x=1"], both) == dict.fromkeys(both, "ws://h/s?x=1")
    assert upstream_urls(["b=http://h/s?x=1", "a=ws://h"], both) == {"b": "http://h/s?x=1", "a": "ws://h"}
    with pytest.raises(ConfigError, match="no source 'c'"):
        upstream_urls(["c=ws://h"], both)


def test_demo_takes_its_port_or_says_which_other_one() -> None:
    said = io.StringIO()
    console = Console(file=said)
    port = free_port()
    assert free_or_other("the dashboard", "127.0.0.1", port, console) == port
    assert said.getvalue() == ""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        found = free_or_other("the dashboard", "127.0.0.1", port, console)
    assert found != port
    assert said.getvalue() == f"port {port} is taken, so the dashboard is at port {found}\n"


def test_any_free_port_is_not_a_surprise() -> None:
    said = io.StringIO()
    assert free_or_other("the dashboard", "127.0.0.1", 0, Console(file=said)) > 0
    assert said.getvalue() == ""
