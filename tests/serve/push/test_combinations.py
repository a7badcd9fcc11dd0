"""Everything at once: filter × conflation × transport, codec and compression × resume, and servers that are killed."""

from __future__ import annotations

import asyncio
import json
from itertools import product as every
from pathlib import Path
from typing import Any

import httpx

from lakehouse.contract.lake import Lake
from serve.sql.statement import rows_as_json, run_sql
from tests.serve.conftest import Spawned, serving, wait_until
from tests.serve.lakes import Product, top_topics, topics, window
from tests.serve.push.clients import TRANSPORTS, Client, Closed

VIEWS: list[dict[str, str]] = [
    {},
    {"where": "count % 2 = 1 AND item LIKE 'topic _'"},
    {"where": "count > 3", "columns": "item,count"},
    {"select": "SELECT item, sum(count) AS total, max(count) AS most, count(*) AS n WHERE rank < 4 GROUP BY item"},
]
ORACLES = [
    "SELECT window_start, window_end, rank, item, count, error FROM top_topics",
    "SELECT window_start, window_end, rank, item, count, error FROM top_topics "
    "WHERE count % 2 = 1 AND item LIKE 'topic _'",
    "SELECT window_start, rank, item, count FROM top_topics WHERE count > 3",
    "SELECT item, sum(count)::BIGINT AS total, max(count) AS most, count(*) AS n FROM top_topics WHERE rank < 4 "
    "GROUP BY item",
]


class Follower:
    """A client that applies what it gets, across connections and servers."""

    def __init__(self, transport: str, view: int, conflate: bool) -> None:
        self.transport = transport
        self.view = view
        self.conflate = conflate
        self.position: str | None = None
        self.client: Client | None = None
        self.key: list[str] = []
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.seen: list[tuple[str, Any, Any]] = []

    async def follow(self, url: str, offset: int) -> None:
        """Until the events before ``offset`` are in."""
        try:
            await self._follow(url, offset)
        finally:
            if self.client is not None:
                await self.client.shut()

    async def _follow(self, url: str, offset: int) -> None:
        query = {"table": "top_topics"} | VIEWS[self.view] | ({"conflate": "1"} if self.conflate else {})
        if self.position is not None:
            query["from"] = self.position
        client = self.client = TRANSPORTS[self.transport](url, query)
        await client.open()
        through = -1
        while through < offset:
            message = await client.receive()
            self.apply(message)
            if message["type"] in ("snapshot", "change") and message["last"]:
                through = (message["through"] or {}).get("rsvps/0", 0)

    def apply(self, message: dict[str, Any]) -> None:
        """Hold what the message brings."""
        assert message["type"] in ("snapshot", "change", "resumed"), message
        self.position = message["position"]
        self.key = message.get("key", self.key)
        if message["type"] == "snapshot":
            self.rows = {self.key_of(row): row for row in message["rows"]}
        elif message["type"] == "change":
            self.seen.append((message["position"], message["upserts"], sorted(map(json.dumps, message["deletes"]))))
            for gone in message["deletes"]:
                del self.rows[self.key_of(gone)]
            self.rows |= {self.key_of(row): row for row in message["upserts"]}

    def key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


async def has_read(url: str, version: int) -> None:
    """Wait until the server has the version in memory."""
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url, timeout=60) as http:
        while (await http.get("/v1/tables")).json()["tables"][0].get("version", -1) < version:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def expected(root: Path, view: int) -> list[str]:
    return sorted(json.dumps(row) for row in json.loads(rows_as_json(run_sql(Lake(root), ORACLES[view]))))


def commit(product: Product, number: int) -> None:
    """Something of everything: new windows, changed and vanished rows; compaction now and then."""
    rows = [(number * 7 + rank * 5) % 9 for rank in range(1 + number % 4)]
    product.overwrite(topics(number % 3, rows), [window(number % 3)])
    if number % 4 == 3:
        product.compact()


async def test_every_combination_holds_the_table_and_goes_on_elsewhere(root: Path) -> None:
    product = top_topics(root)
    for number in range(4):
        commit(product, number)
    followers = [Follower(*each) for each in every(TRANSPORTS, range(len(VIEWS)), (False, True))]
    async with serving(root) as url:
        listening = [asyncio.ensure_future(each.follow(url, 90)) for each in followers]
        await asyncio.sleep(0)
        for number in range(4, 9):
            await asyncio.to_thread(commit, product, number)
            if number == 6:
                await has_read(url, product.version)  # a vacuum without retention also takes what nobody has read yet
                await asyncio.to_thread(
                    product.table.vacuum, retention_hours=0, enforce_retention_duration=False, dry_run=False
                )
        await asyncio.gather(*listening)
    for number in range(9, 14):
        commit(product, number)
    async with serving(root) as url:
        await asyncio.gather(*(each.follow(url, 140) for each in followers))
        late = [Follower(*each) for each in every(TRANSPORTS, range(len(VIEWS)), (False,))]
        await asyncio.gather(*(each.follow(url, 140) for each in late))
    for view in range(len(VIEWS)):
        alike = [each for each in followers if each.view == view]
        for each in [*alike, *(each for each in late if each.view == view)]:
            held = sorted(json.dumps(row) for row in each.rows.values())
            assert held == expected(root, view), (each.transport, each.conflate)
        one_by_one = [each.seen for each in alike if not each.conflate]
        tail = min(map(len, one_by_one))
        assert all(seen[-tail:] == one_by_one[0][-tail:] for seen in one_by_one), "the same on every transport"
        assert tail >= 5


async def test_200_subscribers_of_all_transports_outlive_their_server(root: Path, spawned: list[Spawned]) -> None:
    product = top_topics(root)
    product.overwrite(topics(0, [0]), [window(0)])
    names = [name for name, _ in zip(list(TRANSPORTS) * 40, range(200), strict=False)]
    spawned.append(Spawned(root, poll_ms=5))
    watchers = [Watcher(name, number) for number, name in enumerate(names)]
    listening = [asyncio.ensure_future(each.watch(spawned[0].url, 16)) for each in watchers]
    await write(product, 1, 8)
    await wait_until(lambda: all(each.seen and each.seen[-1] >= 6 for each in watchers), 60)
    spawned[0].kill()
    writing = asyncio.create_task(write(product, 9, 16))
    spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5))
    await asyncio.gather(*listening)
    assert all(6 <= each.seen[-1] <= 8 for each in watchers), "the server died while they listened"
    await asyncio.gather(*(each.watch(spawned[1].url, 16) for each in watchers))
    await writing
    for each in watchers:
        assert each.seen == list(range(each.seen[0], 17)), (each.transport, "no gap, no repeat")


class Watcher:
    """Notes the counts that it is told, in order, until its server is gone."""

    def __init__(self, transport: str, number: int) -> None:
        self.transport = transport
        self.query = {"table": "top_topics"} | [{}, {"where": "rank = 1"}, {"columns": "count"}][number % 3]
        self.seen: list[int] = []

    async def watch(self, url: str, last: int) -> None:
        async with TRANSPORTS[self.transport](url, dict(self.query)) as client:
            while not self.seen or self.seen[-1] < last:
                try:
                    message = await client.receive()
                except Closed:
                    return
                assert message["type"] in ("snapshot", "resumed", "change"), message
                self.seen += [row["count"] for row in message.get("rows", message.get("upserts", []))]
                self.query["from"] = message["position"]


async def write(product: Product, first: int, last: int) -> None:
    for count in range(first, last + 1):
        await asyncio.to_thread(product.overwrite, topics(0, [count]), [window(0)])
        await asyncio.sleep(0.05)
