"""Cars report traffic and are told that of their roads, on one connection each: a real node, broker and table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import ingest.kafka
from ingest.answers import stream
from ingest.border.access import ApiKey, keys_path
from ingest.broker import EmbeddedBroker
from ingest.errors import BrokerUnavailable
from ingest.kafka import ensure_topics
from ingest.node import CollectorNode
from jobs.local.stack import free_port
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.product import Product
from lakehouse.contract.pipeline.source import CollectorSpec
from tests.ingest.conftest import consume, event, eventually, get, pipeline_of, request, running_node, settings_of
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
        self.url = url.replace("http", "ws") + stream.PATH
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
    async with running_node(settings_of(tmp_path, max_connections=40), roads(topic), broker.bootstrap) as url:
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


async def test_an_event_is_kept_as_it_was_written(node: Node) -> None:
    written = b'{"id": 1, "who": "a", "n": 0.12345678901234567890123, "m": 123456789012345678901234567890}'
    deep = '{"id":2,"who":"a","deep":' + "[" * 300 + "]" * 300 + "}"
    async with connect(node.url) as car:
        await car.send('{"publish":"clicks","event":' + deep + ',"id":2}')
        answer = await hear(car)
        assert (answer["refused"], answer["status"], answer["code"]) == (2, 422, "too-deep")
        await car.send(b'{"publish":"clicks","id":1,"event": %b }' % written, text=True)
        assert (await hear(car))["ack"] == 1
    status, _, answer = await request(
        node.base, "POST", "/v1/clicks", f"[{deep},{event(3).decode()}]".encode(), Content_Type="application/json"
    )
    assert (status, [one["code"] for one in answer["rejected"]]) == (202, ["too-deep"])
    records = await asyncio.to_thread(consume, node.bootstrap, node.topic, 3)
    assert {written, event(3)} <= {record.value for record in records}


async def test_keys_of_another_width_silence_nobody(node: Node) -> None:
    async with connect(node.url) as car, connect(node.url) as wide, connect(node.url) as late:
        await say(wide, subscribe="traffic", keys=[["A1", "x"]])  # before anybody knows how wide a key is
        await hear(wide)
        await say(car, subscribe="traffic", keys=[["A1"]])
        await hear(car)
        for cars in (5, 6):
            await node.traffic(A1=cars)
            await told(car, {"A1": cars})
        await told(wide, {"A1": None})
        await say(late, subscribe="traffic", keys=[["A1", "x"]], id=1)
        assert (await hear(late))["detail"] == "a key of 'traffic' has 1 values at most"


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
            ({"what": 1, "id": 1}, 400, "publish, subscribe or demand"),
            ({"publish": "clicks", "event": {"id": 1, "who": "a"}, "id": [1]}, 400, "a text or a number"),
            ([1], 400, "publish, subscribe or demand"),
        ):
            await car.send(orjson.dumps(message).decode())
            answer = await hear(car)
            assert (answer["status"], says in answer["detail"]) == (status, True), answer
            assert answer["refused"] == (1 if isinstance(message, dict) and message["id"] == 1 else None)
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
    for path, origin, status in (("/v1/other", None, 404), (stream.PATH, "http://evil.example", 403)):
        with pytest.raises(InvalidStatus) as caught:
            async with connect(node.url.replace(stream.PATH, path), origin=origin):  # type: ignore[arg-type]
                pass
        assert caught.value.response.status_code == status


async def test_what_cannot_be_answered_costs_nobody_else_an_answer(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, group_commit_ms=200)  # long enough for both to be of one group
    async with (
        running_node(settings, roads("roads-deep"), broker.bootstrap) as url,
        connect(url.replace("http", "ws") + stream.PATH) as car,
    ):
        await car.send('{"publish":"clicks","event":{"id":1,"who":"a"},"id":' + "[" * 300 + "]" * 300 + "}")
        status, _, _ = await request(url, "POST", "/v1/clicks", event(2), Content_Type="application/json")
        assert status == 202
        refused = await hear(car)
        assert (refused["refused"], refused["status"]) == (None, 400)
        await say(car, publish="clicks", event={"id": 3, "who": "a"}, id="next")
        assert (await hear(car))["ack"] == "next"


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
    monkeypatch.setattr(stream, "_BUFFER_BYTES", 4_096)
    keys = [[f"road {n} {'x' * 2_000}"] for n in range(150)]
    async with connect(node.url, max_queue=1, sock=narrow_to(node.base)) as car:
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


def narrow_to(url: str) -> socket.socket:
    """A socket that takes little of what it does not read."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    narrow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return narrow


async def test_one_that_publishes_and_never_reads_is_not_read_either(broker: EmbeddedBroker, tmp_path: Path) -> None:
    made: list[CollectorNode] = []
    number = "x" * 20_000
    async with (
        running_node(settings_of(tmp_path), roads("roads-unread"), broker.bootstrap, made=made.append) as url,
        connect(url.replace("http", "ws") + stream.PATH, max_queue=1, sock=narrow_to(url)) as car,
    ):

        async def publish() -> None:
            for n in range(2_000):
                await say(car, publish="nothing", event={}, id=f"{n} {number}")

        publishing = asyncio.create_task(publish())
        (connection,) = made[0]._streams.connections
        await eventually(lambda: not connection._transport.is_reading() or publishing.done())
        assert not publishing.done()
        assert connection._transport.get_write_buffer_size() < 2_000_000, "of 40,000,000"
        heard = [str((await hear(car))["refused"]).partition(" ")[0] for _ in range(2_000)]
        assert heard == [str(n) for n in range(2_000)]
        await publishing


async def test_one_that_ends_without_a_word_ends_alone(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_PING_S", 0.05)
    monkeypatch.setattr(stream, "_BUFFER_BYTES", 1_000_000_000)
    made: list[CollectorNode] = []
    async with (
        running_node(settings_of(tmp_path), roads("roads-eof"), broker.bootstrap, made=made.append) as url,
        connect(url.replace("http", "ws") + stream.PATH) as other,
    ):
        raw = narrow_to(url)
        car = await connect(url.replace("http", "ws") + stream.PATH, max_queue=1, sock=raw)
        connection = next(c for c in made[0]._streams.connections if not is_of(c, other))
        while not connection._transport.get_write_buffer_size():
            await say(car, publish="nothing", event={}, id="x" * 900_000)
        raw.shutdown(socket.SHUT_WR)  # and it does not read what is left for it
        await eventually(lambda: len(made[0]._streams.connections) == 1)
        car.transport.abort()
        await say(other, publish="clicks", event={"id": 1, "who": "a"}, id=1)
        assert (await hear(other))["ack"] == 1
        status, _, _ = await get(url, "/readyz")
        assert status == 200


def is_of(connection: stream.StreamProtocol, client: ClientConnection) -> bool:
    """Whether these are the two ends of one connection."""
    return bool(connection._transport.get_extra_info("peername") == client.local_address)


async def test_until_the_node_is_ready_a_publisher_is_held_and_not_asked_again_and_again(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, handled, stop = threading.Event(), [0], asyncio.Event()

    def ensure(*arguments: Any) -> None:
        if not away.wait(60):
            raise BrokerUnavailable(broker.bootstrap, "it is away")
        ensure_topics(*arguments)

    class Counted(stream.StreamProtocol):
        def _handle(self, message: bytes) -> None:
            handled[0] += 1
            super()._handle(message)

    monkeypatch.setattr(ingest.kafka, "ensure_topics", ensure)
    monkeypatch.setattr(stream, "StreamProtocol", Counted)
    settings = settings_of(tmp_path, broker.bootstrap)
    settings = replace(settings, collect=replace(settings.collect, port=free_port()))
    ready = asyncio.Event()
    node = asyncio.create_task(CollectorNode(settings, roads("roads-wait")).run(stop, lambda _: ready.set()))
    async with connected(f"ws://127.0.0.1:{settings.collect.port}{stream.PATH}") as car:
        for n in range(3):
            await say(car, publish="clicks", event={"id": n, "who": "a"}, id=n)
        await eventually(lambda: handled[0] > 0)
        for _ in range(20):
            status, _, _ = await get(f"http://127.0.0.1:{settings.collect.port}", "/readyz")
            assert status == 503
        assert handled[0] <= 2, "once as it came, and once to see whether the node is ready by now"
        away.set()
        assert [(await hear(car))["ack"] for _ in range(3)] == [0, 1, 2]
        assert ready.is_set()
    stop.set()
    await node


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[ClientConnection]:
    """A connection to a node that may not listen yet."""
    async with asyncio.timeout(60):
        while True:
            try:
                car = await connect(url)
                break
            except OSError:
                await asyncio.sleep(0.05)
    async with car:
        yield car


async def test_while_the_log_is_full_nothing_is_read(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, log_bytes=120_000)
    async with (
        running_node(settings, roads("roads-full"), broker.bootstrap) as url,
        connect(url.replace("http", "ws") + stream.PATH) as car,
    ):
        for n in range(600):
            await say(car, publish="clicks", event=orjson.loads(event(n)), id=n)
        assert [(await hear(car))["ack"] for _ in range(600)] == list(range(600)), "each of them, in order"


async def test_keys_say_who_may(broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    other = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64, sources=("quiet",)))
    mine = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64, tenant="acme", sources=("clicks",)))
    async with running_node(settings, roads("roads-keys"), broker.bootstrap) as url:
        address = url.replace("http", "ws") + stream.PATH
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


async def test_a_sender_brings_events_of_its_own_tenant_to_its_own_sources(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """Whatever a request says of a tenant, and over whatever way in."""
    settings = settings_of(tmp_path)
    port = free_udp_port()
    http = pipeline_of("border-mine", "http", event_id="").sources["clicks"]
    theirs = replace(http, name="theirs", topic="border-theirs")
    tags = replace(http, name="tags", topic="border-tags", collectors=(CollectorSpec("udp", port=port),))
    key = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64, tenant="acme", sources=("clicks",)))
    pipeline = Pipeline({"clicks": http, "theirs": theirs, "tags": tags})
    said = {"id": 1, "who": "a", "tenant": "globex", "key": key}
    async with running_node(settings, pipeline, broker.bootstrap) as url:
        for source, status in (("clicks", 202), ("theirs", 403), ("tags", 404)):
            for more in (
                {},
                {"ce_id": "1", "ce_source": "s", "ce_type": "t", "ce_specversion": "1.0", "ce_tenant": "globex"},
            ):
                headers = {"Content_Type": "application/json", "X_API_Key": key, "Tenant": "globex", **more}
                path = f"/v1/{source}?tenant=globex"
                found, _, answer = await request(url, "POST", path, orjson.dumps(said), **headers)
                assert found == status, answer
        async with connect(url.replace("http", "ws") + stream.PATH, additional_headers={"X-API-Key": key}) as car:
            for source in ("clicks", "theirs", "tags"):
                await say(car, publish=source, event=said, id=source, tenant="globex")
            told = [await hear(car) for _ in range(3)]
            assert {one.get("ack", one.get("refused")): one.get("status") for one in told} == {
                "clicks": None,
                "theirs": 403,
                "tags": 404,
            }
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(orjson.dumps(said), ("127.0.0.1", port))
        mine = await asyncio.to_thread(consume, broker.bootstrap, "border-mine", 3)
        assert [dict(record.headers)["tenant"] for record in mine] == [b"acme"] * 3
        (tag,) = await asyncio.to_thread(consume, broker.bootstrap, "border-tags", 1)
        assert dict(tag.headers)["tenant"] == b"default", "a datagram shows no key"
        assert not await asyncio.to_thread(consume, broker.bootstrap, "border-theirs", 0)


def free_udp_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def test_a_key_sees_what_comes_of_the_sources_it_may_send_to_and_nothing_else(
    broker: EmbeddedBroker, tmp_path: Path
) -> None:
    settings, pipeline = settings_of(tmp_path), roads("roads-seen")
    own = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64, sources=("clicks",)))
    every = KeyFile(keys_path(settings), ApiKey).new(ApiKey("0" * 64))
    upstream = CollectorSpec("websocket", "ws://127.0.0.1:9/", "from")  # not by HTTP, and nothing comes of it
    far = replace(pipeline.sources["clicks"], name="far", topic="roads-seen-far", collectors=(upstream,))
    traffic = pipeline.products["traffic"]
    products = {
        "traffic": traffic,
        "quiet_ones": replace(traffic, name="quiet_ones", source="quiet"),
        "far_ones": replace(traffic, name="far_ones", source="far"),
        "both": replace(traffic, name="both", operator="join", right="far", on=("who",)),
    }
    pipeline = Pipeline({**pipeline.sources, "far": far}, products)
    async with running_node(settings, pipeline, broker.bootstrap) as url:
        for product in products:
            status, _, _ = await get(url, f"/v1/lookup/{product}/a")
            assert status == 401
        for key, seen in ((own, {"traffic"}), (every, set(products))):
            headers = {"Authorization": f"Bearer {key}"}
            async with connect(url.replace("http", "ws") + stream.PATH, additional_headers=headers) as car:
                for product in products:
                    await say(car, subscribe=product, keys=["a"], id=1)
                    answer = await hear(car)
                    assert answer.get("status") == (None if product in seen else 403), product
                    status, _, _ = await request(url, "GET", f"/v1/lookup/{product}/a", None, **headers)
                    assert status == (404 if product in seen else 403), product
