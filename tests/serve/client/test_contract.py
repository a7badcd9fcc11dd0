"""What a program may rely on, whatever the transport: the client against real servers with real Delta tables."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from jobs.local.stack import free_port
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from serve.client import (
    BadFilter,
    Change,
    ClientError,
    ClientOptions,
    Forbidden,
    MemoryStore,
    Message,
    NoSuchTable,
    Refused,
    SlowNotice,
    Snapshot,
    Subscription,
    SyncSubscription,
    TableQuery,
    TableView,
    Unauthorized,
    subscribe,
)
from serve.client.transports import TRANSPORTS
from tests.serve.conftest import Spawned, serving, wait_until
from tests.serve.lakes import city, rsvps_by_city, top_topics, topics, window

ALL = pytest.mark.parametrize("transport", TRANSPORTS)


def over(transport: str, url: str, table: str = "top_topics", store: Any = None, **given: Any) -> Subscription:
    options = ClientOptions(transport, **given.pop("options", {}))
    return subscribe(url, table, store, options=options, **given)


def counts(message: Message) -> list[int]:
    return [row["count"] for row in (message.rows if isinstance(message, Snapshot) else message.upserts)]


def new_key(root: Path, **rights: Any) -> str:
    return KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, **rights))


@ALL
async def test_filter_columns_and_resume_with_a_key(root: Path, transport: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5, 1, 7]), [window(0)])
    key = new_key(root, rows={"*": "rank <= 2"})
    query = TableQuery("count >= 3", ["count"])
    store = MemoryStore()
    async with serving(root) as url:
        async with over(transport, url, store=store, key=key, query=query) as subscription:
            reader = aiter(subscription)
            snapshot = await anext(reader)
            assert isinstance(snapshot, Snapshot)
            assert snapshot.rows == [{"window_start": "2026-01-01T00:00:00Z", "rank": 1, "count": 5}]
            assert (subscription.transport, subscription.connects) == (transport, 1)
        product.overwrite(topics(0, [5, 4]), [window(0)])
        product.overwrite(topics(0, [1, 4]), [window(0)])
        view = TableView()
        view.apply(snapshot)
        async with over(transport, url, store=store, key=key, query=query) as subscription:
            reader = aiter(subscription)
            for _ in range(2):
                message = await anext(reader)
                assert isinstance(message, Change)
                assert message.key == ("window_start", "rank")
                view.apply(message)
    assert view.rows == {("2026-01-01T00:00:00Z", 2): {"window_start": "2026-01-01T00:00:00Z", "rank": 2, "count": 4}}


@ALL
async def test_a_live_aggregate(root: Path, transport: str) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1), city(0, "Ulm", 2)])
    query = TableQuery(select="SELECT city, sum(yes) AS yes FROM rsvps_by_city GROUP BY city")
    async with serving(root) as url:
        store = MemoryStore()
        async with over(transport, url, "rsvps_by_city", store, query=query) as subscription:
            assert [row["yes"] for row in (await anext(aiter(subscription))).rows] == [1, 2]
        product.append([city(1, "Bonn", 4)])
        async with over(transport, url, "rsvps_by_city", store, query=query) as subscription:
            change = await anext(aiter(subscription))
            assert (change.key, change.upserts) == (("city",), [{"city": "Bonn", "yes": 5}])


@ALL
async def test_a_server_with_keys_is_killed_and_every_change_is_applied_once(
    root: Path, spawned: list[Spawned], transport: str
) -> None:
    product = top_topics(root)
    key = new_key(root)
    port = free_port()
    spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, port=port))
    seen: list[int] = []
    async with over(transport, spawned[0].url, key=key, options={"longest_s": 0.5}) as subscription:
        reader = aiter(subscription)
        assert isinstance(await anext(reader), Snapshot)
        for count in range(1, 13):
            await asyncio.to_thread(product.overwrite, topics(0, [count]), [window(0)])
            if count == 4:
                spawned[-1].kill()
            elif count == 8:
                spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, port=port))
        async with asyncio.timeout(60):
            while len(seen) < 12:
                message = await anext(reader)
                assert isinstance(message, Change)
                seen.extend(counts(message))
        assert seen == list(range(1, 13))
        assert (subscription.connects, subscription.gaps) == (2, 0)


@ALL
async def test_a_program_without_the_key_shows_tickets(root: Path, transport: str) -> None:
    product = top_topics(root)
    key = new_key(root)
    async with serving(root) as url, httpx.AsyncClient(base_url=url, timeout=60) as backend:

        async def ticket() -> str:
            answer = await backend.post("/v1/tickets", headers={"Authorization": f"Bearer {key}"})
            return str(answer.json()["ticket"])

        async with over(transport, url, options={"ticket": ticket}) as subscription:
            reader = aiter(subscription)
            await anext(reader)
            product.overwrite(topics(0, [1]), [window(0)])
            assert counts(await anext(reader)) == [1]


FINAL: list[tuple[dict[str, Any], type[Refused], str]] = [
    ({"table": "nope"}, NoSuchTable, "no_such_table"),
    ({"table": "rsvps_by_city"}, NoSuchTable, "no_such_table"),
    ({"key": ""}, Unauthorized, "unauthorized"),
    ({"key": "mr_x_y"}, Unauthorized, "unauthorized"),
    ({"query": TableQuery("count > ")}, BadFilter, "bad_filter"),
    ({"query": TableQuery(select="SELECT item ORDER BY 1")}, BadFilter, "bad_filter"),
    ({"query": TableQuery(columns=["nothing"])}, BadFilter, "bad_filter"),
    ({"store": MemoryStore("garbage")}, Refused, "bad_position"),
]


@ALL
async def test_final_answers_are_raised_to_every_reader_at_once(root: Path, transport: str) -> None:
    top_topics(root)
    rsvps_by_city(root)
    key = new_key(root, tables=("top_topics",))
    async with serving(root) as url:
        for wrong, kind, code in FINAL:
            async with over(transport, url, **{"key": key, **wrong}) as subscription, asyncio.timeout(30):
                for reader in (subscription.reader(), subscription.reader()):
                    with pytest.raises(Refused) as refused:
                        await anext(reader)
                    assert (type(refused.value), refused.value.code) == (kind, code)


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
async def test_a_name_that_may_point_here_by_foreign_dns_is_forbidden(root: Path, transport: str) -> None:
    top_topics(root)
    async with serving(root) as url, renamed(url) as foreign, over(transport, foreign) as subscription:
        async with asyncio.timeout(30):
            with pytest.raises(Forbidden):
                await anext(aiter(subscription))


@contextlib.asynccontextmanager
async def renamed(url: str) -> AsyncIterator[str]:
    """A proxy that passes requests on as if they had been made to another name."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(host, int(port))
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            back_writer.write(re.sub(rb"(?i)\r\nhost: [^\r]*", b"\r\nHost: evil.example", head))
            while data := await back_reader.read(65_536):
                writer.write(data)
        finally:
            back_writer.close()
            writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@ALL
async def test_a_revoked_key_ends_an_open_subscription(root: Path, transport: str) -> None:
    top_topics(root)
    key = new_key(root)
    new_key(root)
    async with serving(root) as url, over(transport, url, key=key) as subscription:
        reader = aiter(subscription)
        await anext(reader)
        file = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
        file.revoke(key.split("_")[1])
        async with asyncio.timeout(30):
            with pytest.raises(Unauthorized):
                await anext(reader)


@ALL
async def test_a_table_that_is_not_there_yet_is_waited_for_on_request(root: Path, transport: str) -> None:
    options = {"wait_for_table": True, "longest_s": 0.2}
    async with serving(root) as url, over(transport, url, options=options) as subscription:
        first = asyncio.ensure_future(anext(aiter(subscription)))
        await asyncio.sleep(0.5)
        assert not first.done()
        top_topics(root)
        async with asyncio.timeout(60):
            assert isinstance(await first, Snapshot)


@ALL
async def test_texts_of_all_characters_and_large_snapshots(root: Path, transport: str) -> None:
    product = top_topics(root)
    text = "\u2028\u0085\x1c\x0b\r\n äöü" * 1_000
    product.overwrite([row | {"item": text} for row in topics(0, [1] * 200)], [window(0)])
    async with serving(root) as url, over(transport, url) as subscription:
        message = await anext(aiter(subscription))
        assert [row["item"] for row in message.rows] == [text] * 200


@ALL
async def test_the_notice_of_a_slow_reader_is_passed_on(root: Path, transport: str) -> None:
    product = top_topics(root)
    notices: list[SlowNotice] = []
    options = {"queue": 1, "on_slow": notices.append}
    async with (
        serving(root, heartbeat_ms=50, slow_after_ms=2_000, cut_after_ms=600_000) as url,
        over(transport, url, options=options) as subscription,
    ):
        reader = aiter(subscription)
        await anext(reader)
        for number in range(1, 61):
            rows = [row | {"item": f"{number} " + "x" * 2_000} for row in topics(0, [number] * 100)]
            await asyncio.to_thread(product.overwrite, rows, [window(0)])
        await asyncio.sleep(2.5)
        assert not subscription.keeping_up
        numbers = [counts(await anext(reader))[0] for _ in range(60)]
        assert numbers == list(range(1, 61))
        assert len(notices) == 1, "once until it has caught up"
        assert notices[0].behind > 0
        assert notices[0].behind_ms >= 2_000
        waiting = asyncio.ensure_future(anext(reader))
        await wait_until(lambda: subscription.slow is None and subscription.keeping_up)
        await wait_until(lambda: subscription.lag_ms is not None)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_reader_that_keeps_up_is_not_told_that_it_is_slow(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.client.transports._ACK_S", 0.1)
    product = top_topics(root)
    notices: list[SlowNotice] = []
    async with (
        serving(root, heartbeat_ms=1_800, slow_after_ms=1_500) as url,  # heartbeats alone would acknowledge too late
        over("websocket", url, options={"on_slow": notices.append}) as subscription,
    ):
        reader = aiter(subscription)
        await anext(reader)
        number, until = 0, time.monotonic() + 4.5
        while time.monotonic() < until:
            number += 1
            await asyncio.to_thread(product.overwrite, topics(0, [number]), [window(0)])
            assert counts(await anext(reader)) == [number]
            await asyncio.sleep(0.1)
        assert notices == []


@ALL
async def test_without_asyncio(root: Path, transport: str) -> None:
    product = top_topics(root)
    store = MemoryStore()

    def read(url: str) -> list[list[int]]:
        found = []
        with SyncSubscription(over(transport, url, store=store)) as messages:
            for message in messages:
                found.append(counts(message))
                if len(found) == 3:
                    assert messages.state.behind == 1
                    break
                product.overwrite(topics(0, [len(found)]), [window(0)])
        with pytest.raises(NoSuchTable), SyncSubscription(over(transport, url, "nope")) as messages:
            next(iter(messages))
        return found

    async with serving(root) as url:
        assert await asyncio.to_thread(read, url) == [[], [1], [2]]
    assert store.position is not None


# Fall-back


@pytest.mark.parametrize("passed", [("websocket",), ("sse",), ("poll",), ()])
async def test_the_first_transport_that_gets_through_is_taken(root: Path, passed: tuple[str, ...]) -> None:
    product = top_topics(root)
    async with (
        serving(root) as url,
        proxy(url, passed) as front,
        asyncio.timeout(60),
        over("auto", front) as subscription,
    ):
        reader = aiter(subscription)
        if not passed:
            with pytest.raises(Refused) as refused:
                await anext(reader)
            assert refused.value.code == "http_405"
            return
        await anext(reader)
        product.overwrite(topics(0, [1]), [window(0)])
        assert counts(await anext(reader)) == [1]
        assert (subscription.transport, subscription.connects) == (passed[0], 1)


@contextlib.asynccontextmanager
async def proxy(url: str, passed: tuple[str, ...]) -> AsyncIterator[str]:
    """A middle that passes some transports only: it refuses upgrades, and ends streams of events before the first."""
    host, _, port = url.removeprefix("http://").partition(":")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lower = head.lower()
                kind = "websocket" if b"upgrade: websocket" in lower else "sse" if b"event-stream" in lower else "poll"
                if kind not in passed:
                    plain = b"HTTP/1.1 405 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                    empty = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
                    writer.write(empty if kind == "sse" and passed else plain)
                    break
                back_reader, back_writer = await asyncio.open_connection(host, int(port))
                back_writer.write(head)
                await asyncio.gather(pipe(back_reader, writer), pipe(reader, back_writer))
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
    sink.close()


async def test_a_silent_or_faulty_server_is_named(root: Path) -> None:
    async def babble(connection: ServerConnection) -> None:
        await connection.send("[]")

    async with serve(babble, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with over("auto", url) as subscription:
            with pytest.raises(ClientError, match="no JSON object"):
                await anext(aiter(subscription))


def test_an_unknown_transport() -> None:
    with pytest.raises(ClientError, match="no transport"):
        subscribe("http://127.0.0.1", "t", options=ClientOptions("pigeon"))
