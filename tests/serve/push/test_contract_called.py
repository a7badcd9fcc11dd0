"""The contract over what is no stream of the subscriber's own: webhooks, which are called, and states with ETags."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import serving
from tests.serve.lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window
from tests.serve.push import test_contract as contract
from tests.serve.push.clients import TRANSPORTS, Client, Closed
from tests.serve.webhooks.receiver import receiving

called = partial(serving, webhook_private=True, webhook_backoff_ms=10)


class WebhookClient(Client):
    """Called: a receiver of its own, and a webhook that it adds."""

    async def open(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._http = await self._stack.enter_async_context(httpx.AsyncClient(base_url=self.url, timeout=60))
        self._receiver = await self._stack.enter_async_context(receiving())
        body: dict[str, Any] = self.query | {"url": self._receiver.url}
        body |= {"columns": body["columns"].split(",")} if "columns" in body else {}
        answer = await self._http.post("/v1/webhooks", json=body)
        self._made = answer.json()
        if answer.status_code != 201:
            self.messages.append({"type": "error", "code": self._made["code"]})
            return
        self._receiver.secret = self._made["secret"]
        if "from" in self.query:  # what streams say with ``resumed`` is that it was taken
            self.messages.append({"type": "resumed", "position": self.query["from"]})

    async def shut(self) -> None:
        if "id" in self._made:
            await self._http.delete(f"/v1/webhooks/{self._made['id']}")
        await self._stack.aclose()

    async def fetch(self) -> None:
        if "id" not in self._made:
            raise Closed(self._made["status"], self._made["detail"])
        self.messages.append(await self._receiver.next())


class StateClient(Client):
    """The state as a message, again when it is another one."""

    _tag = ""

    async def fetch(self) -> None:
        query = {name: text for name, text in self.query.items() if name != "table"}
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            path = f"/v1/tables/{self.query['table']}"
            answer = await http.get(path, params=query, headers={"If-None-Match": self._tag})
        if answer.status_code == 304:
            return await asyncio.sleep(0.01)
        content = answer.json()
        if answer.status_code != 200:
            self.messages.append({"type": "error", "code": content.get("code", "")})
            raise Closed(answer.status_code, content["detail"])
        self._tag = answer.headers["etag"]
        self.messages.append({"type": "snapshot"} | content)
        return None


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract's tests find these two as they find the others."""
    monkeypatch.setitem(TRANSPORTS, "webhook", WebhookClient)
    monkeypatch.setitem(TRANSPORTS, "etag", StateClient)
    monkeypatch.setattr(contract, "serving", called)


Test = Callable[[Path, str], Awaitable[None]]


def over(*transports: str) -> Callable[[Test], Test]:
    """A test of the contract, run over others."""

    def made(test: Test) -> Test:
        @pytest.mark.parametrize("transport", transports)
        async def run(root: Path, transport: str) -> None:
            await test(root, transport)

        return run

    return made


test_expired = over("webhook")(contract.test_what_is_gone_from_the_log_expires)
test_rebuilt = over("webhook")(contract.test_a_rebuilt_table_expires_old_positions)
test_filter = over("webhook")(contract.test_a_filter_on_rows_and_columns)
test_aggregate = over("webhook")(contract.test_a_live_aggregate)
test_refused = over("webhook")(contract.test_a_wrong_request_is_told)


async def test_any_position(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await contract.test_any_position_of_the_log_is_resumed_by_a_process_that_never_saw_it(root, monkeypatch, "webhook")


async def test_changes_without_rows_are_left_out_and_the_chain_stays_whole(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    async with called(root) as url, contract.subscriber("webhook", url) as client:
        snapshot = await client.receive("snapshot")
        product.compact()
        product.overwrite(topics(0, [4]), [window(0)])
        change = await client.receive("change")  # its ``after`` is compared on the way
        assert contract.counts(change) == [4]
    async with called(root) as url, contract.subscriber("webhook", url, from_=snapshot["position"]) as client:
        await client.receive("resumed")
        assert await client.receive("change") == change, "what is served again is what it was"


async def test_the_state_is_what_a_snapshot_says_and_any_transport_goes_on_from_it(root: Path) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1), city(0, "Ulm", 2)])
    asked: list[dict[str, str | None]] = [
        {},
        {"where": "yes > 1", "columns": "yes"},
        {"select": "SELECT city, sum(yes) AS yes FROM rsvps_by_city GROUP BY city"},
    ]
    streams = [name for name in TRANSPORTS if name != "etag"]
    async with called(root) as url:
        states = [await _state(url, query) for query in asked]
        for transport, (query, state) in itertools.product(streams, zip(asked, states, strict=True)):
            async with contract.subscriber(transport, url, "rsvps_by_city", **query) as client:
                assert await client.receive("snapshot") == state | {"first": True, "last": True}, transport
        product.append([city(0, "Ulm", 5)])
        for transport, (query, old) in itertools.product(streams, zip(asked, states, strict=True)):
            async with contract.subscriber(transport, url, "rsvps_by_city", **query, from_=old["position"]) as client:
                await client.receive("resumed")
                change = await client.receive("change")
            new = await _state(url, query)
            assert new["position"] == change["position"], transport
            assert [row for row in new["rows"] if row not in old["rows"]] == change["upserts"], transport


async def _state(url: str, query: dict[str, str | None]) -> dict[str, Any]:
    async with contract.subscriber("etag", url, "rsvps_by_city", **query) as client:
        return await client.receive("snapshot")


async def test_the_state_again_only_when_it_is_another_one(root: Path) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with called(root) as url, contract.subscriber("etag", url) as client:
        assert contract.counts(await client.receive("snapshot")) == [1]
        await client.fetch()
        assert not client.messages
        product.overwrite(topics(0, [2]), [window(0)])
        assert contract.counts(await client.receive("snapshot")) == [2]


async def test_the_state_is_refused_as_a_subscription_is(root: Path) -> None:
    top_topics(root)
    Product(root / "gold" / "log_only", TOPICS, {})
    async with called(root) as url:
        for query, code in contract.WRONG:
            if query["table"].isidentifier() and "from" not in query:  # names that a path can have
                async with StateClient(url, dict(query)) as client:
                    assert (await client.receive("error"))["code"] == code
