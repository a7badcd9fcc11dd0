"""What comes after what, when a receiver does not take everything at once, or the server is killed meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from serve.webhooks.store import WebhookStore
from tests.serve.conftest import Spawned
from tests.serve.lakes import Product, city, rsvps_by_city, top_topics, topics, window
from tests.serve.webhooks.receiver import Receiver, receiving
from tests.serve.webhooks.test_webhooks import added, counts, hooked


async def until(condition: Any) -> None:
    """Wait for something that another task does."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def two_parts(root: Path) -> Product:
    """A table whose snapshot has two parts, each larger than 100 kB."""
    product = top_topics(root)
    rows = topics(0, range(4))
    product.overwrite([row | {"item": "x" * 130_000} for row in rows], [window(0)])
    return product


def shape(receiver: Receiver) -> list[tuple[str, list[int]]]:
    return [(message["type"], counts(message)) for message in receiver.taken]


async def test_parts_that_are_too_large_are_dead_letters_and_the_changes_come(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.webhooks.runner.MAX_ATTEMPTS", 2)
    product = two_parts(root)
    async with hooked(root) as (client, receiver):
        receiver.most = 100_000
        made = await added(client, receiver)
        await until(lambda: len(receiver.requests) == 4)
        for count in (7, 8):
            product.overwrite(topics(0, [count]), [window(0)])
            await receiver.wait(count - 6)
        assert shape(receiver) == [("change", [7]), ("change", [8])]
        letters = (await client.get(f"/v1/webhooks/{made['id']}/dead")).json()["deliveries"]
        assert [(counts(each["message"]), each["attempts"], each["status"]) for each in letters] == [
            ([2, 3], 2, 413),
            ([0, 1], 2, 413),
        ]
        assert receiver.taken[0]["after"] == letters[0]["position"], "the gap can be seen"
        assert len(receiver.requests) == 6, "no part came again"


@pytest.mark.parametrize("answers", [[500, 500], [204, 500, 500]], ids=["first", "last"])
async def test_a_part_that_is_taken_is_not_sent_again(root: Path, answers: list[int]) -> None:
    product = two_parts(root)
    async with hooked(root) as (client, receiver):
        receiver.answers = answers
        await added(client, receiver)
        await receiver.wait(2)
        product.overwrite(topics(0, [7]), [window(0)])
        await receiver.wait(3)
        assert shape(receiver) == [("snapshot", [0, 1]), ("snapshot", [2, 3]), ("change", [7])]
        assert len(receiver.requests) == 5


async def test_what_the_ring_has_lost_during_a_snapshot_comes_from_the_log(root: Path) -> None:
    product = two_parts(root)
    async with hooked(root, ring_frames=2) as (client, receiver):
        receiver.answering.clear()
        await added(client, receiver)
        await until(lambda: len(receiver.requests) == 1)
        for count in range(10, 16):
            product.overwrite(topics(0, [count]), [window(0)])
        async with asyncio.timeout(60):
            while (await client.get("/v1/tables")).json()["tables"][0]["version"] != product.version:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        receiver.answering.set()
        await receiver.wait(8)
        assert shape(receiver) == [("snapshot", [0, 1]), ("snapshot", [2, 3])] + [
            ("change", [count]) for count in range(10, 16)
        ]


async def test_after_kill_9_a_message_is_what_it_was(root: Path, spawned: list[Spawned]) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1)])
    changed: dict[str, Any] = {"webhook_private": "true", "webhook_backoff_ms": 10, "poll_ms": 5}
    async with receiving() as receiver:
        spawned.append(Spawned(root, **changed))
        async with httpx.AsyncClient(base_url=spawned[0].url, timeout=60) as client:
            made = await added(client, receiver, table="rsvps_by_city", where="city = 'Bonn'")
            [snapshot] = await receiver.wait(1)
            for _ in range(3):
                product.append([city(0, "Berlin", 1)])  # nothing for it, and its position moves on
            async with asyncio.timeout(60):
                path = f"/v1/webhooks/{made['id']}"
                while (await client.get(path)).json()["position"] == snapshot["position"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        receiver.answering.clear()
        product.append([city(0, "Bonn", 1)])
        await until(lambda: len(receiver.requests) == 2)
        spawned[0].kill()
        receiver.answering.set()
        product.append([city(0, "Berlin", 1)])
        product.append([city(0, "Bonn", 1)])
        spawned.append(Spawned(root, **changed))
        await until(lambda: receiver.taken[-1].get("upserts", [{}])[0].get("yes") == 3)
        told: dict[str, dict[str, Any]] = {}
        for _, headers, content in receiver.requests:
            assert told.setdefault(headers["webhook-id"], content) == content
        assert len(told) == 3 < len(receiver.requests), "the one that was not answered came twice"
        for before, after in itertools.pairwise(told.values()):
            assert after["after"] == before["position"]


async def test_what_fails_on_our_side_is_told_once_and_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serve.webhooks.runner._PAUSE_S", 0.02)
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    async with hooked(root) as (client, receiver):
        made = await added(client, receiver)
        await receiver.wait(1)
        path = f"/v1/webhooks/{made['id']}"
        with sqlite3.connect(Lake(root).state / "webhooks" / "webhooks.db", timeout=60) as db:
            db.execute("ALTER TABLE deliveries RENAME TO away")
        with caplog.at_level(logging.ERROR, "serve.webhooks"):
            product.overwrite(topics(0, [2]), [window(0)])
            await until(lambda: len(receiver.requests) > 5)
            shown = (await client.get(path)).json()
        assert (shown["state"], "no such table" in shown["detail"]) == ("failing", True)
        assert len([record for record in caplog.records if record.name.startswith("serve.webhooks")]) == 1
        with db:
            db.execute("ALTER TABLE away RENAME TO deliveries")
        db.close()
        product.overwrite(topics(0, [3]), [window(0)])
        await until(lambda: counts(receiver.taken[-1]) == [3])
        assert len({headers["webhook-id"] for _, headers, _ in receiver.requests}) == 3
        async with asyncio.timeout(60):
            while (await client.get(path)).json()["state"] != "active":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("large", [True, False], ids=["in a snapshot", "at its end"])
async def test_what_is_tried_again_ends_with_the_key_that_asked_for_it(
    root: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.webhooks.runner.MAX_ATTEMPTS", 100_000)
    if large:
        two_parts(root)
    else:
        top_topics(root).overwrite(topics(0, [1]), [window(0)])
    file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    key = file.new(ReaderKey("0" * 64, "mine"))
    async with hooked(root) as (client, receiver):
        receiver.always = 500
        client.headers["Authorization"] = f"Bearer {key}"
        made = await added(client, receiver)
        await until(lambda: len(receiver.requests) > 2)
        file.revoke(key.split("_")[1])
        store = WebhookStore(Lake(root).state / "webhooks", 10)
        await until(lambda: "key" in store.progress(made["id"]).detail)
        store.close()
