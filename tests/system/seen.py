"""What the dashboard shows in a real Chromium while the demo runs.

``python -m tests.system.seen FILE.png`` runs the demo for a minute and makes the README's picture.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.system.browser import ARGUMENTS, find_browser
from tests.system.worked_case import Demo, run, wait_for

TOTALS = "SELECT sum(yes) AS yes, sum(no) AS no, sum(guests) AS guests FROM rsvps_by_city"
PATIENCE_MS = 120_000
INKED = """
([canvas]) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = "var(--s1)";
  const colour = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4) count += colour.every((value, one) => data[at + one] === value);
  return count;
}
"""
BARS = "found => found.map(bar => bar.getBoundingClientRect().right - bar.parentElement.getBoundingClientRect().left)"


@dataclass(frozen=True)
class Seen:
    """What the pages showed at last.

    Attributes:
        totals: sums over ``rsvps_by_city``, by live SQL.
        top: items and counts of ``top_topics``, in order.
        bars: lengths of their bars, in pixels.
        members: the estimate of ``members`` in the newest window.
        inked: pixels of their chart that have the colour of its line.
        integrity: gaps and duplicates of the live SQL.
    """

    totals: dict[str, int]
    top: list[tuple[str, int]]
    bars: list[float]
    members: float
    inked: int
    integrity: tuple[str | None, str | None]


@contextmanager
def dashboard(demo: Demo) -> Iterator[Callable[[Callable[[Seen], None]], Seen | None]]:
    """The dashboard of a demo, open from here on: what it shows once a check passes, or after a minute.

    Gives None where there is no browser.
    """
    path = find_browser()
    if path is None:
        yield lambda _: None
        return
    with chromium(path) as browser:
        context = browser.new_context(reduced_motion="reduce")
        pages = {}
        for name, address in (
            ("totals", f"sql={TOTALS}"),
            ("top", "table=top_topics"),
            ("members", "table=members"),
        ):
            pages[name] = context.new_page()
            pages[name].set_default_timeout(PATIENCE_MS)
            pages[name].goto(f"{demo.address('serve')}/#{address}")
            pages[name].wait_for_selector("#view[data-position]")
        yield lambda check: _settled(lambda: _seen(**pages), check)


@contextmanager
def chromium(path: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS), timeout=PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


def _settled(look: Callable[[], Seen], check: Callable[[Seen], None]) -> Seen:
    deadline = time.monotonic() + 60
    while True:
        seen = look()
        try:
            check(seen)
        except AssertionError:
            if time.monotonic() > deadline:
                return seen
            time.sleep(0.2)
        else:
            return seen


def _seen(totals: Page, top: Page, members: Page) -> Seen:
    rows = "found => found.map(({ dataset }) => [dataset.item, Number(dataset.count)])"
    figures = "found => found.map(({ dataset }) => [dataset.name, Number(dataset.value)])"
    view = totals.locator("#view")
    return Seen(
        totals=dict(totals.locator(".figures div").evaluate_all(figures)),
        top=[(item, count) for item, count in top.locator(".ranked li[data-rank]").evaluate_all(rows)],
        bars=top.locator(".ranked li[data-rank] .bar").evaluate_all(BARS),
        members=float(members.locator(".legend [data-name=members]").get_attribute("data-value") or 0),
        inked=members.locator(".plot canvas").evaluate_all(INKED),
        integrity=(view.get_attribute("data-gaps"), view.get_attribute("data-duplicates")),
    )


def main(picture: Path) -> None:
    """The overview of the demo."""
    path = find_browser()
    assert path is not None, "a picture needs a browser"
    with tempfile.TemporaryDirectory() as folder, chromium(path) as browser:
        lake = Path(folder) / "lake"
        demo = Demo(lake, "--seconds", "150", "--rate", "200")
        wait_for(lambda: demo.rows("members") > 1, "the second window")
        page = browser.new_page(viewport={"width": 1280, "height": 690}, color_scheme="light")
        page.goto(f"{demo.address('serve')}/")
        run(lake, "quality")
        page.wait_for_timeout(30_000)
        page.screenshot(path=picture)
        demo.process.terminate()
        demo.process.communicate(timeout=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
