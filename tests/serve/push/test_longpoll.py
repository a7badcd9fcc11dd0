"""Long polling: what only it has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import serving
from tests.serve.lakes import top_topics, topics, window


async def ask(http: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    answer = await http.get("/v1/poll", params={"table": "top_topics", **query}, timeout=60)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def test_a_poll_waits_and_nothing_is_lost_between_two(root: Path) -> None:
    product = top_topics(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        first = await ask(http)
        waiting = asyncio.ensure_future(ask(http, **{"from": first["position"]}, wait=60))
        product.overwrite(topics(0, [1]), [window(0)])
        second = await waiting
        assert [message["type"] for message in second["messages"]] == ["change"]
        for count in (2, 3, 4):  # while nobody asks
            product.overwrite(topics(0, [count]), [window(0)])
        found, position = [], second["position"]
        while len(found) < 3:
            answer = await ask(http, **{"from": position})
            found += [row["count"] for message in answer["messages"] for row in message["upserts"]]
            position = answer["position"]
        assert found == [2, 3, 4]
        empty = await ask(http, **{"from": position}, wait=0)
        assert [message["type"] for message in empty["messages"]] == ["heartbeat"]
        assert (empty["position"], empty["behind"]) == (position, 0)


async def test_an_answer_is_bounded_and_says_how_much_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.push.longpoll.MAX_BYTES", 1_000)
    monkeypatch.setattr("serve.core.hub.SLICE_BYTES", 1_000)
    product = top_topics(root)
    async with serving(root, slow_after_ms=1) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        position = (await ask(http))["position"]
        for count in range(12):
            product.overwrite(topics(0, [count]), [window(0)])
        await table_has(http, "version", 12)
        answer = await ask(http, **{"from": position})
        kinds = [message["type"] for message in answer["messages"]]
        assert kinds.count("slow") == 1, "it comes too seldom for what there is"
        assert 0 < kinds.count("change") < 12
        assert kinds.count("change") + answer["behind"] == 12
        merged = await ask(http, **{"from": position}, conflate=1)
        assert [message.get("merged") for message in merged["messages"] if message["type"] == "change"] == [12]
        assert merged["behind"] == 0


async def test_one_that_goes_away_leaves_nothing_behind(root: Path) -> None:
    top_topics(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        position = (await ask(http))["position"]
        leaving = asyncio.ensure_future(ask(http, **{"from": position}, wait=60))
        await table_has(http, "subscribers", 1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await table_has(http, "subscribers", 0)


async def table_has(http: httpx.AsyncClient, name: str, number: int) -> None:
    """Wait until the server says so of its table."""
    async with asyncio.timeout(60):
        while (await http.get("/v1/tables")).json()["tables"][0][name] != number:  # noqa: ASYNC110 - asked by HTTP
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("query", ["wait=61", "wait=x", "codec=json", "window=1", "from="])
async def test_what_is_refused(root: Path, query: str) -> None:
    top_topics(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.get(f"/v1/poll?table=top_topics&{query}")
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
        assert answer.json()["code"] in ("bad_request", "bad_position")
