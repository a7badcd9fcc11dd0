"""Whatever is sent, over whichever transport, is as the AsyncAPI document describes it: no field more, none less."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator, ValidationError  # type: ignore[import-untyped]
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from serve.core import messages
from serve.http.schema import asyncapi
from tests.serve.conftest import address, serving
from tests.serve.lakes import Product, top_topics, topics, window
from tests.serve.push.clients import POLLS, TRANSPORTS, Client, Closed
from tests.serve.webhooks.receiver import receiving

DOCUMENT = asyncapi()


def check(content: Any, channel: str, name: str, part: str = "payload") -> None:
    """Hold it against a channel's message."""
    place = f"#/channels/{channel}/messages/{name}"
    shared = DOCUMENT["channels"][channel]["messages"][name].get("$ref", place)
    Draft202012Validator(DOCUMENT | {"$ref": f"{shared}/{part}"}).validate(content)


def filled(root: Path) -> Product:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    return product


async def test_what_each_transport_receives(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    seen: dict[str, set[str]] = defaultdict(set)
    heard = Client._check

    def listening(self: Client, message: dict[str, Any]) -> None:
        told.append(copy.deepcopy(message))
        heard(self, message)

    monkeypatch.setattr(Client, "_check", listening)
    product = filled(root)
    async with serving(root, heartbeat_ms=50) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for transport, kind in TRANSPORTS.items():
            while (await http.get("/v1/tables")).json()["tables"][0].get("version") != product.version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            asked = {"table": "top_topics", "where": "count >= 2", "conflate": "1"}
            async with kind(url, dict(asked)) as client:
                client.query["wait"] = "0"
                if transport not in POLLS:
                    await client.receive("snapshot")
                    await client.receive("heartbeat")
                snapshot = await client.receive("snapshot") if transport in POLLS else told[0]
                product.overwrite(topics(0, [5, 1]), [window(0)])
                await client.receive("change")
                if transport in POLLS:
                    await client.receive("heartbeat")
            async with kind(url, asked | {"from": snapshot["position"]}) as client:
                await client.receive("resumed")
                await client.receive("change")
            async with kind(url, {"table": "top_topics", "from": snapshot["position"]}) as client:
                assert (await client.expiry())["reason"] == "filter"
                await client.receive("snapshot")
            async with kind(url, {"table": "nope"}) as client:
                with pytest.raises(Closed):
                    await client.receive("error")
                    await client.receive()
            for message in told:
                faked = message["type"] == "resumed" and transport in POLLS
                faked = faked or (message["type"] == "error" and "detail" not in message)  # an HTTP problem, a failure
                if not faked:
                    check(message, "events" if transport == "sse" else "table", message["type"])
                    seen[message["type"]].add(transport)
            told.clear()
            product.overwrite(topics(0, [3, 2]), [window(0)])
    for name in ("snapshot", "change", "heartbeat", "expired"):
        assert seen[name] == set(TRANSPORTS), name
    assert seen["resumed"] == set(TRANSPORTS) - set(POLLS)
    assert "websocket" in seen["error"]


async def test_what_is_said_on_a_websocket(root: Path) -> None:
    product = filled(root)
    async with serving(root) as url, connect(address(url, "top_topics")) as socket:
        first = json.loads(await socket.recv())
        wanted: list[dict[str, Any]] = [
            {"type": "ack", "position": first["position"]},
            {"type": "filter", "where": "count > 2", "columns": ["count"]},
            {"type": "filter", "where": "nothere = 1"},
        ]
        for said in wanted:
            check(said, "table", said["type"])
            await socket.send(json.dumps(said))
        product.overwrite(topics(0, [9]), [window(0)])
        kinds: set[str] = set()
        while not {"expired", "snapshot", "error", "change"} <= kinds:
            message = json.loads(await socket.recv())
            check(message, "table", message["type"])
            kinds.add(message["type"])


def test_what_one_who_lags_is_told() -> None:
    check(json.loads(messages.slow("top_topics", 7, 5_000, 15_000).body), "table", "slow")
    with pytest.raises(ValidationError):
        check({"type": "slow", "table": "top_topics"}, "table", "slow")
    with pytest.raises(ValidationError):
        check(json.loads(messages.error("full", "x").body) | {"more": 1}, "table", "error")


async def test_the_end_of_events(root: Path) -> None:
    filled(root)
    events = {"Accept": "text/event-stream"}
    async with httpx.AsyncClient(timeout=60) as http:
        async with serving(root) as url:
            request = http.build_request("GET", f"{url}/v1/subscribe?table=top_topics", headers=events)
            stream = await http.send(request, stream=True)
            lines = stream.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
        said = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
        await stream.aclose()
    check(said[-1], "events", "close")


async def test_calls_and_their_answers(root: Path) -> None:
    product = filled(root)

    async def say(socket: ClientConnection, called: str, /, **params: Any) -> None:
        content = {"jsonrpc": "2.0", "id": 1, "method": called, "params": params}
        check(content, "rpc", f"call_{called}")
        await socket.send(json.dumps(content))

    heard: set[str] = set()

    async def until(socket: ClientConnection, *names: str) -> dict[str, Any]:
        while not heard >= set(names):
            content: dict[str, Any] = json.loads(await socket.recv())
            name = content.get("method") or ("failure" if "error" in content else "result")
            check(content, "rpc", name)
            heard.add(name)
        return content

    async with serving(root, heartbeat_ms=50) as url:
        address = f"{url.replace('http', 'ws')}/v1/subscribe"
        async with connect(address, subprotocols=[Subprotocol("millrace.rpc")]) as socket:
            await say(socket, "subscribe", table="top_topics", reply=True, window=2, conflate=True)
            snapshot = (await until(socket, "result", "snapshot"))["params"]
            product.overwrite(topics(0, [4]), [window(0)])
            change = await until(socket, "change")
            reply = {"jsonrpc": "2.0", "id": change["id"], "result": None}
            check(reply, "rpc", "reply")
            await socket.send(json.dumps(reply))
            await say(socket, "subscribe", table="nope")
            await until(socket, "failure", "heartbeat")
            await say(socket, "unsubscribe", table="top_topics")
            await say(socket, "subscribe", table="top_topics", method="alert", **{"from": snapshot["position"]})
            await until(socket, "resumed", "alert")


async def test_what_a_webhook_is_called_with(root: Path) -> None:
    product = filled(root)
    async with (
        serving(root, webhook_private=True) as url,
        receiving() as receiver,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        asked = {"table": "top_topics", "url": receiver.url, "where": "count >= 2"}
        assert (await client.post("/v1/webhooks", json=asked)).status_code == 201
        [snapshot] = await receiver.wait(1)
        product.overwrite(topics(0, [5, 1]), [window(0)])
        await receiver.wait(2)
        other = asked | {"where": "", "from": snapshot["position"]}
        assert (await client.post("/v1/webhooks", json=other)).status_code == 201
        await receiver.wait(4)
        for _, headers, content in receiver.requests:
            check(content, "webhook", content["type"])
            check(headers, "webhook", content["type"], "headers")
        assert {content["type"] for _, _, content in receiver.requests} == {"snapshot", "change", "expired"}
