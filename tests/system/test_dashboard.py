"""The dashboard in a real Chromium: every panel and the SQL box, while the server is killed and the network is cut."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, expect

from jobs.local.stack import free_port
from lakehouse.contract.lake import Lake
from tests.chaos.proxy import Link
from tests.serve.conftest import serving
from tests.serve.tables.test_events import Bronze
from tests.system.browser import launched, require_browser
from tests.system.dashboard import CITIES, EVENTS, LATE, Growing
from tests.system.test_meetup_page import PATIENCE_S, Server

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SQL = "SELECT city, sum(n) AS events FROM by_city WHERE city <> 'Bonn' GROUP BY city"
INKED = """
canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colours = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = data.slice(at, at + 3).join();
    if (data[at + 3] === 255) colours[colour] = (colours[colour] ?? 0) + 1;
  }
  return colours;
}
"""
COLOUR = """
name => {
  const made = document.createElement("i");
  made.style.color = `var(--${name})`;
  document.body.append(made);
  return getComputedStyle(made).color;
}
"""
FOCUSED = """
() => {
  const { textContent, id, ariaLabel } = document.activeElement;
  return textContent.trim() || ariaLabel || id;
}
"""
RANKED = "found => found.map(({ dataset }) => [Number(dataset.rank), dataset.item, Number(dataset.count)])"
VALUES = "found => Object.fromEntries(found.map(each => [each.dataset.name, Number(each.dataset.value)]))"


@dataclass
class Stage:
    """One lake, server and browser for all tests here; what is wrong on any page is kept."""

    growing: Growing
    server: Server
    url: str
    network: Link
    browser: Browser
    context: BrowserContext
    complaints: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    async def page(self, address: str = "", context: BrowserContext | None = None) -> Page:
        page = await (context or self.context).new_page()
        page.set_default_timeout(1_000 * PATIENCE_S)
        page.on("request", lambda request: self.asked.add(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if "Content Security" in line.text else None)
        await page.goto(f"{self.url}/{address}")
        return page

    async def commit(self, times: int = 1) -> None:
        for _ in range(times):
            await asyncio.to_thread(self.growing.commit)

    async def disturb(self) -> None:
        """Kill the server and cut the network, with commits before, between and after."""
        await self.commit()
        self.server.kill()
        await self.commit()
        await asyncio.to_thread(self.server.start)
        await self.commit()
        self.network.up = False
        self.network.cut()
        await self.commit()
        await asyncio.sleep(0.5)
        self.network.up = True
        await self.commit()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    path = await asyncio.to_thread(require_browser)
    growing = Growing(tmp_path_factory.mktemp("dashboard") / "lake")
    growing.fill(12)
    server = Server(growing.root, pipeline=growing.pipeline, serve__slow_after_ms=1_500)
    await asyncio.to_thread(server.start)
    try:
        port = free_port()
        async with launched(path) as browser, Link(port, server.port) as network:
            url = f"http://127.0.0.1:{port}"
            yield Stage(growing, server, url, network, browser, await browser.new_context())
    finally:
        server.kill()


async def eventually(get: Callable[[], Awaitable[Any]], expected: Callable[[], Any]) -> None:
    """Wait until the page shows what is expected."""
    until = time.monotonic() + PATIENCE_S
    while (found := await get()) != expected():
        assert time.monotonic() < until, f"{found} is not {expected()}"
        await asyncio.sleep(0.05)


async def values(page: Page, selector: str) -> dict[str, float]:
    found: dict[str, float] = await page.eval_on_selector_all(selector, VALUES)
    return found


async def inked(page: Page, colour: str) -> int:
    """Pixels of the chart that have a colour of the style sheet."""
    wanted = (await page.evaluate(COLOUR, colour)).removeprefix("rgb(").removesuffix(")").replace(" ", "")
    counted: dict[str, int] = await page.eval_on_selector(".plot canvas", INKED)
    return counted.get(wanted, 0)


async def view_facts(page: Page) -> dict[str, str]:
    found: dict[str, str] = await page.eval_on_selector("#view", "view => ({...view.dataset})")
    return found


def totals(growing: Growing) -> dict[str, float]:
    """Half of the events of each city, rounded down in each window: the seven largest, and the sum of the others."""
    sums: Counter[str] = Counter()
    for (_, city), n in growing.by_city.items():
        sums[city] += n // 2
    largest = sorted(sums.items(), key=lambda pair: (-pair[1], pair[0]))[:7]
    rest = sums.total() - sum(n for _, n in largest)
    return {**dict(largest), f"{len(CITIES) - 7} others": rest}


def without_bonn(growing: Growing) -> dict[str, float]:
    """What :data:`SQL` gives."""
    sums: Counter[str] = Counter()
    for (_, city), n in growing.by_city.items():
        sums[city] += n
    return {city: n for city, n in sums.items() if city != "Bonn"}


def newest_window(growing: Growing) -> int:
    return sum(n for (start, _), n in growing.by_city.items() if start == growing.window)


async def test_overview_lists_what_runs_with_rows_rate_lag_alerts_quality_and_quarantine(stage: Stage) -> None:
    page = await stage.page()
    rows = page.locator("table.tables tbody tr")
    await expect(rows).to_have_count(9)
    products = ["answers", "members", "minutes", "top_topics", "visits", "by_city"]
    listed = [await row.get_attribute("data-table") for row in await rows.all()]
    assert listed == [*products, "alerts", "quality", "quarantine"]
    told = await rows.all_inner_texts()
    assert "distinct count a minute of rsvps" in told[1]
    assert "sessions by member of rsvps" in told[4]
    await stage.commit()
    cities = page.locator("tr[data-table=by_city]")
    await expect(cities).to_have_attribute("data-rows", str(13 * len(CITIES) + 1))
    await eventually(lambda: cities.evaluate("row => row.dataset.rate >= 20 && row.dataset.lag < 60_000"), lambda: True)
    for tile, count in (("alerts", "1"), ("quality", "1"), ("quarantine", "4")):
        await expect(page.locator(f"[data-tile={tile}]")).to_have_attribute("data-value", count)
    await expect(page.get_by_label("Alerts", exact=True)).to_contain_text('busy ["Berlin"] 31')
    await expect(page.get_by_label("Quality")).to_contain_text("top_topics: ranks not met: 2 of 10 rows")
    await expect(page.get_by_label("Quarantine")).to_contain_text("3 of rsvps not JSON")
    report = Lake(stage.growing.root).data_docs
    report.mkdir()
    (report / "index.html").write_text("<h1>Data Docs</h1><script>document.write('run')</script>", encoding="utf-8")
    await page.get_by_role("link", name="Data Docs").click()
    await expect(page.locator("body")).to_have_text("Data Docs")  # and its script did not run
    await page.go_back()
    await page.get_by_role("link", name="minutes").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("minutes")
    await page.go_back()
    await expect(rows).to_have_count(9)
    await page.close()


async def test_every_panel_is_exact_through_kills_cuts_and_reloads(stage: Stage) -> None:
    growing = stage.growing
    names = ("top_topics", "members", "by_city", "minutes", "answers", "visits")
    pages = {name: await stage.page(f"#table={name}") for name in names}
    pages["sql"] = await stage.page(f"#sql={SQL}")
    for transport in ("sse", "poll"):  # in a browser each, for tabs of one share a connection
        page = pages[transport] = await stage.page("#table=answers", await stage.browser.new_context())
        await page.get_by_label("Transport").select_option(transport)
        await expect(page.locator("#view")).to_have_attribute("data-transport", transport)
    for page in pages.values():
        await expect(page.locator("html")).to_have_attribute("data-state", "live")
        await expect(page.locator("#view")).to_have_attribute("data-gaps", "0")
    await stage.disturb()

    async def exact() -> None:
        top = sorted(growing.topics.items(), key=lambda pair: (-pair[1], pair[0]))[:10]
        ranked = [[rank, item, n] for rank, (item, n) in enumerate(top, 1)]
        shown = pages["top_topics"].locator(".ranked li[data-rank]")
        await eventually(lambda: shown.evaluate_all(RANKED), lambda: ranked)
        newest = newest_window(growing)
        await eventually(lambda: values(pages["members"], ".legend [data-name]"), lambda: {"members": newest * 0.75})
        await eventually(lambda: values(pages["by_city"], ".legend [data-name]"), lambda: totals(growing))
        await eventually(
            lambda: values(pages["minutes"], ".legend [data-name]"), lambda: {"yes": newest // 2, "n": newest}
        )
        for name in ("answers", "sse", "poll"):
            await eventually(lambda name=name: values(pages[name], ".bars li"), lambda: dict(growing.answers))
        await eventually(lambda: values(pages["sql"], ".bars li"), lambda: without_bonn(growing))
        cells = pages["visits"].locator("tbody tr:first-child td.number")
        await eventually(cells.all_inner_texts, lambda: ["0", str(growing.commits)])
        for name, page in pages.items():
            facts = await view_facts(page)
            assert (facts["gaps"], facts["duplicates"]) == ("0", "0"), name
            assert facts["transport"] == (name if name in ("sse", "poll") else "websocket")

    await exact()
    for page in pages.values():
        await page.reload()
    await stage.commit(2)
    await exact()
    for name, page in pages.items():  # each went on from its position: every commit since it was opened, once
        assert (await view_facts(page))["events"] == str(7 * EVENTS), name
    growing.next_window()
    await stage.commit()
    await exact()
    assert await inked(pages["by_city"], "s1") > 100
    assert await inked(pages["by_city"], "s8") > 100, "the others have a colour too"
    assert await inked(pages["minutes"], "s2") > 100
    assert await inked(pages["members"], "s1") > 50
    assert "between" in (await pages["members"].locator(".plot").get_attribute("aria-label") or "")
    assert await pages["visits"].locator("tbody tr").count() == 40
    for page in pages.values():
        await page.close()


async def test_sql_filters_and_aggregates_the_stream_and_says_what_is_wrong(stage: Stage) -> None:
    growing = stage.growing
    page = await stage.page()
    box, error = page.get_by_label("SQL", exact=True).and_(page.locator("textarea")), page.get_by_role("alert")
    wrong = {
        "SELECT nope FROM by_city": "there is no column 'nope'",
        "SELECT city FROM by_city ORDER BY city": "ORDER is not kept up to date",
        "SELECT n + FROM by_city": "not SQL",
        "SELECT * FROM nowhere": "nowhere",
        "SELECT 1": "FROM names no table",
    }
    for sql, said in wrong.items():
        await box.fill(sql)
        await box.press("Control+Enter")
        await expect(error).to_contain_text(said)
        await expect(box).to_have_attribute("aria-invalid", "true")
    await box.fill(SQL)
    await page.get_by_role("button", name="Follow").click()
    await expect(error).to_be_empty()
    await eventually(lambda: values(page, ".bars li"), lambda: without_bonn(growing))
    await page.reload()
    await stage.commit()
    await eventually(lambda: values(page, ".bars li"), lambda: without_bonn(growing))
    await expect(box).to_have_value(SQL)
    await box.fill("SELECT city, n FROM by_city WHERE n > 40 AND city = 'Berlin' -- FROM elsewhere")
    await box.press("Control+Enter")
    busy = sum(1 for (_, city), n in growing.by_city.items() if city == "Berlin" and n > 40)
    await eventually(lambda: page.locator("tbody tr").count(), lambda: busy)
    await box.fill("SELECT sum(n) AS events, count(*) AS rows FROM by_city")
    await box.press("Control+Enter")
    figures = {"events": growing.events + LATE, "rows": len(growing.by_city) + 1}
    await eventually(lambda: values(page, ".figures div"), lambda: figures)
    await page.close()


async def test_sql_joins_single_events_with_a_reference(stage: Stage, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    bronze = Bronze(root)
    bronze.append(1, town="Bonn")
    bronze.append(2)
    port = free_port()
    async with serving(root, str(tmp_path)) as url, Link(port, int(url.rpartition(":")[2])) as network:
        page = await stage.context.new_page()
        page.set_default_timeout(1_000 * PATIENCE_S)
        await page.goto(f"http://127.0.0.1:{port}/")

        async def shown() -> set[tuple[str, ...]]:
            rows = [text.split("\t") for text in await page.locator("#view tbody tr").all_inner_texts()]
            return {tuple(row) for row in rows}

        await page.locator("#statement").fill("SELECT ride_id FROM rides r JOIN towns t ON r.city = t.state")
        await page.get_by_role("button", name="Follow").click()
        await expect(page.get_by_role("alert")).to_contain_text("not joined as it is declared")
        await page.locator("#statement").fill(
            "SELECT r.ride_id, t.state FROM rides r JOIN towns t ON r.city = t.name WHERE r.amount < 50"
        )
        await page.get_by_role("button", name="Follow").click()
        await eventually(shown, lambda: {("1", "default", "1", "NRW")})
        bronze.append(3, 9, town="Bonn")
        network.up = False
        network.cut()
        bronze.append(4, town="Bonn")
        bronze.append(5)
        network.up = True
        await eventually(shown, lambda: {(str(ride), "default", str(ride), "NRW") for ride in (1, 3, 4)})
        await page.close()


async def test_sql_is_registered_as_a_continuous_query(stage: Stage) -> None:
    page = await stage.page()
    await page.locator("#statement").fill("SELECT city, sum(yes) AS yes FROM by_city GROUP BY city")
    await page.get_by_role("button", name="Keep as a table").click()
    await expect(page.get_by_label("Name", exact=True)).to_be_focused()
    await page.get_by_label("Name", exact=True).fill("by_city")
    await page.get_by_role("button", name="Register").click()
    await expect(page.locator("#sql-error")).to_contain_text("taken")
    await page.get_by_label("Name", exact=True).fill("yes_by_city")
    await page.get_by_label("Key", exact=True).fill("city")
    await page.get_by_role("button", name="Register").click()
    await expect(page.locator("#query-note")).to_have_text("yes_by_city is registered and waits for the driver.")
    body = await asyncio.to_thread(stage.server.get, "/v1/queries")
    [query] = json.loads(body)["queries"]
    assert (query["name"], query["key"], query["source"]) == ("yes_by_city", ["city"], "by_city")
    await page.close()


async def test_filter_way_and_theme_survive_a_reload(stage: Stage) -> None:
    page = await stage.page("#table=by_city")
    await page.get_by_label("Rows where").fill("city = 'Oslo'")
    await page.get_by_role("button", name="Apply").click()
    await page.get_by_label("Show as").select_option("lines")
    await page.get_by_label("Measure").select_option("n")
    await page.get_by_role("button", name="Switch to the dark theme").click()
    newest = max(start for start, _ in stage.growing.by_city)
    for _ in range(2):
        await eventually(
            lambda: values(page, ".legend [data-name]"), lambda: {"Oslo": stage.growing.by_city[newest, "Oslo"]}
        )
        assert await page.locator("html").get_attribute("data-theme") == "dark"
        await expect(page.get_by_label("Rows where")).to_have_value("city = 'Oslo'")
        await page.reload()
    await page.get_by_label("Rows where").fill("city =")
    await page.get_by_role("button", name="Apply").click()
    await expect(page.locator(".notice.bad")).to_contain_text("not SQL")
    await page.close()


async def test_slow_tab_is_conflated_and_says_so(stage: Stage) -> None:
    page = await stage.page("#table=answers", await stage.browser.new_context())
    await expect(page.locator("html")).to_have_attribute("data-state", "live")
    await stage.commit()
    await eventually(lambda: values(page, ".bars li"), lambda: dict(stage.growing.answers))
    stage.network.delay_s = 2.5  # so the server's pings are answered late
    await asyncio.sleep(2)
    await stage.commit(8)
    stage.network.delay_s = 0
    await eventually(lambda: values(page, ".bars li"), lambda: dict(stage.growing.answers))
    await expect(page.locator(".counts")).to_contain_text("was too slow")
    facts = await view_facts(page)
    assert int(facts["applied"]) < 9, "changes were merged"
    assert facts["events"] == str(9 * EVENTS), "and none was lost"
    metrics = (await asyncio.to_thread(stage.server.get, "/metrics")).decode()
    assert "millrace_serve_conflated_total 0.0" not in metrics
    assert "millrace_serve_slow_total 0.0" not in metrics
    await page.close()


async def test_everything_has_a_name_and_is_reached_by_keyboard(stage: Stage) -> None:
    page = await stage.page("#table=visits", await stage.browser.new_context())
    await expect(page.locator("tbody tr")).to_have_count(40)
    session = await page.context.new_cdp_session(page)
    nodes = (await session.send("Accessibility.getFullAXTree"))["nodes"]
    told = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    acting = {"button", "link", "textbox", "combobox", "searchbox", "checkbox"}
    assert not [role for role, name in told if role in acting and not name]
    roles = {role for role, _ in told}
    assert {
        "banner",
        "main",
        "navigation",
        "contentinfo",
        "heading",
        "table",
        "columnheader",
        "alert",
        "status",
    } <= roles
    await page.locator("body").press("Tab")
    await expect(page.locator(".skip")).to_be_focused()
    reached: list[str] = []
    for _ in range(16):
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate(FOCUSED))
    wanted = [
        "Millrace",
        "Switch to the dark theme",
        "statement",
        "Follow",
        "Keep as a table…",
        "← Tables",
        "where",
        "Apply",
    ]
    assert [each for each in reached if each in wanted] == wanted
    head = page.get_by_role("button", name="rsvps")
    await head.focus()
    await head.press("Enter")
    await expect(page.locator("th[aria-sort=descending]")).to_have_text("rsvps")
    await stage.commit()
    await expect(page.locator("tbody tr:first-child td").last).to_have_text(str(39 + stage.growing.commits))
    await expect(page.get_by_role("button", name="rsvps")).to_be_focused()  # a change takes the focus from nobody
    await page.close()


async def test_nothing_runs_over_the_edge(stage: Stage) -> None:
    context = await stage.browser.new_context()
    addresses = ["", "#table=by_city", "#table=top_topics", "#table=visits", "#sql=SELECT city, n FROM by_city"]
    pages = [await stage.page(address, context) for address in addresses]
    for page in pages:
        await expect(page.locator("html")).to_have_attribute("data-state", "live")
        for width in (390, 1024, 1920):
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width, (page.url, width)
    await context.close()


async def test_nothing_came_from_elsewhere_and_nothing_was_complained_of(stage: Stage) -> None:
    assert stage.asked
    assert {url for url in stage.asked if not url.startswith((stage.url, "data:"))} == set()
    assert stage.complaints == []
