"""Bronze as a tail of events: on real tables and sockets."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import httpx
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract.avro import SCHEMAS
from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source
from serve.tables import events, tables
from serve.tables.events import EventReader
from tests.serve.conftest import serving
from tests.serve.push.clients import TRANSPORTS, WebSocketClient

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("event_id", pa.string()),
        ("tenant", pa.string()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("bronze_at", pa.timestamp("us", "UTC")),
        ("origin", pa.string()),
        ("reject", pa.string()),
        ("payload", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("date", pa.date32()),
    ]
)
PIPELINE = """
[sources.rides]
topic = "rides"
schema = "ride_id BIGINT, city STRING, amount DOUBLE, at TIMESTAMP, ok BOOLEAN, paid DECIMAL(9,2), place STRUCT<x: INT>"
event_id = "{ride_id}"
event_time = "at"

[sources.rides.enrich.towns]
file = "towns.csv"
column = "name"
key = "{city}"
fields = ["state", "people"]
"""
TOWNS = {"Bonn": {"state": "NRW", "people": 335_000}, "Kiel": {"state": None, "people": None}}


class Bronze:
    """A bronze table and its writer.

    Args:
        declared: of the source, beside what :data:`PIPELINE` says.
        encode: makes a payload of its fields.
    """

    def __init__(
        self,
        root: Path,
        declared: str = "",
        encode: Callable[[dict[str, Any]], bytes] = lambda fields: json.dumps(fields).encode(),
    ) -> None:
        self.encode = encode
        (root.parent / "pipeline.toml").write_text(PIPELINE.replace("\nschema", f"\n{declared}\nschema"))
        self.folder = root / "bronze" / "rides"
        self.folder.parent.mkdir(parents=True)
        DeltaTable.create(str(self.folder), SCHEMA, partition_by=["date"])

    def append(
        self, *ids: int, tenant: str = "default", reject: str | None = None, town: str = "", **fields: Any
    ) -> None:
        headers = {"towns_version": b"1"} | ({"towns": json.dumps(TOWNS[town]).encode()} if town else {})
        rows = [
            {
                "event_id": str(number),
                "tenant": tenant,
                "received_at": T0 + timedelta(seconds=number),
                "bronze_at": T0 + timedelta(seconds=number),
                "origin": "stream",
                "reject": reject,
                "payload": self.encode({"ride_id": number, "city": "Bonn", "amount": number * 10, **fields}),
                "headers": list(headers.items()),
                "date": T0.date(),
            }
            for number in ids
        ]
        write_deltalake(str(self.folder), pa.Table.from_pylist(rows, schema=SCHEMA), mode="append")


@pytest.fixture
def bronze(root: Path) -> Bronze:
    return Bronze(root)


def reader(bronze: Bronze) -> EventReader:
    schema = PIPELINE.split('schema = "')[1].split('"')[0]
    rides = Source(name="rides", topic="rides", schema=schema, event_time="at")
    return EventReader(bronze.folder, rides, bronze.folder / "no schemas")


def ids(message: dict[str, Any]) -> list[int]:
    return [row["ride_id"] for row in message.get("rows", message.get("upserts", []))]


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_single_events_come_over_each_transport(root: Path, bronze: Bronze, name: str) -> None:
    bronze.append(4, 7)
    query = {"table": "rides", "select": "SELECT ride_id, city, amount FROM rides WHERE amount > 50"}
    async with serving(root, str(root.parent)) as url, TRANSPORTS[name](url, query) as client:
        first = await client.receive("snapshot")
        assert [(row["event_id"], row["ride_id"], row["amount"]) for row in first["rows"]] == [("7", 7, 70.0)]
        bronze.append(5, 6, 8)
        change = await client.receive("change")
        assert ids(change) == [6, 8] and change["deletes"] == []
        assert set(change["upserts"][0]) == {"event_id", "tenant", "ride_id", "city", "amount"}


JOINED = (
    "SELECT r.ride_id, t.state FROM rides r JOIN towns t ON r.city = t.name WHERE t.people <> '1' OR t.state IS NULL"
)


@pytest.mark.parametrize("name", TRANSPORTS)
async def test_a_reference_is_joined_over_each_transport(root: Path, bronze: Bronze, name: str) -> None:
    """An event carries the row that the reference had for it, so a reader that comes back is told the same."""
    bronze.append(1, town="Bonn")
    bronze.append(2)
    async with serving(root, str(root.parent)) as url:
        async with TRANSPORTS[name](url, {"table": "rides", "select": JOINED}) as client:
            first = await client.receive("snapshot")
            assert [(row["ride_id"], row["towns.state"]) for row in first["rows"]] == [(1, "NRW")]
            bronze.append(3, 4, town="Bonn")
            bronze.append(5)
            bronze.append(6, town="Kiel")
            changes = [await client.receive("change") for _ in range(3)]
            assert [ids(change) for change in changes] == [[3, 4], [], [6]]
            assert [row["towns.state"] for change in changes for row in change["upserts"]] == ["NRW", "NRW", None]
        again = {"table": "rides", "select": JOINED, "from": first["position"]}
        async with TRANSPORTS[name](url, again) as client:
            told: list[dict[str, Any]] = []
            while len(told) < len(changes):
                told += [one for one in [await client.receive()] if one["type"] != "resumed"]
            assert told == changes


async def test_references_in_rows_filters_and_aggregates(root: Path, bronze: Bronze) -> None:
    bronze.append(1, 2, town="Bonn")
    bronze.append(3, town="Kiel")
    bronze.append(4)
    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def rows(status: int = 200, **query: str) -> Any:
            answer = await http.get("/v1/tables/rides", params=query)
            assert answer.status_code == status, answer.text
            return answer.json()["rows"] if status == 200 else answer.json()["detail"]

        carried = [(row["towns"], row["towns.state"], row["towns.people"]) for row in await rows()]
        assert carried == [(True, "NRW", "335000"), (True, "NRW", "335000"), (True, None, None), (None, None, None)]
        assert ids({"rows": await rows(where="\"towns.state\" = 'NRW'")}) == [1, 2]
        assert 'with quotes "towns.state"' in await rows(400, where="towns.state = 'NRW'")
        assert ids({"rows": await rows(select="SELECT * FROM rides LEFT JOIN towns ON city = towns.name")}) == [
            1,
            2,
            3,
            4,
        ]
        totals = "SELECT t.state AS state, count(*) AS n FROM rides r JOIN towns t ON t.name = r.city GROUP BY t.state"
        assert await rows(select=totals) == [{"state": "NRW", "n": 2}, {"state": None, "n": 1}]
        join = "SELECT ride_id FROM rides r JOIN towns t ON"
        for refused, why in {
            f"{join} r.city = t.state": "not joined as it is declared",
            f"{join} r.city = t.name AND t.people > 1": "not joined as it is declared",
            "SELECT ride_id FROM rides CROSS JOIN towns": "not joined as it is declared",
            "SELECT ride_id FROM rides ASOF JOIN towns ON city = towns.name": "not joined as it is declared",
            "SELECT ride_id FROM rides JOIN elsewhere e ON city = e.name": "JOINS is not kept up to date here",
            "SELECT ride_id FROM rides r(a, b)": "FROM names this table",
            "SELECT x.towns.state FROM rides x": "qualified",
            f"SELECT t.mayor FROM rides r {join.partition('rides r ')[2]} r.city = t.name": "no field 'mayor'",
        }.items():
            assert why in await rows(400, select=refused), refused


async def test_what_a_payload_says_is_typed_as_it_is_declared(root: Path, bronze: Bronze) -> None:
    bronze.append(1, at="2026-01-01T13:00:00+01:00", ok=True, paid="x", place={"x": 1}, more=5)
    bronze.append(2, ride_id="two", city=5, amount=True, at=7, ok=0, paid=1.25, place=[1], reject="too large")
    bronze.append(3, ride_id=2**70, amount=None)
    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        rows = (await http.get("/v1/tables/rides")).json()["rows"]
        found = [[row[name] for name in ("ride_id", "city", "amount", "at", "ok", "paid", "place")] for row in rows]
        assert found == [
            [1, "Bonn", 10.0, "2026-01-01T12:00:00Z", True, None, {"x": 1}],
            [None, "5", None, None, None, 1.25, [1]],
            [None, "Bonn", None, None, None, None, None],
        ]
        assert [row["reason"] for row in rows] == [None, "too large", None]
        where = {"where": "at = TIMESTAMP '2026-01-01 12:00:00' AND ok AND reason IS NULL"}
        assert ids((await http.get("/v1/tables/rides", params=where)).json()) == [1]
        assert (await http.get("/v1/tables/rides", params={"where": "place = 1"})).status_code == 400
        history = (await http.get("/v1/history/rides", params={"since": "1", "where": "paid > 1"})).json()
        assert [row["event_id"] for change in history["changes"] for row in change["upserts"]] == ["2"]
        one = (await http.get("/v1/tables/rides/2")).json()["rows"]
        assert one[0]["reject"] == "too large", "an event is still read through by its id, as bronze has it"


def wrapped(fields: dict[str, Any]) -> bytes:
    """As Debezium writes a row that was inserted."""
    return json.dumps({"schema": None, "payload": {"op": "c", "before": None, "after": fields}}).encode()


async def test_what_debezium_wraps_is_unwrapped(root: Path) -> None:
    bronze = Bronze(root, 'unwrap = "payload.after"', wrapped)
    bronze.append(1, at="2026-01-01T13:00:00+01:00", paid=1.25)
    bronze.encode = lambda fields: json.dumps({"payload": {"op": "d", "after": None}}).encode()
    bronze.append(2)
    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        rows = (await http.get("/v1/tables/rides")).json()["rows"]
        found = [tuple(row[name] for name in ("event_id", "ride_id", "city", "at", "paid")) for row in rows]
        assert found == [("1", 1, "Bonn", "2026-01-01T12:00:00Z", 1.25), ("2", None, None, None, None)]


async def test_a_field_that_the_envelope_has_too_is_named_as_the_products_name_it(
    root: Path, bronze: Bronze, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root.parent / "pipeline.toml").write_text(PIPELINE.replace("ride_id BIGINT,", "ride_id BIGINT, tenant STRING,"))
    bronze.append(1, tenant="acme")
    monkeypatch.setattr(bronze, "encode", lambda fields: json.dumps(fields | {"tenant": "of the payload"}).encode())
    bronze.append(2, tenant="acme")
    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        rows = (await http.get("/v1/tables/rides", params={"where": "tenant = 'acme'"})).json()["rows"]
        found = [(row["tenant"], row["ride_id"], row["tenant_"], row["city"]) for row in rows]
        assert found == [("acme", 1, None, "Bonn"), ("acme", 2, "of the payload", "Bonn")]


RIDE = {
    "type": "record",
    "name": "Ride",
    "fields": [
        {"name": "ride_id", "type": "long"},
        {"name": "city", "type": "string"},
        {"name": "amount", "type": "double"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "paid", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "place", "type": {"type": "record", "name": "Place", "fields": [{"name": "x", "type": "int"}]}},
    ],
}


def in_avro(fields: dict[str, Any]) -> bytes:
    """As Confluent's serializers write it, by schema 7."""
    text = io.BytesIO(struct.pack(">bI", 0, 7))
    text.seek(0, io.SEEK_END)
    ride = {"at": T0, "paid": Decimal("1.25"), "place": {"x": 1}}
    fastavro.schemaless_writer(text, fastavro.parse_schema(RIDE), ride | fields)
    return text.getvalue()


async def test_payloads_in_avro_are_read_by_the_schemas_that_the_lake_keeps(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_UNREADABLE_RETRY_S", 0.1)
    bronze = Bronze(root, 'format = "avro"', in_avro)
    bronze.append(1)
    bronze.encode = lambda fields: b"{}"
    bronze.append(2)
    query = {"table": "rides", "select": "SELECT ride_id, city, amount, at, paid, place FROM rides"}
    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        refused = await http.get("/v1/tables/rides")
        assert refused.status_code == 409 and "Avro schema 7, which the lake does not have" in refused.text
        kept = Lake(root).shared / SCHEMAS / "7.json"
        kept.parent.mkdir(parents=True)
        kept.write_text(json.dumps({"schema": json.dumps(RIDE), "references": []}))
        async with asyncio.timeout(60):
            while (await http.get("/v1/tables/rides")).status_code != 200:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.1)
        async with WebSocketClient(url, query) as client:
            first = await client.receive("snapshot")
            ride = {"city": "Bonn", "at": "2026-01-01T12:00:00Z", "paid": 1.25, "place": {"x": 1}}
            nothing = dict.fromkeys(("ride_id", "amount", *ride))
            assert [{name: row[name] for name in nothing} for row in first["rows"]] == [
                {"ride_id": 1, "amount": 10.0, **ride},
                nothing,
            ]
            bronze.encode = in_avro
            bronze.append(3)
            assert (await client.receive("change"))["upserts"][0]["ride_id"] == 3


async def test_the_oldest_leave_and_any_process_tells_the_same(
    root: Path, bronze: Bronze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEPT", 3)
    bronze.append(0, 1, 2, 3, 4)
    async with serving(root, str(root.parent)) as url, WebSocketClient(url, {"table": "rides"}) as client:
        first = await client.receive("snapshot")
        assert ids(first) == [0, 1, 2, 3, 4], "a whole commit is there at first"
        told = []
        for batch in ((5,), (6, 7), (7, 8)):
            bronze.append(*batch)
            told.append(await client.receive("change"))
        assert [ids(change) for change in told] == [[5], [6, 7], [7, 8]]
        assert [[key["event_id"] for key in change["deletes"]] for change in told] == [["0", "1"], ["2"], ["3", "4"]]
    async with serving(root, str(root.parent)) as url:  # another process, without these changes in memory
        async with WebSocketClient(url, {"table": "rides", "from": first["position"]}) as again:
            await again.receive("resumed")
            repeated = [await again.receive("change") for _ in range(3)]
        facts = ("upserts", "deletes", "position", "events", "newest_at")
        assert [[c[fact] for fact in facts] for c in repeated] == [[c[fact] for fact in facts] for c in told]
        async with WebSocketClient(url, {"table": "rides"}) as new:
            assert ids(await new.receive("snapshot")) == [5, 6, 7, 8]


@pytest.mark.parametrize("number", range(1, 8))
def test_a_state_that_is_loaded_is_the_one_that_was_reached(
    bronze: Bronze, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(events, "KEPT", number)
    for batch in ((1, 2, 3), (4, 1, 4), (), (5, 6), (2, 7), (), (8, 9, 5, 11), (8, 3)):
        bronze.append(*batch) if batch else DeltaTable(str(bronze.folder)).optimize.compact()
    log, state = DeltaLog(bronze.folder), reader(bronze).load(0)
    for version in range(1, log.newest() + 1):
        reader(bronze).advance(state, log.read(version))
        loaded = reader(bronze).load(version)
        assert (list(loaded.rows.items()), loaded.version) == (list(state.rows.items()), version)


async def test_a_flood_of_events_is_told_as_a_gap(root: Path, bronze: Bronze, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_AT_ONCE", 4)
    bronze.append(1)
    async with serving(root, str(root.parent)) as url, WebSocketClient(url, {"table": "rides"}) as client:
        await client.receive("snapshot")
        bronze.append(*range(10, 20))
        expired = await client.receive("expired")
        assert expired["reason"] == "log" and "10 events" in expired["detail"]
        assert ids(await client.receive("snapshot"))[-4:] == [16, 17, 18, 19]
        bronze.append(30)
        assert ids(await client.receive("change")) == [30]


async def test_bronze_is_followed_only_while_somebody_wants_it(
    root: Path, bronze: Bronze, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_WANTED_MS", 300)
    bronze.append(1)

    async def served(http: httpx.AsyncClient) -> bool:
        return bool((await http.get("/v1/tables")).json()["tables"][0]["served"])

    async def until(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not await condition():  # noqa: ASYNC110 - the server says nothing by itself
                await asyncio.sleep(0.05)

    async with serving(root, str(root.parent)) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        assert not await served(http)
        async with WebSocketClient(url, {"table": "rides"}) as client:
            await client.receive("snapshot")
            await asyncio.sleep(1.5)
            assert await served(http), "as long as there is a subscriber"

        async def gone() -> bool:
            return not await served(http)

        await until(gone)
        assert ids((await http.get("/v1/tables/rides")).json()) == [1], "asked for again it is there again"


def test_events_whose_files_are_cleaned_up_are_left_out(bronze: Bronze) -> None:
    bronze.append(1)
    bronze.append(2)
    bronze.append(3)
    next(iter(DeltaLog(bronze.folder).read(2).added)).located(bronze.folder).unlink()
    assert [key[0] for key in reader(bronze).load().rows] == ["3"]
    with pytest.raises(TableGone):
        reader(bronze).load(2)


def test_a_table_that_is_gone_is_told(bronze: Bronze) -> None:
    with pytest.raises(TableGone):
        reader(bronze).load(7)
    nothing = bronze.folder.parent / "nothing"
    other = EventReader(nothing, Source(name="n", topic="n", schema="a INT", event_time="at"), nothing)
    with pytest.raises(TableGone):
        other.info()
