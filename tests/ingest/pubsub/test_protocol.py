"""Cars report traffic and are told that of their roads, on one connection each: a real node, broker and table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ingest.broker import EmbeddedBroker
from ingest.keys import ApiKey, keys_path, new_key
from ingest.pubsub import protocol
from lakehouse.contract.collector import CollectorSpec
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.product import Product
from tests.ingest.conftest import consume, event, get, pipeline_of, running_node, settings_of
from tests.ingest.lakes import commit

pytestmark = pytest.mark.broker
_NUMBERS = itertools.count()


def roads(topic: str) -> Pipeline:
    source = replace(pipeline_of(topic, "http").sources["clicks"], max_event_bytes=10_000)
    quiet = replace(source, name="quiet", topic=f"{topic}-quiet", collectors=(CollectorSpec("http", ack="none"),))
    traffic = Product("gold", "clicks", "SELECT who, count(*) AS cars FROM clicks GROUP BY who", name="traffic")
    return Pipeline(
        {"clicks": source, "quiet": quiet},
        {"traffic": traffic, "hidden": replace(traffic, name="hidden", channel=False)},
    )


class Node:
    """A node and its lake."""

    def __init__(self, url: str, folder: Path, bootstrap: str, topic: str) -> None:
        self.url = url.replace("http", "ws") + protocol.PATH
        self.base = url
        self.lake = Lake(folder)
        self.bootstrap = bootstrap
        self.topic = topic

    async def traffic(self, **cars: int) -> None:
        rows = [{"who": who, "cars": number} for who, number in cars.items()]
        await asyncio.to_thread(commit, self.lake, "traffic", rows, key="who")


@pytest_asyncio.fixture
async def node(broker: EmbeddedBroker, tmp_path: Path) -> AsyncIterator[Node]:
    topic = f"roads-{next(_NUMBERS)}"
    async with running_node(settings_of(tmp_path, max_streams=40), roads(topic), broker.bootstrap) as url:
        yield Node(url, tmp_path, broker.bootstrap, topic)


async def say(car: ClientConnection, **message: Any) -> None:
    await car.send(orjson.dumps(message).decode())


async def hear(car: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(60):
        return dict(orjson.loads(await car.recv()))


async def told(car: ClientConnection, wanted: dict[str, int | None]) -> None:
    """Hear until the newest of each key is this; an empty table, before its first rows, may be told too."""
    state: dict[str, int | None] = {}
    while state != wanted:
        message = await hear(car)
        state[message["key"][0]] = message["rows"][0]["cars"] if message["rows"] else None


async def test_reports_and_hears_on_one_connection(node: Node) -> None:
    async with connect(node.url) as car, connect(node.url) as other:
        for n in range(3):
            await say(car, publish="clicks", event=orjson.loads(event(n)), id=n)
        tokens = [await hear(car) for _ in range(3)]
        assert [answer["ack"] for answer in tokens] == [0, 1, 2]
        _, _, state = await get(node.base, f"/v1/acks/{tokens[1]['token']}")
        assert (state["event_id"], state["source"]) == ("1", "clicks")
        records = await asyncio.to_thread(consume, node.bootstrap, node.topic, 3)
        assert {record.value for record in records} == {event(n) for n in range(3)}

        await say(car, subscribe="traffic", keys=[["A1"], ["A2"]], id="s")
        assert await hear(car) == {"subscribed": "traffic", "keys": 2, "id": "s"}
        await node.traffic(A1=5, A3=1)  # the table comes to be only now
        await told(car, {"A1": 5, "A2": None})
        await say(other, subscribe="traffic", keys=["A3", "A1"])
        assert (await hear(other))["subscribed"] == "traffic"
        await told(other, {"A1": 5, "A3": 1})
        await node.traffic(A1=5, A2=7, A3=1)  # A1 and A3 stay as they are
        message = await hear(car)
        assert (message["key"], message["rows"][0]["cars"]) == (["A2"], 7)

        await say(car, subscribe="traffic", keys=[["A3"]], id=2)  # another road, on the open connection
        assert (await hear(car))["keys"] == 1
        assert (await hear(car))["rows"] == [{"who": "A3", "cars": 1}]
        await node.traffic(A1=6, A2=8, A3=2)
        assert (await hear(car))["rows"] == [{"who": "A3", "cars": 2}]
        assert {(await hear(other))["rows"][0]["cars"] for _ in range(2)} == {6, 2}
        await say(car, subscribe="traffic", keys=[])
        assert (await hear(car))["keys"] == 0


async def test_what_is_refused(node: Node) -> None:
    async with connect(node.url) as car:
        for message, status, says in (
            ({"publish": "nothing", "event": {}, "id": 1}, 404, "no source 'nothing'"),
            ({"publish": "clicks", "event": {"id": 1}, "id": 1}, 422, "the key {who} needs fields"),
            ({"publish": "clicks", "event": [1], "id": 1}, 422, "not an array"),
            ({"publish": "clicks", "event": {"id": 1, "pad": "x" * 10_001}, "id": 1}, 413, "more than the 10000"),
            ({"subscribe": "nothing", "keys": [["a"]], "id": 1}, 404, "no product 'nothing'"),
            ({"subscribe": "hidden", "keys": [["a"]], "id": 1}, 404, "no product 'hidden'"),
            ({"subscribe": "traffic", "keys": "a", "id": 1}, 400, "keys is a list"),
            ({"subscribe": "traffic", "keys": [[{}]], "id": 1}, 400, "a list of texts"),
            ({"subscribe": "traffic", "keys": [[]], "id": 1}, 400, "a list of texts"),
            ({"subscribe": "traffic", "keys": [["a"], ["a", "b"]], "id": 1}, 400, "equally many"),
            ({"subscribe": "traffic", "keys": [[str(n)] for n in range(1001)], "id": 1}, 413, "1000 keys"),
            ({"what": 1, "id": 1}, 400, "publish or subscribe"),
            ([1], 400, "publish or subscribe"),
        ):
            await car.send(orjson.dumps(message).decode())
            answer = await hear(car)
            assert (answer["status"], says in answer["detail"]) == (status, True), answer
            assert answer["refused"] == (1 if isinstance(message, dict) else None)
        await car.send("{")
        assert (await hear(car))["status"] == 400
        await say(car, publish="quiet", event={"id": 1, "who": "a"}, id=1)
        await say(car, publish="clicks", event={"id": 7, "who": "a"})
        await say(car, publish="clicks", event={"id": 8, "who": "a"}, id="last")
        assert (await hear(car))["ack"] == "last", "neither a one-way source nor a message without id is acknowledged"
        _, _, stats = await get(node.base, "/v1/stats")
        assert stats["sources"]["clicks"]["rejected"] == 3, "what the border refuses is kept"
        async with connect(node.url) as other:
            await other.send(b'{"publish":"\xff"}', text=True)
            with pytest.raises(ConnectionClosed, match="1007"):
                await other.recv()
        with pytest.raises(ConnectionClosed):
            await car.send("x" * 2_000_000)
            await hear(car)
    for path, origin, status in (("/v1/other", None, 404), (protocol.PATH, "http://evil.example", 403)):
        with pytest.raises(InvalidStatus) as caught:
            async with connect(node.url.replace(protocol.PATH, path), origin=origin):  # type: ignore[arg-type]
                pass
        assert caught.value.response.status_code == status


async def test_connections_are_bounded(node: Node) -> None:
    async with contextlib.AsyncExitStack() as cars:
        for _ in range(40):
            await cars.enter_async_context(connect(node.url))
        with pytest.raises(InvalidStatus) as caught:
            async with connect(node.url):
                pass
        assert caught.value.response.status_code == 503
    async with connect(node.url) as car:
        await say(car, subscribe="traffic", keys=[])
        assert await hear(car)


async def test_one_that_does_not_read_is_told_the_newest_when_it_does(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_BUFFER_BYTES", 4_096)
    keys = [[f"road {n} {'x' * 2_000}"] for n in range(150)]
    narrow = socket.create_connection(("127.0.0.1", int(node.base.rpartition(":")[2])))
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    async with connect(node.url, max_queue=1, sock=narrow) as car:
        await say(car, subscribe="traffic", keys=keys)
        await hear(car)
        for cars in range(1, 16):
            await node.traffic(**{key[0]: cars for key in keys})
            await asyncio.sleep(0.05)
        newest: dict[str, int] = {}
        heard = 0
        while len(newest) < 150 or set(newest.values()) != {15}:
            message = await hear(car)
            heard += 1
            now = message["rows"][0]["cars"] if message["rows"] else 0
            assert now >= newest.get(message["key"][0], 0), "never an older one"
            newest[message["key"][0]] = now
        assert heard < 15 * 150, "what was in between was left out"


async def test_while_the_log_is_full_nothing_is_read(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, log_bytes=120_000)
    async with (
        running_node(settings, roads("roads-full"), broker.bootstrap) as url,
        connect(url.replace("http", "ws") + protocol.PATH) as car,
    ):
        for n in range(600):
            await say(car, publish="clicks", event=orjson.loads(event(n)), id=n)
        assert [(await hear(car))["ack"] for _ in range(600)] == list(range(600)), "each of them, in order"


async def test_keys_say_who_may(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    other = new_key(keys_path(settings), ApiKey("0" * 64, sources=("quiet",)))
    mine = new_key(keys_path(settings), ApiKey("0" * 64, tenant="acme", sources=("clicks",)))
    async with running_node(settings, roads("roads-keys"), broker.bootstrap) as url:
        address = url.replace("http", "ws") + protocol.PATH
        for headers in ({}, {"X-API-Key": "mr_x_y"}):
            with pytest.raises(InvalidStatus) as caught:
                async with connect(address, additional_headers=headers):
                    pass
            assert caught.value.response.status_code == 401
        async with connect(address, additional_headers={"Authorization": f"Bearer {other}"}) as car:
            await say(car, publish="clicks", event={"id": 1, "who": "a"}, id=1)
            assert (await hear(car))["status"] == 403
            await say(car, subscribe="traffic", keys=["a"], id=2)
            assert (await hear(car))["status"] == 403
        async with connect(address, additional_headers={"Authorization": f"Bearer {mine}"}) as car:
            await say(car, publish="clicks", event={"id": 1, "who": "a"}, id=1)
            assert (await hear(car))["ack"] == 1
        (record,) = await asyncio.to_thread(consume, broker.bootstrap, "roads-keys", 1)
        assert dict(record.headers)["tenant"] == b"acme"
