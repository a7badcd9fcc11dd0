"""The page for Meetup's RSVPs in a real Chromium, on the real server, over real Delta tables that grow meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from playwright.async_api import BrowserContext, Error, Page, WebSocketRoute, expect

from jobs.local.stack import free_port
from lakehouse.contract import lake
from tests.system.browser import launched, require_browser

pytestmark = pytest.mark.browser

MINUTE = timedelta(minutes=1)
PATIENCE_S = 60.0
expect.set_options(timeout=1_000 * PATIENCE_S)
LOUD = "<img src=x onerror=document.title='markup'>"
ITEMS = (
    "Outdoors",
    "Hiking",
    "Москва: прогулки",
    "ボードゲーム",
    "تعلم اللغة العربية",
    LOUD,
    *(f"Topic {n}" for n in range(6)),
)
TOPICS = pa.schema(
    [
        ("window_start", pa.timestamp("us", "UTC")),
        ("window_end", pa.timestamp("us", "UTC")),
        ("rank", pa.int32()),
        ("item", pa.string()),
        ("count", pa.int64()),
        ("error", pa.int64()),
    ]
)
MEMBERS = pa.schema(
    [
        ("window_start", pa.timestamp("us", "UTC")),
        ("window_end", pa.timestamp("us", "UTC")),
        ("members", pa.float64()),
        ("lower", pa.float64()),
        ("upper", pa.float64()),
        ("rsvps", pa.int64()),
    ]
)
SERVER = """
import asyncio, sys
from lakehouse.contract.settings import load_settings
from serve.app import run_server

changed = dict(each.split("=", 1) for each in sys.argv[3:])
settings = load_settings({}, lake=sys.argv[1], serve__port=sys.argv[2], serve__heartbeat_ms=500, **changed)

async def main():
    await run_server(settings)

asyncio.run(main())
"""


@dataclass
class Tables:
    """Both tables of the page, and what their commits should add up to."""

    root: Path
    commits: int = 0
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    window: datetime = field(default_factory=lambda: datetime.now(UTC).replace(second=0, microsecond=0))

    def __post_init__(self) -> None:
        for name, schema, key in (("top_topics", TOPICS, "window_start,rank"), ("members", MEMBERS, "window_start")):
            path = self.path(name)
            path.mkdir(parents=True)
            DeltaTable.create(path, schema, configuration={lake.PROPERTY_KEY: key}, raise_if_key_not_exists=False)

    def path(self, name: str) -> Path:
        return self.root / "gold" / name

    def commit(self) -> None:
        """One more commit to each table, with a number of events that no other commit has."""
        self.commits += 1
        events = 1_000 + self.commits
        self.events += events
        for place, item in enumerate(ITEMS):  # the order changes with each commit
            self.counts[item] += (place * 7 + self.commits * 5) % 37
        now = int(time.time() * 1000)
        facts = {
            lake.COMMIT_THROUGH: json.dumps({"meetup-raw-rsvps/0": self.events}),
            lake.COMMIT_EVENTS: str(events),
            lake.COMMIT_OLDEST: str(now - 900),
            lake.COMMIT_NEWEST: str(now - 300),
        }
        self._write("top_topics", pa.Table.from_pylist(self.top(), TOPICS), facts)
        self._write("members", pa.Table.from_pylist([self.distinct()], MEMBERS), facts)

    def next_window(self) -> None:
        """The minute turns."""
        self.window += MINUTE
        self.counts = Counter()

    def top(self) -> list[dict[str, Any]]:
        ranked = sorted(self.counts.items(), key=lambda pair: (-pair[1], pair[0]))[:10]
        window = {"window_start": self.window, "window_end": self.window + MINUTE}
        return [
            window | {"rank": rank, "item": item, "count": count, "error": rank % 3}
            for rank, (item, count) in enumerate(ranked, 1)
        ]

    def distinct(self) -> dict[str, Any]:
        members = self.events * 0.75
        window = {"window_start": self.window, "window_end": self.window + MINUTE}
        return window | {"members": members, "lower": members - 9, "upper": members + 9, "rsvps": self.events}

    def stored_top(self) -> list[list[Any]]:
        """The newest window as the Delta table itself has it."""
        rows = DeltaTable(self.path("top_topics")).to_pyarrow_table().to_pylist()
        newest = max(row["window_start"] for row in rows)
        found = [row for row in rows if row["window_start"] == newest]
        return [[row["rank"], row["item"], row["count"]] for row in sorted(found, key=lambda row: row["rank"])]

    def _write(self, name: str, rows: pa.Table, facts: dict[str, str]) -> None:
        write_deltalake(
            self.path(name),
            rows,
            mode="overwrite",
            predicate=f"window_start = '{self.window:%Y-%m-%dT%H:%M:%SZ}'",
            commit_properties=CommitProperties(custom_metadata=facts),
        )


class Server:
    """The server in a process of its own, to be killed; always on the same port.

    Args:
        root: of the lake.
        changed: further settings.
    """

    def __init__(self, root: Path, **changed: object) -> None:
        self.root = root
        self.changed = [f"{name}={value}" for name, value in changed.items()]
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def meetup(self) -> str:
        return f"{self.url}/meetup/"

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, str(self.root), str(self.port), *self.changed])
        until = time.monotonic() + PATIENCE_S
        while not self.get("/readyz"):
            assert self.process.poll() is None, "the server has ended"
            assert time.monotonic() < until, "the server is not ready"
            time.sleep(0.05)

    def get(self, path: str) -> Any:
        """The answer's body, or None where it is not 200."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.read()
        except (urllib.error.URLError, ConnectionError):
            return None

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@dataclass
class Watched:
    """A browser context whose pages are watched: what they ask for, and what they complain of."""

    context: BrowserContext
    requests: set[str] = field(default_factory=set)
    complaints: list[str] = field(default_factory=list)

    async def page(self, url: str) -> Page:
        page = await self.context.new_page()
        page.on("request", lambda request: self.requests.add(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        await page.goto(url)
        return page


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path)


@pytest.fixture
def server(tables: Tables) -> Iterator[Server]:
    server = Server(tables.root)
    yield server
    server.kill()


@asynccontextmanager
async def watching(**options: Any) -> AsyncIterator[Watched]:
    path = await asyncio.to_thread(require_browser)
    async with launched(path) as browser:
        context = await browser.new_context(**options)
        context.set_default_timeout(1_000 * PATIENCE_S)
        yield Watched(context)


async def shown_top(page: Page) -> list[list[Any]]:
    found: list[list[Any]] = await page.eval_on_selector_all(
        "#top li[data-rank]",
        "found => found.map(li => [Number(li.dataset.rank), li.dataset.item, Number(li.dataset.count)])",
    )
    return found


async def eventually(page: Page, true_of: Callable[[dict[str, str]], bool], what: str) -> dict[str, str]:
    """The attributes of the page's root, once they are as wanted."""
    until = time.monotonic() + PATIENCE_S
    while True:
        found: dict[str, str] = {}
        try:
            found = await page.evaluate("({...document.documentElement.dataset})")
        except Error as error:  # the page loads itself again meanwhile: with a key that it was given, say
            assert "context was destroyed" in error.message, error
        if found and true_of(found):
            return found
        assert time.monotonic() < until, f"{what}: {found}"
        await asyncio.sleep(0.05)


async def caught_up(page: Page, tables: Tables, *, since: int, events_before: int) -> None:
    """The page has applied every commit after the first `since` once, and shows what the table holds."""
    expected = str(2 * (tables.commits - since))
    found = await eventually(
        page, lambda data: data["state"] == "live" and data["applied"] == expected, f"{expected} changes"
    )
    assert (found["gaps"], found["duplicates"]) == ("0", "0")
    for section in ("#topics", "#members"):
        data = await page.eval_on_selector(section, "element => ({...element.dataset})")
        assert int(data["applied"]) == tables.commits - since
        assert int(data["events"]) == tables.events - events_before  # a sum that only these commits, each once, have
    assert await shown_top(page) == tables.stored_top()
    assert float(await page.get_attribute("#members", "data-value") or 0) == tables.distinct()["members"]


async def test_shows_the_top_and_keeps_up(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await caught_up(page, tables, since=1, events_before=tables.events)
        before = tables.events
        for _ in range(12):
            tables.commit()
            await asyncio.sleep(0.05)
        await caught_up(page, tables, since=1, events_before=before)
        tables.next_window()
        tables.commit()
        await caught_up(page, tables, since=1, events_before=before)
        leaders = page.locator("#leader-list li")
        await expect(leaders).to_have_count(1)
        body = json.loads(server.get("/v1/tables/top_topics"))
        assert await page.get_attribute("#position", "data-position") == body["position"]
        newest, oldest = (float(part) for part in (await page.inner_text("#latency-value")).split(" – "))
        assert 0.3 <= newest < 0.3 + PATIENCE_S
        assert oldest - newest == pytest.approx(0.6, abs=0.11)
        assert await page.locator("#top img").count() == 0  # a name is text
        assert await page.locator(f"#top li[data-item={json.dumps(LOUD)}] .name").text_content() == LOUD
        assert "markup" not in await page.title()
        assert watched.complaints == []
        assert {url for url in watched.requests if not url.startswith(server.url)} == set()


async def test_server_killed_and_page_reloaded_without_gap_or_duplicate(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await caught_up(page, tables, since=1, events_before=tables.events)
        before = tables.events
        for number in range(30):
            tables.commit()
            if number in (6, 20):
                server.kill()
            if number in (10, 23):
                await asyncio.to_thread(server.start)
            if number in (4, 14, 17):
                await page.reload()
            await asyncio.sleep(0.05)
        await caught_up(page, tables, since=1, events_before=before)
        await page.reload()
        await caught_up(page, tables, since=1, events_before=before)


@pytest.mark.soak  # test_browser_client.py does so for every page
async def test_closed_page_goes_on_from_its_stored_position(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await caught_up(page, tables, since=1, events_before=tables.events)
        before = tables.events
        tables.commit()
        await caught_up(page, tables, since=1, events_before=before)
        await page.close()
        page = await watched.page(server.meetup)  # nothing was missed: every row comes from the store
        await caught_up(page, tables, since=1, events_before=before)
        await page.close()
        server.kill()
        for _ in range(5):
            tables.commit()
        await asyncio.to_thread(server.start)
        page = await watched.page(server.meetup)
        await caught_up(page, tables, since=1, events_before=before)


async def test_a_silent_server_is_noticed(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.context.new_page()
        await page.clock.install()
        await page.goto(server.meetup)
        await eventually(page, lambda data: data["state"] == "live", "live")
        server.signal(signal.SIGSTOP)  # its sockets stay open, and nothing comes
        try:
            await page.clock.fast_forward(20_000)
            await eventually(page, lambda data: data["state"] in {"reconnecting", "resuming"}, "the silence")
        finally:
            server.signal(signal.SIGCONT)
        await page.clock.fast_forward(60_000)
        await eventually(page, lambda data: data["state"] == "live", "live again")


async def test_nothing_runs_over_the_edge(tables: Tables, server: Server) -> None:
    tables.counts["A topic whose name would not end, " * 12] = 1_000_000_000
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await eventually(page, lambda data: data["state"] == "live", "live")
        for width, height in ((1920, 1080), (3840, 2160), (1280, 720), (390, 844)):
            await page.set_viewport_size({"width": width, "height": height})
            size = await page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
            assert size[0] <= width
            assert size[1] <= height or width < 1000  # a wall screen is not scrolled
            name, figure = [await page.locator(place).first.bounding_box() for place in ("#top .name", "#top .figure")]
            assert name is not None
            assert figure is not None
            assert name["x"] + name["width"] <= figure["x"]


async def test_table_replaced_while_the_page_was_away(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await caught_up(page, tables, since=1, events_before=tables.events)
        await page.close()
        server.kill()
        shutil.rmtree(tables.root / "gold")
        rebuilt = Tables(tables.root)
        rebuilt.commit()
        await asyncio.to_thread(server.start)
        page = await watched.page(server.meetup)
        await caught_up(page, rebuilt, since=1, events_before=rebuilt.events)


async def test_a_wire_that_repeats_and_one_that_loses(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    to_lose = 0

    def wire(near: WebSocketRoute) -> None:
        far = near.connect_to_server()

        def pass_on(message: str | bytes) -> None:
            nonlocal to_lose
            changed = json.loads(message)["type"] == "change"
            if changed and to_lose > 0:
                to_lose -= 1
                return
            for _ in range(2 if changed else 1):
                near.send(message)

        far.on_message(pass_on)

    async with watching() as watched:
        page = await watched.context.new_page()
        await page.route_web_socket("**/v1/subscribe**", wire)
        await page.goto(server.meetup)
        await eventually(page, lambda data: data["state"] == "live", "live")
        for _ in range(3):
            tables.commit()
        found = await eventually(page, lambda data: data["duplicates"] == "6", "3 commits of 2 tables, each twice")
        assert (found["applied"], found["gaps"]) == ("6", "0")
        to_lose = 2  # the newest change of each table: the next heartbeat tells
        tables.commit()
        await eventually(page, lambda data: (data["gaps"], data["applied"]) == ("2", "8"), "lost, noticed and fetched")
        assert await shown_top(page) == tables.stored_top()


async def test_theme_follows_the_system_until_one_is_chosen(tables: Tables, server: Server) -> None:
    tables.commit()
    await asyncio.to_thread(server.start)
    ground = "getComputedStyle(document.body).backgroundColor"
    async with watching(color_scheme="dark") as watched:
        page = await watched.page(server.meetup)
        dark = await page.evaluate(ground)
        await page.emulate_media(color_scheme="light")
        light = await page.evaluate(ground)
        assert dark != light
        await page.get_by_role("button", name="Switch to the dark theme").click()
        assert await page.evaluate(ground) == dark
        await page.reload()
        assert await page.evaluate(ground) == dark
        await page.get_by_role("button", name="Switch to the light theme").click()
        assert await page.evaluate(ground) == light
