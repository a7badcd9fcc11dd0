"""``/v1/sql`` and ``as_of`` on a real socket, with real workers."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from websockets.asyncio.client import connect

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings
from serve.access import ReaderKey
from serve.core.model import OPEN
from serve.sql.routes import Workers
from tests.lakehouse.lakes import bronze_rows
from tests.serve.conftest import serving
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window

ENDLESS = "SELECT max(hash(range)) AS n FROM range(1000000000000)"


async def post(client: httpx.AsyncClient, sql: str, **more: Any) -> httpx.Response:
    return await client.post("/v1/sql", json={"sql": sql, **more}, timeout=60)


async def test_a_statement_over_http(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.sql.routes.MAX_ROWS", 10)
    top_topics(root).overwrite(topics(0, [5, 4, 3]), [window(0)])
    write_deltalake(str(root / "bronze" / "rsvps"), bronze_rows([b'{"rsvp_id":7,"group":{"group_city":"Bonn"}}']))
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = (await post(client, "SELECT rank, count FROM top_topics ORDER BY rank LIMIT 1")).json()
        assert answer == {
            "columns": [{"name": "rank", "type": "int32"}, {"name": "count", "type": "int64"}],
            "rows": [{"rank": 1, "count": 5}],
            "truncated": False,
            "versions": {"top_topics": 1},
        }
        assert (await post(client, "SELECT * FROM range(100)")).json()["truncated"] is True
        arrow = await post(client, "SELECT rank FROM top_topics", format="arrow", limit=2)
        assert arrow.headers["content-type"] == "application/vnd.apache.arrow.stream"
        assert pa.ipc.open_stream(io.BytesIO(arrow.content)).read_all().num_rows == 2
        for body, status, code in (
            ({"sql": "DROP TABLE top_topics"}, 400, "bad_sql"),
            ({"sql": "SELECT * FROM nope"}, 404, "no_such_table"),
            ({"sql": ""}, 400, "bad_request"),
            ({"sql": "SELECT 1", "as_of": "noon"}, 400, "bad_sql"),
            ({"sql": "SELECT 1", "limit": 0}, 400, "bad_request"),
            ({"sql": "SELECT 1", "more": 0}, 400, "bad_request"),
            ({"sql": "SELECT 1", "format": "csv"}, 400, "bad_request"),
            ({"sql": "x" * 300_000}, 413, "too_large"),
        ):
            refused = await client.post("/v1/sql", json=body, timeout=60)
            assert (refused.status_code, refused.json()["code"]) == (status, code), body
        payloads = (await post(client, 'SELECT rsvp_id, "group".group_city AS city FROM rsvps__events')).json()
        assert payloads["rows"] == [{"rsvp_id": 7, "city": "Bonn"}]
        form = await client.post("/v1/sql", content=b"{}", headers={"content-type": "text/plain"})
        assert form.status_code == 415


async def test_a_statement_is_ended(root: Path) -> None:
    """By its time, by hanging up; the worker's process goes, and the next statement has another."""
    top_topics(root)
    async with (
        serving(root, max_sql=1, sql_timeout_s=2.0) as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        slow = await post(client, ENDLESS)
        assert (slow.status_code, slow.json()["code"]) == (408, "timeout")
    async with (
        serving(root, max_sql=1, sql_timeout_s=600.0) as url,  # type: ignore[arg-type]
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        hung_up = asyncio.create_task(post(client, ENDLESS))
        await asyncio.sleep(0.3)
        hung_up.cancel()
        async with asyncio.timeout(60):
            assert (await post(client, "SELECT 1 AS one")).json()["rows"] == [{"one": 1}]


async def test_a_statement_that_takes_the_workers_memory_ends_alone(root: Path) -> None:
    top_topics(root)
    async with serving(root, sql_memory_mb=64) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        huge = await post(client, "SELECT length(repeat('x', 4000000000)) AS n")
        assert (huge.status_code, huge.json()["code"]) == (400, "bad_sql"), huge.text
        assert (await post(client, "SELECT 1 AS one")).json()["rows"] == [{"one": 1}]


async def test_a_key_sees_its_rows_in_sql_and_in_history(root: Path) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    product.append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    key = file.new(ReaderKey("0" * 64, "bonn", tables=("rsvps_by_city",), rows={"*": "city = 'Bonn'"}))
    shown = {"Authorization": f"Bearer {key}"}
    async with serving(root) as url, httpx.AsyncClient(base_url=url, headers=shown, timeout=60) as client:
        assert (await post(client, "SELECT city, yes FROM rsvps_by_city")).json()["rows"] == [
            {"city": "Bonn", "yes": 4}
        ]
        was = (await client.get("/v1/tables/rsvps_by_city?as_of=1&columns=yes")).json()
        assert [row["yes"] for row in was["rows"]] == [2]


async def test_a_table_as_it_was_and_what_followed(root: Path) -> None:
    product = top_topics(root)
    for counts in ([5, 4, 3], [50, 40], [500]):
        product.overwrite(topics(0, counts), [window(0)])
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        address = "/v1/tables/top_topics"
        was = (await client.get(f"{address}?as_of=1&where=count > 3&limit=2")).json()
        assert (was["version"], [row["count"] for row in was["rows"]]) == (1, [5, 4])
        assert was["where"] == '"count" > 3'
        summed = (await client.get(address, params={"as_of": "2", "select": "SELECT sum(count) AS n"})).json()
        assert summed["rows"] == [{"n": 90}]
        newest = (await client.get(f"{address}?as_of=2999-01-01")).json()
        assert newest["version"] == 3
        for wrong, status in (("noon", 400), ("99", 410), ("2001-01-01", 410), ("", 400)):
            assert (await client.get(address, params={"as_of": wrong})).status_code == status, wrong
        assert (await client.get(f"{address}?as_of=1&from=x")).status_code == 400
        stream = f"{url.replace('http', 'ws')}/v1/subscribe?table=top_topics&from="
        whole = (await client.get(f"{address}?as_of=1")).json()
        async with connect(stream + whole["position"]) as tail:
            kinds = [json.loads(await tail.recv()) for _ in range(3)]
        assert [message["type"] for message in kinds] == ["resumed", "change", "change"]
        assert [row["count"] for row in kinds[1]["upserts"]] == [50, 40]


@pytest.mark.parametrize("ident", ["", "a b", "x" * 65, 5])
async def test_a_statements_name_is_a_name(root: Path, ident: Any) -> None:
    top_topics(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        assert (await post(client, "SELECT 1", id=ident)).status_code == 400


async def test_a_statement_that_is_ended_before_it_has_begun_is_counted(tmp_path: Path) -> None:
    workers = Workers(Settings(lake=tmp_path))
    task = workers.start("SELECT 1", OPEN)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (workers.counts["cancelled"], workers.running) == (1, 0)
    await workers.close()
