"""A real Chromium for tests: found on the machine, started headless with a profile of its own."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from playwright.async_api import Browser, Error, async_playwright
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
REMEDY = "no Chromium is installed: apt-get install chromium"

# It draws what we serve and asks nobody else for anything.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@cache
def find_browser() -> Path | None:
    """The browser to use: on PATH, else the one that Playwright installed; None if there is neither."""
    for name in NAMES:
        if found := shutil.which(name):
            return Path(found)
    try:
        with sync_playwright() as playwright:
            own = Path(playwright.chromium.executable_path)
    except Error:
        return None
    return own if own.is_file() else None


def require_browser() -> Path:
    """The browser to use; skips the test, with the line that would enable it, where there is none."""
    found = find_browser()
    if found is None:
        pytest.skip(REMEDY)
    return found


@asynccontextmanager
async def launched(path: Path) -> AsyncIterator[Browser]:
    """A headless browser with a fresh profile; closed, with its processes, at the end."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), timeout=120_000)
        try:
            yield browser
        finally:
            await browser.close()
