"""The pages of a server that wants a key: a form, a ticket for each connection, and nothing left behind."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from lakehouse.contract.access import KeyFile
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from tests.system.test_meetup_page import Server, Tables, shown_top, watching
from tests.system.test_meetup_page import server as server
from tests.system.test_meetup_page import tables as tables

pytestmark = pytest.mark.browser


ROWS_KEPT = """
async () => {
  const opened = (name) => new Promise((done) => {
    const request = indexedDB.open(name);
    request.onsuccess = () => done(request.result);
  });
  let count = 0;
  for (const { name } of await indexedDB.databases()) {
    const database = await opened(name);
    const rows = database.transaction("rows").objectStore("rows").count();
    count += await new Promise((done) => (rows.onsuccess = () => done(rows.result)));
    database.close();
  }
  return count;
}
"""


async def test_a_key_is_entered_kept_for_the_tab_and_revoked(tables: Tables, server: Server) -> None:
    keys = KeyFile(Lake(tables.root).state / "readers.toml", ReaderKey)
    key = keys.new(ReaderKey("0" * 64, "wall"))
    tables.commit()
    server.start()
    async with watching() as watched:
        page = await watched.page(server.meetup)
        await expect(page.locator("html")).to_have_attribute("data-state", "locked")
        await expect(page.locator("#top li[data-rank]")).to_have_count(0)
        await page.fill("#key", "mr_wrong")
        await page.press("#key", "Enter")
        await expect(page.locator("#unlock-note")).to_contain_text("does not know this key")
        await page.fill("#key", key)
        await page.press("#key", "Enter")
        state = page.locator("html")  # a locator goes over the reload that follows
        await expect(state).to_have_attribute("data-state", "live")
        await expect(page.locator("#unlock")).to_be_hidden()
        tables.commit()
        await expect(state).to_have_attribute("data-applied", "2")  # a change of both tables
        assert await shown_top(page) == tables.stored_top()
        await page.reload()
        await expect(state).to_have_attribute("data-state", "live")  # it needs no key again
        assert await page.evaluate(ROWS_KEPT) == 0, "rows behind a key are not left in the browser"
        await page.goto(server.url)  # the tab's key is good for the dashboard too
        await expect(page.locator("tr[data-table=top_topics]")).to_have_attribute("data-rows", "10")
        await page.goto(f"{server.url}/#table=top_topics")
        await expect(page.locator(".ranked li[data-rank]")).to_have_count(10)
        assert await page.evaluate("localStorage.getItem('millrace.tables')") is None
        await page.goto(server.meetup)
        await expect(state).to_have_attribute("data-state", "live")
        other = await watched.page(server.url)
        await expect(other.locator("html")).to_have_attribute("data-state", "locked")  # another tab has no key
        assert not [url for url in watched.requests if key in url], "a key is in no address"
        keys.new(ReaderKey("0" * 64, "another"))  # else there would be none, and everybody may come in
        keys.revoke(key.split("_")[1])
        await expect(state).to_have_attribute("data-state", "locked")  # a revoked key opens it no more
        await expect(page.locator("#unlock")).to_be_visible()
        assert await page.evaluate("sessionStorage.length") <= 1  # the lines of the charts
        assert not [text for text in watched.complaints if "401" not in text], watched.complaints
