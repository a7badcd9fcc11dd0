"""Webhooks from end to end: a real server, a real receiver, real tables."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http_event

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from tests.serve.conftest import Spawned, serving
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window
from tests.serve.webhooks.receiver import Receiver, receiving

FAST: dict[str, Any] = {"webhook_private": True, "webhook_backoff_ms": 10, "heartbeat_ms": 200}


@contextlib.asynccontextmanager
async def hooked(root: Path, **changed: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Receiver]]:
    async with receiving() as receiver, serving(root, **FAST | changed) as url, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        yield client, receiver


async def added(client: httpx.AsyncClient, receiver: Receiver, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/webhooks", json={"table": "top_topics", "url": receiver.url} | body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    receiver.secret = made["secret"]
    return made


def counts(message: dict[str, Any]) -> list[int]:
    return [row["count"] for row in message.get("rows", message.get("upserts", []))]


async def test_a_snapshot_and_then_every_change_signed_and_in_order(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5, 4]), [window(0)])
    async with hooked(root) as (client, receiver):
        made = await added(client, receiver, columns=["count"])
        assert made["secret"].startswith("whsec_")
        await receiver.wait(1)
        for number in range(5):
            product.overwrite(topics(0, [10 + number]), [window(0)])
        messages = await receiver.wait(6)
        assert [message["type"] for message in messages] == ["snapshot"] + ["change"] * 5
        assert [counts(message) for message in messages] == [[5, 4], [10], [11], [12], [13], [14]]
        for before, after in itertools.pairwise(messages):
            assert after["after"] == before["position"]
        line, headers, _ = receiver.requests[1]
        assert line == "POST /hook?x=1 HTTP/1.1"
        assert headers["host"] == receiver.url.split("/")[2]
        assert (headers["millrace-event"], headers["content-type"]) == ("change", "application/json")
        assert len({headers["webhook-id"] for _, headers, _ in receiver.requests}) == 6
        shown = (await client.get(f"/v1/webhooks/{made['id']}")).json()
        assert "secret" not in shown and shown["state"] == "active"
        log = (await client.get(f"/v1/webhooks/{made['id']}/deliveries?limit=3")).json()
        assert [(each["state"], each["status"], each["attempts"]) for each in log["deliveries"]] == [
            ("delivered", 204, 1)
        ] * 3
        older = (await client.get(f"/v1/webhooks/{made['id']}/deliveries?before={log['before']}")).json()
        assert len(older["deliveries"]) == 3
        assert (await client.delete(f"/v1/webhooks/{made['id']}")).status_code == 204
        assert (await client.get("/v1/webhooks")).json() == {"webhooks": []}
        metrics = (await client.get("/metrics")).text
        assert 'millrace_serve_webhook_deliveries_total{outcome="delivered"} 6.0' in metrics


async def test_messages_as_cloud_events(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5]), [window(0)])
    async with hooked(root) as (client, receiver):
        made = await added(client, receiver, cloudevents=True)
        await receiver.wait(1)
        product.overwrite(topics(0, [6]), [window(0)])
        for message in await receiver.wait(2):
            _, headers, _ = receiver.requests[receiver.taken.index(message)]
            event = from_http_event(HTTPMessage(headers, orjson.dumps(message)))
            assert (event.get_type(), event.get_data()) == (f"millrace.{message['type']}", message)
            assert (event.get_id(), event.get_source()) == (headers["webhook-id"], "/v1/tables/top_topics")
            assert event.get_time() == datetime.fromtimestamp(message["committed_at"] / 1000, UTC)
        assert (await client.get(f"/v1/webhooks/{made['id']}")).json()["cloudevents"] is True


async def test_what_is_not_taken_is_tried_again_and_then_a_dead_letter(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.webhooks.runner.MAX_ATTEMPTS", 3)
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with hooked(root) as (client, receiver):
        made = await added(client, receiver, **{"from": "now"})
        receiver.answers = [500, 302]  # a redirect is not followed
        product.overwrite(topics(0, [2]), [window(0)])
        product.overwrite(topics(0, [3]), [window(0)])
        assert [counts(message) for message in await receiver.wait(2)] == [[2], [3]]
        first = [headers["webhook-id"] for _, headers, _ in receiver.requests[:3]]
        assert len(set(first)) == 1, "the same on every attempt"
        receiver.answers = [500] * 3
        product.overwrite(topics(0, [4]), [window(0)])
        product.overwrite(topics(0, [5]), [window(0)])
        assert counts((await receiver.wait(3))[-1]) == [5], "it goes on behind the dead one"
        [letter] = (await client.get(f"/v1/webhooks/{made['id']}/dead")).json()["deliveries"]
        assert (letter["attempts"], letter["status"], counts(letter["message"])) == (3, 500, [4])
        receiver.answers = [410]
        product.overwrite(topics(0, [6]), [window(0)])
        async with asyncio.timeout(60):
            while (shown := (await client.get(f"/v1/webhooks/{made['id']}")).json())["state"] != "stopped":  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert shown["detail"] == "the receiver answered 410 Gone"


async def test_a_filter_leaves_changes_out_and_the_chain_stays_whole(root: Path) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1)])
    async with hooked(root) as (client, receiver):
        await added(client, receiver, table="rsvps_by_city", where="city = 'Bonn'")
        await receiver.wait(1)
        for name in ("Berlin", "Berlin", "Bonn", "Berlin", "Bonn"):
            product.append([city(0, name, 1)])
        messages = await receiver.wait(3)
        assert [row["yes"] for message in messages[1:] for row in message["upserts"]] == [2, 3]
        for before, after in itertools.pairwise(messages):
            assert after["after"] == before["position"]


async def test_it_goes_on_where_it_was_after_kill_9_and_only_one_process_calls(
    root: Path, spawned: list[Spawned]
) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    changed: dict[str, Any] = {"webhook_private": "true", "webhook_backoff_ms": 10, "poll_ms": 5}
    async with receiving() as receiver:
        spawned.append(Spawned(root, **changed))
        async with httpx.AsyncClient(base_url=spawned[0].url, timeout=60) as client:
            await added(client, receiver)
            await receiver.wait(1)
        spawned.append(Spawned(root, **changed))  # it waits for the lock
        product.overwrite(topics(0, [2]), [window(0)])
        await receiver.wait(2)
        spawned[0].kill()
        for count in (3, 4, 5):
            product.overwrite(topics(0, [count]), [window(0)])
        async with asyncio.timeout(60):
            while counts(receiver.taken[-1]) != [5]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        seen: dict[str, list[int]] = {}
        for _, headers, content in receiver.requests:  # a message may come again after a crash, as the same one
            seen.setdefault(headers["webhook-id"], counts(content))
        assert list(seen.values()) == [[1], [2], [3], [4], [5]]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"url": "http://127.0.0.1:1/"}, "bad_webhook"),
        ({"url": "http://localhost/"}, "bad_webhook"),
        ({"url": "http://[::1]/"}, "bad_webhook"),
        ({"url": "http://2130706433/"}, "bad_webhook"),
        ({"url": "ftp://example.com/"}, "bad_webhook"),
        ({"url": "https://user:pass@example.com/"}, "bad_webhook"),
        ({"url": ""}, "bad_webhook"),
        ({"url": 5}, "bad_request"),
        ({"secret": "short"}, "bad_request"),
        ({"where": "nothere = 1"}, "bad_filter"),
        ({"from": "x"}, "bad_position"),
        ({"table": "nope"}, "no_such_table"),
        ({"more": 1}, "bad_request"),
    ],
)
async def test_what_is_refused(root: Path, body: dict[str, Any], code: str) -> None:
    top_topics(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        sent = {"table": "top_topics", "url": "http://127.0.0.1:1/"} | body
        answer = await client.post("/v1/webhooks", json=sent, timeout=60)
        assert answer.json()["code"] == code, answer.text


async def test_a_key_sees_its_own_webhooks_and_its_rows_and_ends_with_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.webhooks.routes.MAX_WEBHOOKS", 1)
    product = rsvps_by_city(root)
    product.append([city(0, "Berlin", 1), city(0, "Bonn", 2)])
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    mine = file.new(ReaderKey("0" * 64, "mine", rows={"*": "city = 'Bonn'"}))
    other = {"Authorization": "Bearer " + file.new(ReaderKey("0" * 64, "other"))}
    async with hooked(root) as (client, receiver):
        client.headers["Authorization"] = f"Bearer {mine}"
        made = await added(client, receiver, table="rsvps_by_city")
        [snapshot] = await receiver.wait(1)
        assert [row["city"] for row in snapshot["rows"]] == ["Bonn"]
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/dead"), ("GET", "/deliveries")):
            found = await client.request(method, f"/v1/webhooks/{made['id']}{path}", headers=other)
            assert found.status_code == 404, path
        again = await client.post("/v1/webhooks", json={"table": "rsvps_by_city", "url": receiver.url})
        assert (again.status_code, again.json()["code"]) == (409, "full")
        assert (root / "_millrace" / "webhooks" / "webhooks.db").stat().st_mode & 0o077 == 0
        file.revoke(mine.split("_")[1])
        client.headers.update(other)
        async with asyncio.timeout(60):
            while (await client.get("/v1/tables", headers={"Authorization": f"Bearer {mine}"})).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while "millrace_serve_subscribers 0.0" not in (await client.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        product.append([city(0, "Bonn", 2)])
        await asyncio.sleep(0.3)
        assert len(receiver.taken) == 1
