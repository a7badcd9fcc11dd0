"""The client for browsers in a real Chromium, against real servers with real Delta tables: kills, cuts, closed tabs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page

from jobs.local.stack import free_port
from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from tests.serve.conftest import Spawned, serving
from tests.serve.lakes import Product, top_topics, topics, window
from tests.system.browser import launched, require_browser

pytestmark = pytest.mark.browser

PATIENCE_S = 60.0
SUBSCRIBE = """
async ([table, { ticketsOf, ...options }]) => {
  const { subscribe } = await import("/client/millrace.js");
  window.states = [];
  window.seen = []; // the count of rank 1 in each change
  const headers = { Authorization: `Bearer ${ticketsOf}` };
  const ticket = async () => (await (await fetch("/v1/tickets", { method: "POST", headers })).json()).ticket;
  if (ticketsOf) options.tickets = ticket; // as a backend would, which has the key
  window.sub = subscribe(location.origin, table, {
    ...options,
    onState: ({ state }) => states.push(state),
    onChange: ({ type, upserts }) => type === "change" && seen.push(...upserts.map(({ count }) => count)),
  });
}
"""
FACTS = """
() => ({
  state: sub.status.state, code: sub.status.code, transport: sub.transport, leads: sub.leads, lag: sub.lagMs,
  rows: [...sub.rows.values()].map(({ count }) => count), seen, states, ...sub.counters,
})
"""
SAVED = """
async () => {
  const [{ name }] = await indexedDB.databases();
  const request = (asked) => new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  const database = await request(indexedDB.open(name));
  const heads = await request(database.transaction("heads").objectStore("heads").getAll());
  database.close();
  return heads.map(({ counters }) => counters.applied);
}
"""
Facts = dict[str, Any]


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = await asyncio.to_thread(require_browser)
    async with launched(path) as browser:
        yield browser


async def opened(context: BrowserContext, url: str, table: str = "top_topics", **options: Any) -> Page:
    """A page of the server's origin that subscribes."""
    page = await context.new_page()
    await page.goto(f"{url}/client/package.json")
    await page.evaluate(SUBSCRIBE, [table, options])
    return page


async def until(page: Page, true_of: Callable[[Facts], bool]) -> Facts:
    """What the page says of its subscription, once it is as wanted."""
    ending = time.monotonic() + PATIENCE_S
    while not true_of(facts := await page.evaluate(FACTS)):
        assert time.monotonic() < ending, facts
        await asyncio.sleep(0.02)
    return facts


async def saved(page: Page, applied: Sequence[int]) -> None:
    """Wait until IndexedDB holds so many changes of each subscription."""
    ending = time.monotonic() + PATIENCE_S
    while (found := await page.evaluate(SAVED)) != applied:
        assert time.monotonic() < ending, found
        await asyncio.sleep(0.02)


def commit(product: Product, count: int) -> None:
    product.overwrite(topics(0, [count]), [window(0)])


def live(*seen: int) -> Callable[[Facts], bool]:
    return lambda facts: facts["state"] == "live" and facts["seen"] == list(seen)


class Middle:
    """A middle between browser and server that refuses transports, and can cut every connection."""

    def __init__(self, server: str) -> None:
        self.refused: frozenset[str] = frozenset()
        self.up = True
        self.url = ""
        self._port = int(server.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Middle]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.up:
                back = await asyncio.open_connection("127.0.0.1", self._port)
                self._writers |= {writer, back[1]}
                await asyncio.gather(self._carry(reader, back[1], writer), self._carry(back[0], writer))
        finally:
            writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter | None = None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65_536):
                if back is not None and kind_of(piece) in self.refused:
                    back.write(b"HTTP/1.1 405 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    await back.drain()
                    break
                writer.write(piece)
                await writer.drain()
            writer.close()


def kind_of(head: bytes) -> str:
    """The transport that a request asks for."""
    if re.search(rb"(?i)\r\nupgrade: websocket", head):
        return "websocket"
    if b"event-stream" in head:
        return "sse"
    return "poll" if head.startswith(b"GET /v1/poll") else ""


async def test_each_change_is_applied_once_through_kills_cuts_and_reloads(root: Path, spawned: list[Spawned]) -> None:
    product = top_topics(root)
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64, rows={"*": "rank < 3"}))
    port = free_port()
    spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, port=port))
    async with Middle(spawned[0].url).listening() as middle, chromium() as browser:
        context = await browser.new_context()
        wanted = [
            {"key": key, "transport": transport, "store": "indexeddb", "where": f"count > {-number}"}
            for number, transport in enumerate(("websocket", "sse", "poll"))
        ]
        pages = [await opened(context, middle.url, **options) for options in wanted]
        for page in pages:
            await until(page, live())
        for count in range(1, 10):
            await asyncio.to_thread(commit, product, count)
            match count:
                case 2:
                    spawned[-1].kill()
                case 4:
                    spawned.append(await asyncio.to_thread(Spawned, root, poll_ms=5, port=port))
                case 6:
                    middle.up = False
                    middle.cut()
                case 8:
                    middle.up = True
        for page, options in zip(pages, wanted, strict=True):
            facts = await until(page, live(*range(1, 10)))
            assert (facts["applied"], facts["gaps"], facts["duplicates"]) == (9, 0, 0)
            assert (facts["rows"], facts["transport"]) == ([9], options["transport"])
        await saved(pages[0], [9, 9, 9])
        for page in pages:
            await page.close()
        commit(product, 10)
        for options in wanted:
            page = await opened(context, middle.url, **options)
            facts = await until(page, live(10))
            assert (facts["applied"], facts["rows"]) == (10, [10]), "it went on from what IndexedDB held"
            assert "snapshot" not in facts["states"]


async def test_the_first_transport_that_gets_through_is_taken_and_kept(root: Path) -> None:
    product = top_topics(root)
    async with serving(root) as url, Middle(url).listening() as middle, chromium() as browser:
        context = await browser.new_context()
        middle.refused = frozenset({"websocket"})
        page = await opened(context, middle.url, share=False)
        assert (await until(page, live()))["transport"] == "sse"
        middle.refused |= {"sse"}
        middle.cut()
        assert (await until(page, lambda facts: facts["transport"] == "poll" and facts["state"] == "live"))["gaps"] == 0
        commit(product, 1)
        await until(page, live(1))
        middle.refused |= {"poll"}
        middle.cut()
        facts = await until(page, lambda facts: facts["state"] == "refused")
        assert facts["code"] == "http_405"


async def test_tabs_share_one_connection_and_go_on_when_the_leader_closes(root: Path) -> None:
    product = top_topics(root)
    commit(product, 1)
    async with serving(root, heartbeat_ms=100) as url, chromium() as browser:
        context = await browser.new_context()
        sockets: list[str] = []
        pages = []
        context.on("page", lambda page: page.on("websocket", lambda socket: sockets.append(socket.url)))
        for _ in range(3):
            pages.append(await opened(context, url))
            await until(pages[-1], live())
        assert [(await until(page, live()))["leads"] for page in pages] == [True, False, False]
        assert len(sockets) == 1
        for count in (2, 3):
            commit(product, count)
        for page in pages:
            facts = await until(page, live(2, 3))
            assert (facts["rows"], facts["applied"]) == ([3], 2)
            assert facts["lag"] is None or facts["lag"] > 0
        await pages[0].close(run_before_unload=False)
        for count in (4, 5):
            commit(product, count)
        for page in pages[1:]:
            facts = await until(page, live(2, 3, 4, 5))
            assert (facts["gaps"], facts["duplicates"]) == (0, 0)
        assert len(sockets) == 2
        [leader] = [page for page in pages[1:] if (await page.evaluate(FACTS))["leads"]]
        await leader.evaluate("sub.close()")
        [last] = [page for page in pages[1:] if page is not leader]
        commit(product, 6)
        facts = await until(last, live(2, 3, 4, 5, 6))
        assert facts["leads"]
        late = await opened(context, url)
        assert (await until(late, live()))["rows"] == [6], "a tab that comes later gets the leader's rows"
        assert len(sockets) == 3
        for page in context.pages:
            await page.close()
        sockets.clear()
        for page in await asyncio.gather(*(opened(context, url) for _ in range(3))):
            assert (await until(page, live()))["rows"] == [6], "also while nothing changes"
        assert len(sockets) == 1


async def test_tabs_that_share_nothing_do_not_mix_their_stored_states(root: Path) -> None:
    product = top_topics(root)
    commit(product, 1)
    async with serving(root) as url, chromium() as browser:
        context = await browser.new_context()
        old, new = [await opened(context, url, share=False) for _ in range(2)]
        for page in (old, new):
            await until(page, live())
        commit(product, 2)
        for page in (old, new):
            await until(page, live(2))
        assert [await page.evaluate("sub.persistent") for page in (old, new)] == [False, True], "the last stores"
        await old.close()
        await new.close()
        commit(product, 3)
        facts = await until(await opened(context, url), live(3))
        assert (facts["applied"], facts["rows"]) == (2, [3])


async def test_final_answers_end_it_and_a_key_is_seen_by_no_other_tab(root: Path) -> None:
    commit(top_topics(root), 1)
    keys = KeyFile(Lake(root).state / "readers.toml", ReaderKey)
    key, other = (keys.new(ReaderKey("0" * 64, tables=("top_topics",))) for _ in range(2))
    refusals = [("nope", "", "no_such_table"), ("top_topics", "count >", "bad_filter")]
    async with serving(root) as url, chromium() as browser:
        context = await browser.new_context()
        for transport in ("websocket", "sse", "poll"):
            for table, where, code in refusals:
                page = await opened(context, url, table, key=key, where=where, transport=transport)
                assert (await until(page, lambda facts: facts["state"] == "refused"))["code"] == code
            page = await opened(context, url, ticketsOf=key, transport=transport)
            await until(page, live())
            for wrong in ("", "mr_wrong_key"):
                stranger = await opened(context, url, key=wrong or None, transport=transport)
                assert (await until(stranger, lambda facts: facts["state"] == "locked"))["rows"] == []
            await page.close()
        tabs = [await opened(context, url, key=key) for _ in range(2)]
        for tab in tabs:
            await until(tab, live())
        friend = await opened(context, url, key=other)
        assert (await until(friend, live()))["leads"]
        keys.revoke(key.split("_")[1])
        for tab in tabs:
            await until(tab, lambda facts: facts["state"] == "locked")
        assert (await friend.evaluate(FACTS))["state"] == "live"


async def test_a_page_that_does_not_keep_up_is_told_and_recovers(root: Path) -> None:
    product = top_topics(root)
    async with serving(root, heartbeat_ms=100, slow_after_ms=2_500) as url, chromium() as browser:
        page = await opened(await browser.new_context(), url)
        await until(page, live())
        commit(product, 1)
        await until(page, live(1))
        busy = asyncio.create_task(
            page.evaluate("until => { while (Date.now() < until) {} }", await later(page, 4_000))
        )
        for count in range(2, 40):
            await asyncio.to_thread(commit, product, count)
        await busy
        facts = await until(page, live(*range(1, 40)))
        assert "slow" in facts["states"]
        assert facts["gaps"] == 0


async def later(page: Page, ms: int) -> int:
    now: int = await page.evaluate("Date.now()")
    return now + ms
