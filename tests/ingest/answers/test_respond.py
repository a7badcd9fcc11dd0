"""Answers to senders in each style, look-ups and pushed answers: a real node and broker, tables written directly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingest.answers.respond import refuse_callback
from ingest.broker import EmbeddedBroker
from ingest.errors import RequestRefused
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.product import ChannelSpec, Product
from lakehouse.contract.pipeline.source import AnswerSpec, CollectorSpec
from tests.ingest.conftest import consume, event, pipeline_of, running_node, settings_of
from tests.ingest.lakes import commit

pytestmark = pytest.mark.broker
JSON = {"content_type": "application/json"}


async def request(
    url: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """One request; no thread waits for the answer, since the node under test shares them."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        found = await client.request(method, url + path, content=body, headers=names)
    kind = found.headers.get("content-type", "")
    return found.status_code, dict(found.headers), found.json() if "json" in kind else found.text


async def get(url: str, path: str) -> tuple[int, dict[str, str], Any]:
    return await request(url, "GET", path)


_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Node:
    """A node whose source answers, and its lake."""

    url: str
    lake: Lake
    bootstrap: str
    topic: str

    async def send(self, number: int, query: str = "") -> tuple[int, dict[str, str], Any]:
        return await request(self.url, "POST", f"/v1/clicks{query}", event(number), **JSON)

    async def take_up(self, rows: dict[str, int], at_least: int) -> None:
        """What the lakehouse does: a commit of the product that holds all that Kafka has."""
        records = await asyncio.to_thread(consume, self.bootstrap, self.topic, at_least)
        through: dict[str, int] = {}
        for record in records:
            place = f"{self.topic}/{record.partition}"
            through[place] = max(through.get(place, 0), record.offset + 1)
        table = [{"who": who, "score": score} for who, score in rows.items()]
        await asyncio.to_thread(commit, self.lake, "scores", table, key="who", through=through)


def answering(topic: str, respond: str, *, ack: str = "durable", timeout: str = "60 seconds") -> Pipeline:
    pipeline = pipeline_of(topic, "http")
    hosts = ("127.0.0.1:1", *[f"127.0.0.1:{port}" for port in CALLBACK_PORTS])
    source = replace(
        pipeline.sources["clicks"],
        collectors=(CollectorSpec("http", ack=ack),),
        respond=respond,
        answer=AnswerSpec("scores", {"who": "{who}"}, timeout, hosts) if respond else None,
    )
    scores = Product("gold", "clicks", "SELECT who, count(*) AS score FROM clicks GROUP BY who", name="scores")
    hidden = replace(scores, name="hidden", channel=ChannelSpec(served=False))
    return Pipeline({"clicks": source}, {"scores": scores, "hidden": hidden}, name="p")


CALLBACK_PORTS: list[int] = []


@asynccontextmanager
async def node(broker: EmbeddedBroker, folder: Path, respond: str, **options: Any) -> AsyncIterator[Node]:
    topic = f"respond-{next(_NUMBERS)}"
    async with running_node(settings_of(folder), answering(topic, respond, **options), broker.bootstrap) as url:
        yield Node(url, Lake(folder), broker.bootstrap, topic)


async def test_at_once(broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingest.node.MAX_WAITERS", 2)
    async with node(broker, tmp_path, "sync") as here:
        first, second = (asyncio.create_task(here.send(n)) for n in (1, 8))  # one key
        await here.take_up({"k1": 5, "k2": 6}, 2)
        for task in (first, second):
            status, _, answer = await task
            assert status == 200
            assert answer.pop("token")
            assert answer == {"product": "scores", "version": 1, "rows": [{"who": "k1", "score": 5}]}
        waiting = [asyncio.create_task(here.send(n)) for n in (2, 3)]
        await asyncio.to_thread(consume, broker.bootstrap, here.topic, 4)
        status, headers, answer = await here.send(4)
        assert (status, headers["retry-after"], answer["type"]) == (503, "1", "urn:millrace:problem:too-many-waiters")
        await here.take_up({"k2": 9}, 4)
        assert [(await task)[2]["rows"] for task in waiting] == [[{"who": "k2", "score": 9}], []]
        status, _, answer = await request(here.url, "POST", "/v1/clicks", b'{"id":9}', **JSON)
        assert (status, answer["detail"]) == (
            422,
            "the key {who} needs fields that are absent, null or not plain values",
        )
        lines = event(20) + b"\n" + event(21)
        status, _, answer = await request(here.url, "POST", "/v1/clicks", lines, content_type="application/x-ndjson")
        assert (status, len(answer["tokens"])) == (202, 2), "many are acknowledged; each answer is fetched by its token"
        status, _, answer = await get(here.url, f"/v1/answers/{answer['tokens'][0]}?wait=0")
        assert status == 202


async def test_when_the_time_is_over_the_token_is_left(broker: EmbeddedBroker, tmp_path: Path) -> None:
    async with node(broker, tmp_path, "sync", timeout="200 ms") as here:
        status, headers, answer = await here.send(1)
        assert (status, answer["type"]) == (504, "urn:millrace:problem:answer-timeout")
        assert headers["location"] == f"/v1/answers/{answer['token']}"
        await here.take_up({"k1": 5}, 1)
        status, _, answer = await get(here.url, headers["location"] + "?wait=30")
        assert (status, answer["rows"]) == (200, [{"who": "k1", "score": 5}])


async def test_half_asynchronous(broker: EmbeddedBroker, tmp_path: Path) -> None:
    async with node(broker, tmp_path, "half_async") as here:
        status, headers, answer = await here.send(1)
        assert (status, headers["location"]) == (202, f"/v1/answers/{answer['token']}")
        waiting = [asyncio.create_task(get(here.url, headers["location"])) for _ in range(20)]
        await here.take_up({"k1": 5}, 1)
        assert {(await task)[0] for task in waiting} == {200}
        for query, wanted in (("?wait=x", 400), ("?wait=1e9", 400), ("?wait=0", 200)):
            assert (await get(here.url, headers["location"] + query))[0] == wanted
        assert (await get(here.url, "/v1/answers/rubbish"))[0] == 400
        status, _, answer = await here.send(1, "?callback=http://127.0.0.1:1/")
        assert (status, answer["detail"]) == (400, "source 'clicks' pushes no answers")
    async with running_node(settings_of(tmp_path), answering(here.topic, "half_async"), broker.bootstrap) as url:
        status, _, answer = await get(url, headers["location"] + "?wait=0")
        assert status == 202, "another node finds the event in bronze, which there is none of here"


async def test_pushed_later(broker: EmbeddedBroker, tmp_path: Path) -> None:
    pushed: asyncio.Queue[bytes] = asyncio.Queue()
    answers = iter([b"500 Oops", b"200 OK"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await pushed.put(await reader.readexactly(length))
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % next(answers, b"200 OK"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    CALLBACK_PORTS.append(port)
    async with server, node(broker, tmp_path, "full_async") as here:
        status, headers, answer = await here.send(1, f"?callback=http://127.0.0.1:{port}/done")
        assert status == 202
        assert (await get(here.url, headers["location"]))[0] == 202, "not there yet, and not waited for"
        await here.take_up({"k1": 5}, 1)
        async with asyncio.timeout(60):
            first, second = await pushed.get(), await pushed.get()
        assert first == second, "tried again"
        assert b'"rows":[{"who":"k1","score":5}]' in first
        assert answer["token"].encode() in first
        assert (await get(here.url, headers["location"]))[0] == 200
        status, _, answer = await here.send(2, "?callback=http://10.0.0.1/steal")
        assert (status, answer["detail"]) == (403, "answers are not pushed to 10.0.0.1:80")


async def test_one_way(broker: EmbeddedBroker, tmp_path: Path) -> None:
    async with node(broker, tmp_path, "", ack="none") as here:
        assert await here.send(1) == (202, {"content-length": "0"}, "")
        status, _, answer = await request(here.url, "POST", "/v1/clicks", b"{", **JSON)
        assert (status, answer) == (202, ""), "whatever the border thinks of it"
        records = await asyncio.to_thread(consume, broker.bootstrap, here.topic, 2)
        assert sorted(record.value for record in records) == [b"{", event(1)]
    async with node(broker, tmp_path / "b", "") as here:
        assert (await here.send(1, "?ack=none"))[::2] == (202, "")
        assert (await here.send(2))[2]["token"]


async def test_look_ups(broker: EmbeddedBroker, tmp_path: Path) -> None:
    async with node(broker, tmp_path, "") as here:
        assert (await get(here.url, "/v1/lookup/scores/k1"))[0] == 404
        await asyncio.to_thread(commit, here.lake, "scores", [{"who": "k/1", "score": 5}], key="who")
        status, headers, answer = await get(here.url, "/v1/lookup/scores?who=k%2F1")
        assert (status, headers["etag"], answer["rows"]) == (200, '"1"', [{"who": "k/1", "score": 5}])
        for path, wanted, says in (
            ("scores/nobody", 404, "no row of this key"),
            ("scores", 400, "the key in the path, or columns in the query"),
            ("scores/a/b", 400, "is looked up by who"),
            ("scores?what=1", 400, "no column 'what'"),
            ("hidden/a", 404, "no product 'hidden' to be looked up"),
            ("quarantine/a", 404, "no product 'quarantine'"),
        ):
            status, _, answer = await get(here.url, f"/v1/lookup/{path}")
            assert (status, says in answer["detail"]) == (wanted, True), (path, answer)


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://a:8080/x?y=1", 0),
        ("https://b/", 0),
        ("http://a/", 403),
        ("http://a:8080@evil:80/", 400),
        ("http://u@a:8080/", 400),
        ("ftp://a:8080/", 400),
        ("http://a:99999/", 400),
        ("http://[::1]:8080/", 403),
        ("//a:8080/", 400),
        ("http://A:8080/", 0),
    ],
)
def test_callbacks_go_only_where_the_pipeline_says(url: str, status: int) -> None:
    spec = AnswerSpec("scores", {"who": "{who}"}, callback_hosts=("a:8080", "b:443"))
    if not status:
        refuse_callback(spec, url)
        return
    with pytest.raises(RequestRefused) as caught:
        refuse_callback(spec, url)
    assert caught.value.status == status
