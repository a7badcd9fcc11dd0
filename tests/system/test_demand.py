"""Demand travels upstream: simulated devices on a real collector, subscribers at a real server, a broker between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
import pyarrow as pa
import pytest
from websockets.asyncio.client import ClientConnection, connect

from ingest.answers.stream import PATH
from ingest.border.access import ApiKey, keys_path
from ingest.broker import EmbeddedBroker
from ingest.simulate.player import Play
from ingest.simulate.server import SimulatedDevice, run_devices
from lakehouse.contract import lake as names
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.folder import PipelineFiles, load_pipeline
from serve.access import ReaderKey
from tests.ingest.conftest import consume, eventually, running_node, settings_of, unready_node
from tests.serve.conftest import Spawned, receive, serving, subscribed
from tests.serve.lakes import Product, city, rsvps_by_city
from tests.serve.push.clients import TRANSPORTS

ROOT = Path(__file__).parents[2]
STATIONS = """
[sources.readings]
topic = "readings"
schema = "id BIGINT, station STRING"
event_id = "{id}"
event_time = "received_at"
[[sources.readings.collectors]]
kind = "http"

[products.levels]
layer = "gold"
source = "readings"
sql = "SELECT tenant, station, count(*) AS n FROM readings GROUP BY tenant, station"
tenant = "tenant"

[products.common]
layer = "gold"
source = "readings"
sql = "SELECT station, count(*) AS n FROM readings GROUP BY station"
tenant = "*"

[products.empty]
layer = "gold"
source = "readings"
sql = "SELECT station, min(id) AS id FROM readings GROUP BY station"
"""
ROWS = pa.schema([("tenant", pa.string()), ("station", pa.string()), ("n", pa.int64())])


class Fleet:
    """The simulated devices of a pipeline, and what they were told."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self._devices: set[SimulatedDevice] = set()

    def tell(self, device: SimulatedDevice, wanted: bool) -> None:
        self.told.append(wanted)
        self._devices.add(device)

    def count(self) -> tuple[int, int]:
        """Events that were sent, and those of them that were acknowledged."""
        return sum(each.sent for each in self._devices), sum(each.acknowledged for each in self._devices)


@asynccontextmanager
async def publishing(pipeline: Pipeline, url: str) -> AsyncIterator[Fleet]:
    fleet, stop = Fleet(), asyncio.Event()
    task = asyncio.create_task(run_devices(pipeline, Play(rate=200), url, "", fleet.tell, stop))
    try:
        yield fleet
    finally:
        stop.set()
        await task


@pytest.mark.broker
async def test_devices_publish_while_somebody_is_interested(broker: EmbeddedBroker, tmp_path: Path) -> None:
    declared = load_pipeline(ROOT / "conf" / "pipelines" / "meetup")
    topic = f"demand-{uuid4().hex[:8]}"
    source = replace(declared.sources["rsvps"], topic=topic, collectors=declared.sources["rsvps"].collectors[1:])
    pipeline = replace(declared, sources={"rsvps": source})
    rsvps_by_city(tmp_path).append([city(0, "Berlin", 1)])
    with contextlib.closing(Spawned(tmp_path)) as server:
        await stop_and_start(server, pipeline, broker.bootstrap, tmp_path)


async def stop_and_start(server: Spawned, pipeline: Pipeline, bootstrap: str, folder: Path) -> None:
    """No subscriber, one, none, and one whose server is killed."""
    async with (
        running_node(settings_of(folder), pipeline, bootstrap) as url,
        publishing(pipeline, url) as fleet,
    ):
        await eventually(lambda: fleet.told == [False])
        assert fleet.count() == (0, 0), "nobody is interested yet"

        async with subscribed(server.url, "rsvps_by_city") as subscriber:
            await receive(subscriber)
            await eventually(lambda: fleet.told == [False, True])
            await eventually(lambda: fleet.count()[1] >= 50)
        await eventually(lambda: fleet.told == [False, True, False])
        sent = fleet.count()[0]
        await eventually(lambda: fleet.count()[1] == sent)
        await asyncio.sleep(1)
        assert fleet.count() == (sent, sent), "they rest"
        records: list[Any] = []
        async with asyncio.timeout(60):
            while len(records) < sent:  # acknowledged is in the log or in Kafka
                records = await asyncio.to_thread(consume, bootstrap, pipeline.sources["rsvps"].topic, 1)
        assert len(records) == sent

        async with subscribed(server.url, "rsvps_by_city") as subscriber:
            await receive(subscriber)
            await eventually(lambda: fleet.count()[0] > sent)
            server.kill()
            sent = fleet.count()[0]
            await eventually(lambda: fleet.told == [False, True, False, True, False])
            assert fleet.count()[0] > sent + 20, "the subscriber might have connected to another server meanwhile"


class Device:
    """A device on ``/v1/stream`` that only listens."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.said: list[Any] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for message in self.connection:
            said = json.loads(message)
            self.said.append(said.get("wanted", said))

    async def ask(self, **message: Any) -> None:
        await self.connection.send(orjson.dumps(message).decode())


@asynccontextmanager
async def device(url: str, key: str = "", **about: Any) -> AsyncIterator[Device]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with connect(url.replace("http", "ws") + PATH, additional_headers=headers) as connection:
        made = Device(connection)
        await made.ask(demand="readings", **({"about": about} if about else {}))
        yield made


class Stations:
    """A lake of two products, a collector and a server."""

    def __init__(self, root: Path, collector: str, server: str) -> None:
        self.root, self.collector, self.server = root, collector, server

    def reader(self, table: str, transport: str = "websocket", **query: str) -> Any:
        return TRANSPORTS[transport](self.server, {"table": table, **query})


@asynccontextmanager
async def stations(folder: Path) -> AsyncIterator[Stations]:
    (folder / "pipeline.toml").write_text(STATIONS)
    root = folder / "lake"
    row = {"tenant": "acme", "station": "s1", "n": 1}
    for table in ("levels", "common"):
        Product(root / "gold" / table, ROWS, {names.PROPERTY_KEY: "tenant,station"}).append([row])
    pipeline = PipelineFiles(folder, folder / "none").load()
    async with (
        unready_node(settings_of(root), pipeline) as collector,
        serving(root, str(folder)) as server,
    ):
        yield Stations(root, collector, server)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys of senders and readers, made before collector and server start."""
    root = tmp_path / "lake"
    senders = KeyFile(keys_path(settings_of(root)), ApiKey)
    readers = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    tenants = {"acme": "acme", "globex": "globex", "operator": ""}
    found = {f"send {name}": senders.new(ApiKey("0" * 64, tenant=tenant)) for name, tenant in tenants.items()}
    return found | {name: readers.new(ReaderKey("0" * 64, tenant=tenant)) for name, tenant in tenants.items()}


async def settled(*pairs: tuple[Device, list[Any]]) -> None:
    """Wait until devices were told this, and no more."""
    await eventually(lambda: all(device.said == said for device, said in pairs))
    await asyncio.sleep(0.6)  # more than two looks
    assert [device.said for device, _ in pairs] == [said for _, said in pairs]


async def test_a_device_hears_of_readers_of_its_own_tenant(tmp_path: Path, keys: dict[str, str]) -> None:
    async with (
        stations(tmp_path) as place,
        device(place.collector, keys["send acme"]) as acme,
        device(place.collector, keys["send globex"]) as globex,
    ):
        await settled((acme, [False]), (globex, [False]))
        for table in ("levels", "common"):
            async with place.reader(table, key=keys["globex"]) as reader:
                await reader.receive()
                await settled((acme, [False]), (globex, [False, True]))
            await settled((acme, [False]), (globex, [False, True, False]))
            globex.said = [False]
        async with place.reader("levels", key=keys["operator"]) as reader:
            await reader.receive()
            await settled((acme, [False, True]), (globex, [False, True]))


@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_every_transport_is_a_demand(tmp_path: Path, transport: str) -> None:
    async with stations(tmp_path) as place, device(place.collector) as one:
        await eventually(lambda: one.said == [False])
        async with place.reader("levels", transport) as reader:
            await reader.receive()
            polling = asyncio.create_task(reader.receive("change"))
            await eventually(lambda: one.said == [False, True])
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        await eventually(lambda: one.said == [False, True, False])


async def test_a_filter_is_a_demand_for_its_values(tmp_path: Path) -> None:
    async with (
        stations(tmp_path) as place,
        device(place.collector, station="s1") as first,
        device(place.collector, station="s2") as second,
        device(place.collector, city="Bonn") as other,
    ):
        quiet = [False]
        await eventually(lambda: first.said == second.said == other.said == quiet)
        async with place.reader("levels", where="station IN ('s1', 's9') AND n > 0") as reader:
            await reader.receive()
            await settled((first, [False, True]), (second, quiet), (other, [False, True]))
            async with place.reader("levels", where="n > 7") as all_stations:
                await all_stations.receive()
                await settled((first, [False, True]), (second, [False, True]), (other, [False, True]))
            await settled((first, [False, True]), (second, [False, True, False]), (other, [False, True]))


async def test_a_table_that_its_first_event_will_make_is_a_demand(tmp_path: Path) -> None:
    async with stations(tmp_path) as place, device(place.collector) as one:
        await eventually(lambda: one.said == [False])
        async with place.reader("empty") as reader:
            assert (await reader.receive("error"))["code"] == "no_such_table"
        await eventually(lambda: one.said == [False, True])


async def test_subscribers_of_the_collector_are_a_demand(tmp_path: Path) -> None:
    async with (
        stations(tmp_path) as place,
        device(place.collector) as one,
        connect(place.collector.replace("http", "ws") + PATH) as reader,
    ):
        await eventually(lambda: one.said == [False])
        await reader.send('{"subscribe": "common", "keys": [["acme"]]}')
        await eventually(lambda: one.said == [False, True])
        await reader.send('{"subscribe": "common", "keys": []}')
        await eventually(lambda: one.said == [False, True, False])
        await reader.send('{"subscribe": "common", "keys": [["acme"]]}')
        await eventually(lambda: one.said == [False, True, False, True])
        await reader.close()
        await eventually(lambda: one.said == [False, True, False, True, False])


async def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    async with stations(tmp_path) as place, device(place.collector) as one:
        await eventually(lambda: one.said == [False])
        cases: dict[int, dict[str, Any]] = {
            404: {"demand": "nothing"},
            400: {"demand": "readings", "about": ["s1"]},
            413: {"demand": "readings", "about": {f"c{n}": n for n in range(17)}},
        }
        for number, message in cases.items():
            await one.ask(id=number, **message)
        await eventually(lambda: len(one.said) == 1 + len(cases))
        assert [(said["refused"], said["status"]) for said in one.said[1:]] == [(n, n) for n in cases]


async def test_what_is_not_known_is_wanted(tmp_path: Path, log_of: Callable[[], str]) -> None:
    """A collector that cannot read the notes holds nothing back."""
    async with stations(tmp_path) as place:
        folder = place.root / "_millrace" / "demand"
        (folder / "broken.json").mkdir(parents=True)
        async with device(place.collector) as one:
            await eventually(lambda: one.said == [True])
            (folder / "broken.json").rmdir()
            await eventually(lambda: one.said == [True, False])
        assert log_of().count("what subscribers want cannot be read") == 1


@pytest.fixture
def log_of(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    return lambda: caplog.text


async def test_a_device_asks_by_http(tmp_path: Path, keys: dict[str, str]) -> None:
    acme = {"Authorization": f"Bearer {keys['send acme']}"}
    async with stations(tmp_path) as place, httpx.AsyncClient(base_url=place.collector, timeout=90) as client:

        async def asked(**query: str) -> Any:
            answer = await client.get("/v1/demand/readings", params=query, headers=acme)
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store"), answer.text
            return answer.json()["wanted"]

        assert await asked() is False
        assert await asked(wanted="true", wait="60") is False, "at once"
        assert await asked(wanted="false", wait="0.5") is False
        waiting = asyncio.create_task(asked(wanted="false", wait="60", station="s1"))
        other = asyncio.create_task(asked(wanted="false", wait="60", station="s2"))
        async with place.reader("levels", key=keys["acme"], where="station = 's1'") as reader:
            await reader.receive()
            assert await waiting is True
            assert not other.done()
            waiting = asyncio.create_task(asked(wanted="true", wait="60", station="s1"))
            await asyncio.sleep(0.6)
            assert not waiting.done()
        assert await waiting is False
        other.cancel()
        statuses = [
            (await client.get(path, headers=headers)).status_code
            for path, headers in (
                ("/v1/demand/readings", {}),
                ("/v1/demand/nothing", acme),
                ("/v1/demand/readings?wait=x", acme),
                ("/v1/demand/readings?wait=61", acme),
                ("/v1/demand/readings?" + "&".join(f"c{n}=1" for n in range(17)), acme),
            )
        ]
        assert statuses == [401, 404, 400, 400, 413]
