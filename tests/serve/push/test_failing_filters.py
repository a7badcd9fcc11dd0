"""A filter's own faults are nobody else's, on real sockets."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from lakehouse.contract.lake import PROPERTY_KEY
from tests.serve.conftest import serving
from tests.serve.lakes import Product
from tests.serve.push.clients import POLLS, STREAMS, TRANSPORTS, Client, WebSocketClient

NUMBERS = pa.schema([("k", pa.int64()), ("n", pa.int64())])
LARGE = 9_000_000_000_000_000_000


# Of a large n it has more than the 4,300 digits that Python writes.
FAILS = f"SELECT sum({'n*' * 28}{'9' * 1_890}*{'9' * 1_890}) AS a"

# By the number of rows: a table of 3 is looked at at once, one of 3,000 in slices.
ASKING: dict[int, tuple[str, ...]] = {3: tuple(TRANSPORTS), 3_000: ("websocket", "sse", "poll")}


def numbers(root: Path, rows: int, n: int) -> Product:
    table = Product(root / "gold" / "numbers", NUMBERS, {PROPERTY_KEY: "k"})
    table.append([{"k": k, "n": n} for k in range(rows)])
    return table


def asking(transport: str, url: str, **query: str) -> Client:
    return TRANSPORTS[transport](url, {"table": "numbers"} | query)


async def refused(client: Client) -> str:
    """The code of the error that comes next, or after the snapshot."""
    message: dict[str, Any] = await client.receive()
    while message["type"] == "snapshot":
        message = await client.receive()
    assert message["type"] == "error", message
    await client.closed()
    return str(message["code"])


@pytest.mark.parametrize("rows", ASKING)
async def test_a_filter_that_fails_on_a_row_ends_for_its_own_subscribers_only(root: Path, rows: int) -> None:
    table = numbers(root, rows, LARGE)
    async with serving(root) as url, WebSocketClient(url, {"table": "numbers"}) as plain:
        await plain.receive("snapshot")
        for transport in ASKING[rows]:
            async with asking(transport, url, select=FAILS) as wrong:
                assert await refused(wrong) == "bad_filter"
        wanted = {"table": "numbers", "where": "k >= 1", "select": "SELECT count(*) AS n, max(k) AS k"}
        async with WebSocketClient(url, wanted) as other:
            assert (await other.receive("snapshot"))["rows"] == [{"n": rows - 1, "k": rows - 1}]
            for k in (rows, rows + 1):
                table.append([{"k": k, "n": 1}])
                assert (await plain.receive("change"))["upserts"] == [{"k": k, "n": 1}]
                assert (await other.receive("change"))["upserts"] == [{"n": k, "k": k}]


@pytest.mark.parametrize("rows", ASKING)
async def test_one_that_fails_on_a_row_that_comes_later_ends_then(root: Path, rows: int) -> None:
    table = numbers(root, rows, 1)
    async with serving(root) as url, AsyncExitStack() as stack:
        plain = await stack.enter_async_context(WebSocketClient(url, {"table": "numbers"}))
        wrong = [await stack.enter_async_context(asking(transport, url, select=FAILS)) for transport in STREAMS]
        await plain.receive("snapshot")
        for client in wrong:
            assert len((await client.receive("snapshot"))["rows"]) == 1
        for k in (rows, rows + 1):
            table.append([{"k": k, "n": LARGE}])
            assert (await plain.receive("change"))["upserts"] == [{"k": k, "n": LARGE}]
        assert [await refused(client) for client in wrong] == ["bad_filter"] * len(wrong)


@pytest.mark.parametrize("rows", ASKING)
async def test_a_filter_that_fails_is_refused_however_it_is_asked(root: Path, rows: int) -> None:
    table = numbers(root, rows, 1)
    async with serving(root) as url, asking("websocket", url, select=FAILS) as first:
        position = (await first.receive("snapshot"))["position"]
    table.append([{"k": rows, "n": LARGE}])
    async with serving(root, ring_frames=1) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for query in ({"select": FAILS}, {"select": FAILS, "as_of": str(table.version)}):
            answer = await http.get("/v1/tables/numbers", params=query)
            assert (answer.status_code, answer.json().get("code")) == (400, "bad_filter"), answer.text
        for transport in ASKING[rows]:
            async with asking(transport, url, select=FAILS, **{"from": position}) as client:
                while (message := await client.receive())["type"] in ("resumed", "expired"):
                    pass
                assert (message["type"], message["code"]) == ("error", "bad_filter")


async def test_what_is_no_number_is_null(root: Path) -> None:
    numbers(root, 3, 2)
    huge = "1" + "0" * 400
    async with serving(root) as url:
        for query, found in (
            ({"where": "floor(1e308 * 10 * n) > k"}, []),
            ({"select": f"SELECT avg(n * {huge}) AS a, sum(n) AS n"}, [{"a": None, "n": 6}]),
            ({"select": f"SELECT sum(coalesce(n * 1e0, {huge}) + {huge}) AS a"}, [{"a": None}]),
        ):
            for transport in ("websocket", *POLLS):
                async with asking(transport, url, **query) as client:
                    assert (await client.receive("snapshot"))["rows"] == found, query
        for wrong in ("floor(1e999) > k", f"n * 1e0 > {huge}.0", "n < -1e999"):
            async with asking("websocket", url, where=wrong) as client:
                assert await refused(client) == "bad_filter"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_integers_of_any_size_are_told(root: Path, transport: str) -> None:
    numbers(root, 3, 2)
    async with (
        serving(root) as url,
        asking(transport, url, select="SELECT sum(n * 1000000000000000000000) AS a") as client,
    ):
        [row] = (await client.receive("snapshot"))["rows"]
        assert str(row["a"]) == "6" + "0" * 21, "JSON has integers of any size"
