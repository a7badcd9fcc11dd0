"""Callbacks over JSON-RPC: what only they have."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.typing import Subprotocol

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from tests.serve.conftest import serving
from tests.serve.lakes import rsvps_by_city, top_topics, topics, window


def calling(url: str, key: str = "") -> connect:
    return connect(
        f"{url.replace('http', 'ws')}/v1/subscribe",
        subprotocols=[Subprotocol("millrace.rpc")],
        compression="deflate",
        additional_headers={"Authorization": f"Bearer {key}"} if key else {},
    )


def text_of(name: str, ident: Any, **params: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": ident, "method": name, "params": params})


async def call(connection: ClientConnection, name: str, ident: Any = 1, **params: Any) -> None:
    await connection.send(text_of(name, ident, **params))


async def heard(connection: ClientConnection, method: str = "") -> dict[str, Any]:
    """The next message that is no heartbeat; a call of a method if one is named."""
    while True:
        message: dict[str, Any] = json.loads(await connection.recv())
        if message.get("method") != "heartbeat":
            assert not method or message.get("method") == method, message
            return message


async def test_several_tables_are_called_back_on_one_connection(root: Path) -> None:
    product, _ = top_topics(root), rsvps_by_city(root)
    async with serving(root) as url, calling(url) as connection:
        await call(connection, "subscribe", "a", table="top_topics", columns=["count"])
        assert await heard(connection) == {"jsonrpc": "2.0", "id": "a", "result": {"table": "top_topics"}}
        await heard(connection, "snapshot")
        await call(connection, "subscribe", "b", table="rsvps_by_city")
        assert (await heard(connection))["id"] == "b"
        assert (await heard(connection, "snapshot"))["params"]["table"] == "rsvps_by_city"
        product.overwrite(topics(0, [3]), [window(0)])
        assert [row["count"] for row in (await heard(connection, "change"))["params"]["upserts"]] == [3]
        await call(connection, "unsubscribe", "d", table="top_topics")
        assert (await heard(connection))["id"] == "d"
        product.overwrite(topics(0, [9]), [window(0)])
        await call(connection, "unsubscribe", "e", table="rsvps_by_city")
        assert (await heard(connection))["id"] == "e", "nothing more is said of a table that was given up"


async def test_a_subscription_that_is_given_up_before_it_is_there_leaves_nothing_behind(root: Path) -> None:
    top_topics(root)
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, connections=1))
    asked = [text_of("subscribe", "s", table="top_topics"), text_of("unsubscribe", "u", table="top_topics")]
    packet = b"".join(Frame(Opcode.TEXT, text.encode()).serialize(mask=True) for text in asked)
    headers = {"Authorization": f"Bearer {key}"}
    async with serving(root) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:

        async def subscribers() -> str:
            lines = (await client.get("/metrics")).text.splitlines()
            return next(line for line in lines if line.startswith("millrace_serve_subscribers")).split()[-1]

        async with calling(url, key) as connection:
            connection.transport.write(packet)
            refused, given_up = await heard(connection), await heard(connection)
            assert (refused["id"], refused["error"]["data"]["code"]) == ("s", "bad_request")
            assert (given_up["id"], given_up["result"]) == ("u", {"table": "top_topics"})
            await call(connection, "subscribe", "again", table="top_topics")
            assert (await heard(connection))["id"] == "again"
            await heard(connection, "snapshot")
            await call(connection, "unsubscribe", "u", table="top_topics")
            assert (await heard(connection))["id"] == "u"
            assert await subscribers() == "0.0"
        async with asyncio.timeout(60):
            while True:  # the key has one connection
                async with calling(url, key) as connection:
                    with contextlib.suppress(ConnectionClosed):
                        await call(connection, "subscribe", "s", table="top_topics")
                        if (await heard(connection)).get("id") == "s":
                            break
        async with asyncio.timeout(60):
            while await subscribers() != "0.0":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_an_alert_calls_when_the_condition_holds_and_waits_for_its_reply(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [9]), [window(0)])
    async with serving(root) as url, calling(url) as connection:
        asked = {"table": "top_topics", "where": "count > 5", "method": "alert", "reply": True, "window": 1}
        await call(connection, "subscribe", **asked)
        assert "result" in await heard(connection)
        for count in (1, 7, 2, 8):
            product.overwrite(topics(0, [count]), [window(0)])
        first = await heard(connection, "alert")
        assert [row["count"] for row in first["params"]["upserts"]] == [7], "no snapshot, no change without rows"
        await call(connection, "nonsense", "fence")
        assert (await heard(connection))["error"]["code"] == -32601, "the second call waits for the reply"
        await connection.send(json.dumps({"jsonrpc": "2.0", "id": first["id"], "result": None}))
        second = await heard(connection, "alert")
        assert [row["count"] for row in second["params"]["upserts"]] == [8]
        failure = {"jsonrpc": "2.0", "id": second["id"], "error": {"code": 1, "message": "the pager is broken"}}
        await connection.send(json.dumps(failure))
        with pytest.raises(ConnectionClosed) as closed:
            await heard(connection)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, "resume" in closed.value.rcvd.reason) == (4400, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", -32700),
        ("[]", -32600),
        ("[1]", -32600),
        ('{"id": 1, "method": "subscribe"}', -32600),
        ('{"jsonrpc": "2.0", "id": 1, "method": "drop"}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": {}}', -32601),
        ('{"jsonrpc": "2.0", "id": 1, "method": "subscribe", "params": [1]}', -32000),
        ('{"jsonrpc": "2.0", "id": 1, "method": "subscribe", "params": {"table": "nope"}}', -32000),
        (
            '{"jsonrpc": "2.0", "id": 1, "method": "subscribe", "params": {"table": "top_topics", "method": "x"}}',
            -32000,
        ),
        ('{"jsonrpc": "2.0", "id": 1, "method": "subscribe", "params": {"table": "top_topics", "window": 1}}', -32000),
        ('{"jsonrpc": "2.0", "id": "?", "result": null}', -32000),
        ('{"jsonrpc": "2.0", "id": 1, "method": "unsubscribe", "params": {"table": "top_topics"}}', -32000),
    ],
)
async def test_a_wrong_call_is_answered_and_the_connection_stays(root: Path, text: str, code: int) -> None:
    top_topics(root)
    async with serving(root) as url, calling(url) as connection:
        await connection.send(text)
        assert (await heard(connection))["error"]["code"] == code
        await call(connection, "subscribe", table="top_topics")
        assert (await heard(connection))["result"] == {"table": "top_topics"}
