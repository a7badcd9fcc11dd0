"""Look-ups by key on a real socket, from memory and read through."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from lakehouse.contract import lake
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import CommitFacts, Lake
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.settings import ServeSettings
from serve.access import ReaderKey
from serve.core.channel import Channel
from serve.core.model import TableInfo
from serve.core.position import Seal
from serve.http.rows import PrefixIndex
from serve.tables.state import TableState
from tests.serve.conftest import serving
from tests.serve.lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window

VISITS = pa.schema([("visitor", pa.string()), ("start", pa.int64()), ("views", pa.int64())])


def visit(visitor: str, start: int, views: int) -> dict[str, object]:
    return {"visitor": visitor, "start": start, "views": views}


def visits(root: Path) -> Product:
    return Product(root / "gold" / "visits", VISITS, {lake.PROPERTY_KEY: "visitor,start"})


async def test_a_whole_session_by_visitor(root: Path) -> None:
    product = visits(root)
    product.append([visit("ann", 1, 3), visit("ann", 2, 4), visit("bob,/ß", 1, 9), visit("", 5, 1)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def views(key: str, **query: str) -> list[int]:
            answer = await client.get(f"/v1/tables/visits/{key}", params=query or None)
            assert answer.status_code in (200, 404), answer.text
            assert answer.status_code == 200 or answer.json()["code"] == "no_such_row"
            return [row["views"] for row in answer.json().get("rows", [])]

        assert await views("ann") == [3, 4]
        assert await views("ann,2") == [4]
        assert await views("bob%2C%2F%C3%9F") == [9]
        assert await views(",5") == [1]
        assert await views("carl") == [] == await views("ann,3")
        assert await views("ann", where="views > 3", columns="views") == [4]
        product.append([visit("carl", 1, 1), visit("ann", 3, 7)])
        async with asyncio.timeout(60):
            while await views("carl") == []:  # noqa: ASYNC110 - the tail says nothing
                await asyncio.sleep(0.01)
        assert await views("ann") == [3, 4, 7], "the index has caught up"
        only = pa.Table.from_pylist([visit("ann", 1, 30)], schema=VISITS)
        write_deltalake(product.folder, only, mode="overwrite")
        async with asyncio.timeout(60):
            while await views("carl") == [1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await views("ann") == [30]
        for wrong, status in (("ann,x", 400), ("a,1,2", 400), ("a/b", 400), ("%FF", 400)):
            assert (await client.get(f"/v1/tables/visits/{wrong}")).status_code == status, wrong
        for query in ("select=SELECT count(*)", "from=x", "limit=0", "more=1"):
            assert (await client.get(f"/v1/tables/visits/ann?{query}")).status_code == 400, query
        assert (await client.get("/v1/tables/nope/ann")).status_code == 404


async def test_keys_of_other_kinds(root: Path) -> None:
    top_topics(root).append(topics(0, [5, 4]) + topics(1, [9]))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        start = window(0).isoformat().replace("+00:00", "Z")
        both = (await client.get(f"/v1/tables/top_topics/{start}")).json()
        assert [row["count"] for row in both["rows"]] == [5, 4]
        one = (await client.get(f"/v1/tables/top_topics/{start},2")).json()
        assert [row["count"] for row in one["rows"]] == [4]
        assert (await client.get("/v1/tables/top_topics/noon")).status_code == 400


async def test_who_asks_while_an_index_is_made_waits_for_it() -> None:
    table = TableInfo("t", "id", ("a", "b"), ("a", "b"), types=(pa.int64(), pa.int64()))
    rows: dict[Key, Row] = {(k // 2, k % 2): (k // 2, k % 2) for k in range(12_000)}
    channel = Channel(TableState(table, 3, CommitFacts(3), rows), [], ServeSettings(), Seal(b"of the test"))
    index = PrefixIndex(channel, 1)

    async def found(prefix: int) -> set[Key]:
        await index.caught_up()
        return index.keys((prefix,))

    for at in (5_999, 3_000, 0):
        assert await asyncio.gather(*[found(at) for _ in range(3)]) == [{(at, 0), (at, 1)}] * 3
        channel.restarted(TableState(table, channel.state.version + 1, CommitFacts(0), rows))


async def test_a_row_filter_holds_for_look_ups(root: Path) -> None:
    rsvps_by_city(root).append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, rows={"*": "city = 'Bonn'"}))
    start = window(0).isoformat().replace("+00:00", "Z")
    shown = {"Authorization": f"Bearer {key}"}
    async with serving(root) as url, httpx.AsyncClient(base_url=url, headers=shown, timeout=60) as client:
        found = (await client.get(f"/v1/tables/rsvps_by_city/{start}")).json()
        assert [row["city"] for row in found["rows"]] == ["Bonn"]
        assert (await client.get(f"/v1/tables/rsvps_by_city/{start},Berlin,de")).status_code == 404


async def test_what_is_not_in_memory_is_read_through(root: Path) -> None:
    schema = TOPICS.append(pa.field("event_id", pa.string()))
    bronze = Product(root / "bronze" / "rsvps", schema, {})
    bronze.append([row | {"event_id": f"it's {row['rank']}"} for row in topics(0, [5, 4])])
    Product(root / "silver" / "plain", TOPICS, {})
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for _ in range(2):  # the second comes out of the cache
            found = (await client.get("/v1/tables/rsvps/it's 2")).json()
            assert [row["count"] for row in found["rows"]] == [4]
        assert (await client.get("/v1/tables/rsvps/x' OR '1'='1")).status_code == 404
        assert (await client.get("/v1/tables/plain/x")).status_code == 409
        assert (await client.get("/v1/tables/rsvps/a,b")).status_code == 400


async def test_what_was_read_through_under_other_rights_is_not_shown(root: Path) -> None:
    bronze = Product(root / "bronze" / "rsvps", TOPICS.append(pa.field("event_id", pa.string())), {})
    bronze.append([row | {"event_id": "one"} for row in topics(0, [5])])
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    key = file.new(ReaderKey("0" * 64, rows={"*": "count > 4"}))
    shown = {"Authorization": f"Bearer {key}"}
    async with serving(root) as url, httpx.AsyncClient(base_url=url, headers=shown, timeout=60) as client:
        assert [row["count"] for row in (await client.get("/v1/tables/rsvps/one")).json()["rows"]] == [5]
        file.path.write_text(file.path.read_text().replace("count > 4", "count > 5"))
        async with asyncio.timeout(60):
            while (await client.get("/v1/tables/rsvps/one")).status_code != 404:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/tables/visits/", "/v1/tables/visits/%00"])
async def test_odd_keys_are_only_not_found(root: Path, path: str) -> None:
    visits(root).append([visit("ann", 1, 3)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await client.get(path)).status_code == 404
