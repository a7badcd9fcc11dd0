"""What a subscriber may rely on, whatever the transport: on real sockets, with real Delta tables.

One suite, run against each transport; what only one of them has is in the test of that one.
"""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from serve.core.position import Position, lake_seal
from tests.serve.conftest import serving
from tests.serve.lakes import TOPICS, Product, city, rsvps_by_city, top_topics, topics, window
from tests.serve.push.clients import STREAMS, TRANSPORTS, Client, Closed
from tests.serve.push.test_websocket import metric

ALL = pytest.mark.parametrize("transport", TRANSPORTS)
ALL_STREAMS = pytest.mark.parametrize("transport", STREAMS)
FIRST = {"window_start": "2026-01-01T00:00:00Z", "rank": 1}
SECOND = {"window_start": "2026-01-01T00:00:00Z", "rank": 2}


def subscriber(transport: str, url: str, table: str = "top_topics", **query: str | None) -> Client:
    given = {name.rstrip("_"): text for name, text in query.items() if text is not None}
    return TRANSPORTS[transport](url, {"table": table} | given)


def counts(message: dict[str, Any]) -> list[int]:
    return [row["count"] for row in message.get("upserts", message.get("rows", []))]


def token(root: Path, product: Product, version: int) -> str:
    """A position as a server of this lake writes it."""
    return lake_seal(Lake(root).state).token(Position(str(product.table.metadata().id), version))


@ALL
async def test_snapshot_changes_and_another_server_goes_on(root: Path, transport: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    async with serving(root) as url, subscriber(transport, url) as client:
        snapshot = await client.receive("snapshot")
        assert snapshot["rows"][0] == FIRST | {
            "window_end": "2026-01-01T00:01:00Z",
            "item": "topic 1",
            "count": 3,
            "error": 0,
        }
        assert (snapshot["key"], snapshot["through"]) == (["window_start", "rank"], {"rsvps/0": 10})
        assert snapshot["position_lives_ms"] == 7 * 86_400_000
        product.overwrite(topics(0, [4]), [window(0)])
        change = await client.receive("change")
        assert (counts(change), change["deletes"]) == ([4], [SECOND])
        assert (change["events"], change["through"], change["last"]) == (10, {"rsvps/0": 20}, True)
        product.compact()
        product.overwrite(topics(0, [5]), [window(0)])
        missed = await client.changes(product.version - 2)
    async with serving(root) as url, subscriber(transport, url, from_=change["position"]) as client:
        assert (await client.receive("resumed"))["position"] == change["position"]
        assert await client.changes(len(missed)) == missed
        product.overwrite(topics(0, [6]), [window(0)])
        assert counts(await client.receive("change")) == [6]


@ALL
async def test_any_position_of_the_log_is_resumed_by_a_process_that_never_saw_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setattr("serve.tables.tables.CHUNK_BYTES", 1)  # a chunk a commit: the longest way to the ring
    monkeypatch.setattr("serve.core.channel._HISTORY", 2)
    product = top_topics(root)
    for count in range(7):
        product.overwrite(topics(0, [count]), [window(0)])
    async with serving(root, ring_frames=2) as url:
        for version in (0, 3, 5, 7):
            async with subscriber(transport, url, from_=token(root, product, version)) as client:
                await client.receive("resumed")
                changes = await client.changes(7 - version)
                assert [counts(change) for change in changes] == [[count] for count in range(version, 7)]


@ALL
async def test_what_is_gone_from_the_log_expires(root: Path, transport: str) -> None:
    product = top_topics(root)
    for count in range(4):
        product.overwrite(topics(0, [count]), [window(0)])
    old = token(root, product, 1)
    product.table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    async with serving(root) as url, subscriber(transport, url, from_=old) as client:
        assert (await client.receive("resumed"))["position"] == old
        assert (await client.expiry())["reason"] == "log"
        assert counts(await client.receive("snapshot")) == [3]
        product.overwrite(topics(0, [9]), [window(0)])
        assert counts(await client.receive("change")) == [9]


@ALL
async def test_a_rebuilt_table_expires_old_positions(root: Path, transport: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [1]), [window(0)])
    old = token(root, product, 1)
    shutil.rmtree(product.folder)
    top_topics(root).overwrite(topics(0, [2]), [window(0)])
    async with serving(root) as url, subscriber(transport, url, from_=old) as client:
        assert (await client.expiry())["reason"] == "log"
        assert counts(await client.receive("snapshot")) == [2]


@ALL
async def test_a_filter_on_rows_and_columns(root: Path, transport: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [5, 1, 7]), [window(0)])
    asked = {"where": "count >= 3 -- and so on", "columns": "count"}
    async with serving(root) as url, subscriber(transport, url, **asked) as client:
        snapshot = await client.receive("snapshot")
        assert snapshot["columns"] == ["window_start", "rank", "count"], "the key is always there"
        assert snapshot["rows"] == [FIRST | {"count": 5}, FIRST | {"rank": 3, "count": 7}]
        product.overwrite(topics(0, [5, 4, 1]), [window(0)])  # the second comes in, the third leaves
        change = await client.receive("change")
        assert change["upserts"] == [SECOND | {"count": 4}]
        assert change["deletes"] == change["leaves"] == [FIRST | {"rank": 3}]
        product.overwrite(topics(0, [5]), [window(0)])
        gone = await client.receive("change")
        assert (gone["deletes"], "leaves" in gone) == ([SECOND], False), "the third had left before"
        product.overwrite(topics(0, [1]), [window(0)])
        last = await client.receive("change")
        assert last["leaves"] == [FIRST]
    async with serving(root) as url:
        async with subscriber(transport, url, from_=change["position"], **asked) as client:
            await client.receive("resumed")
            assert await client.changes(2) == [gone, last], "resumed from the log, it is what it was"
        async with subscriber(transport, url, from_=change["position"], where="count >= 2") as client:
            assert (await client.expiry())["reason"] == "filter"
            assert (await client.receive("snapshot"))["rows"] == []


@ALL
async def test_a_live_aggregate(root: Path, transport: str) -> None:
    product = rsvps_by_city(root)
    product.append([city(0, "Bonn", 1), city(0, "Ulm", 2)])
    select = "SELECT city, sum(yes) AS yes, count(*) AS n FROM rsvps_by_city WHERE yes < 100 GROUP BY city"
    async with serving(root) as url:
        async with subscriber(transport, url, "rsvps_by_city", select=select) as client:
            snapshot = await client.receive("snapshot")
            assert (snapshot["key"], snapshot["rows"]) == (
                ["city"],
                [{"city": "Bonn", "yes": 1, "n": 1}, {"city": "Ulm", "yes": 2, "n": 1}],
            )
            product.append([city(1, "Bonn", 4), city(0, "Ulm", 98)])
            change = await client.receive("change")
            assert (change["upserts"], change["deletes"]) == ([{"city": "Bonn", "yes": 5, "n": 2}], [{"city": "Ulm"}])
        async with subscriber(transport, url, "rsvps_by_city", select=select, from_=snapshot["position"]) as again:
            await again.receive("resumed")
            assert await again.receive("change") == change


WRONG: list[tuple[dict[str, str], str]] = [
    ({"table": "nope"}, "no_such_table"),
    ({"table": "../../etc"}, "no_such_table"),
    ({"table": ""}, "bad_request"),
    ({"table": "top_topics", "since": "1"}, "bad_request"),
    ({"table": "top_topics", "from": "garbage"}, "bad_position"),
    ({"table": "top_topics", "where": "count > "}, "bad_filter"),
    ({"table": "top_topics", "select": "SELECT item ORDER BY 1"}, "bad_filter"),
    ({"table": "log_only"}, "not_served"),
]


@ALL
async def test_a_wrong_request_is_told(root: Path, transport: str) -> None:
    top_topics(root)
    Product(root / "gold" / "log_only", TOPICS, {})
    async with serving(root) as url:
        for query, code in WRONG:
            async with TRANSPORTS[transport](url, dict(query)) as client:
                assert (await client.receive("error"))["code"] == code
                with pytest.raises(Closed):
                    await client.receive()


@ALL
async def test_heartbeats(root: Path, transport: str) -> None:
    top_topics(root).overwrite(topics(0, [1]), [window(0)])
    async with serving(root, heartbeat_ms=50) as url, subscriber(transport, url) as client:
        client.query["wait"] = "0"
        snapshot = await client.receive("snapshot")
        while not client.messages:
            await client.fetch()
        beat = client.messages.popleft()
        assert (beat["type"], beat["table"], beat["behind"]) == ("heartbeat", "top_topics", 0)
        assert beat["position"] == snapshot["position"]
        assert beat["lag_ms"] >= 0


@ALL
async def test_a_principals_rows_are_all_it_sees(root: Path, transport: str) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    start = token(root, product, 0)
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, rows={"*": "rank = 1"}))
    mine = partial(subscriber, key=key)
    async with serving(root, ring_frames=2) as url:
        async with AsyncExitStack() as stack:
            fresh = await stack.enter_async_context(mine(transport, url))
            wide = await stack.enter_async_context(mine(transport, url, where="rank = 2 OR rank = 1 OR TRUE"))
            assert counts(await fresh.receive("snapshot")) == counts(await wide.receive("snapshot")) == [3]
            for count in (4, 5, 6):
                product.overwrite(topics(0, [count, 9, 9]), [window(0)])
            seen = [await client.changes(3) for client in (fresh, wide)]
            assert [counts(change) for changes in seen for change in changes] == [[4], [5], [6]] * 2
            assert not any(change["deletes"] for changes in seen for change in changes)
        async with mine(transport, url, from_=start) as client:  # a position of the whole table
            assert (await client.expiry())["reason"] == "filter"
            assert counts(await client.receive("snapshot")) == [6]
    async with serving(root) as url, mine(transport, url, from_=seen[0][0]["position"]) as client:
        await client.receive("resumed")
        assert await client.changes(2) == seen[0][1:]


async def test_a_table_that_a_key_may_not_read_does_not_exist(root: Path) -> None:
    top_topics(root)
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, tables=("other",)))
    async with serving(root) as url:
        for transport in TRANSPORTS:
            async with subscriber(transport, url, key=key) as client:
                assert (await client.receive("error"))["code"] == "no_such_table"


@ALL_STREAMS
async def test_the_server_stops_and_says_so(root: Path, transport: str) -> None:
    top_topics(root)
    async with serving(root) as url:
        client = subscriber(transport, url)
        await client.open()
        await client.receive("snapshot")
    code, reason = await client.closed()
    assert (code, "position" in reason) == (1001, True)
    await client.shut()


async def test_a_reader_that_stops_for_a_while_hears_slow_first_and_then_everything(root: Path) -> None:
    product = top_topics(root)
    times = {"heartbeat_ms": 100, "slow_after_ms": 1_500, "cut_after_ms": 600_000}
    # On a busy machine the first change may come late; a reader that is told before it is behind by nothing.
    async with serving(root, **times) as url, AsyncExitStack() as stack:
        stopped = [subscriber(transport, url) for transport in ("websocket", "rpc", "sse")]
        for client in stopped:
            await stack.enter_async_context(client)
            await client.receive("snapshot")
            client.stop_reading()
        for number in range(1, 61):
            rows = [row | {"item": f"{number} " + "x" * 2_000} for row in topics(0, [number] * 100)]  # 200 KB a change
            await asyncio.to_thread(product.overwrite, rows, [window(0)])
        async with asyncio.timeout(60):
            while await metric(url, "millrace_serve_slow_total") < len(stopped):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for client in stopped:
            client.read_on()
            numbers: list[int] = []
            slow_at: int | None = None
            while len(numbers) < 60:
                message = await client.receive()
                if message["type"] == "slow":
                    slow_at = len(numbers)
                    assert message["behind"] > 0
                elif message["last"]:
                    numbers.append(counts(message)[0])
            assert numbers == list(range(1, 61))
            assert slow_at is not None
            assert slow_at < 60, "the notice stands ahead of what it lags by"


@ALL
async def test_too_many_subscribers(root: Path, transport: str) -> None:
    top_topics(root)
    async with serving(root, max_subscribers=1, max_filters=1) as url:
        async with subscriber("websocket", url, where="rank = 1") as first:
            await first.receive("snapshot")
            async with subscriber(transport, url) as second:
                assert (await second.receive("error"))["code"] == "full"
        async with asyncio.timeout(60):
            while True:
                async with subscriber(transport, url, where="rank = 2") as third:
                    if (await third.receive())["type"] == "snapshot":
                        break
