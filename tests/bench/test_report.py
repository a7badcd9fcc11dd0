"""The page of figures says what the newest runs say, and a ratio that got worse is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.report import BEGIN, END, FIGURES, PAGE, PARTS, page, plot, table, worse


def test_the_page_is_written_from_the_newest_runs() -> None:
    history = json.loads(FIGURES.read_text(encoding="utf-8"))
    assert history.keys() <= PARTS.keys()
    said = PAGE.read_text(encoding="utf-8")
    assert said == page(said, history), "run make report, or undo the change"
    assert all(name in history or part.what not in said for name, part in PARTS.items())


def test_the_newest_run_is_said() -> None:
    runs = [
        {"at": "2026-01-01", "values": {"p50_ms": 1, "p99_ms": 2}},
        {"at": "2026-02-02", "values": {"p50_ms": 3, "p99_ms": 4}},
    ]
    said = page(f"before\n{BEGIN}what it said\n{END}after\n", {"lookup": runs})
    assert said.startswith("before\n") and said.endswith("after\n")
    assert "| p50 3 ms, p99 4 ms | 2026-02-02 |" in said and "2026-01-01" not in said and "what it said" not in said
    assert table({}).count("\n") == 2


@pytest.mark.parametrize(
    ("part", "ratio", "before", "now", "bad"),
    [
        ("fanout", "to_floor", 1.0, 1.14, False),
        ("fanout", "to_floor", 1.0, 1.16, True),
        ("fanout", "to_floor", 1.0, 0.5, False),
        ("latency", "plain_to_millrace", 10.0, 8.8, False),
        ("latency", "plain_to_millrace", 10.0, 8.6, True),
        ("latency", "plain_to_millrace", 10.0, 20.0, False),
    ],
)
def test_a_ratio_that_is_worse_by_more_than_15_percent_fails(
    part: str, ratio: str, before: float, now: float, bad: bool
) -> None:
    assert bool(worse(PARTS[part], {ratio: before}, {ratio: now})) is bad
    assert not worse(PARTS[part], {}, {ratio: now})


def test_ratios_and_growth_are_plotted(tmp_path: Path) -> None:
    last = {"batch_ms": {"1000000": 5.0, "10000000": 9.0}, "bytes_an_entry": 40}
    plot("seen", [{"values": PARTS["seen"].take(last)}], last, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"seen-ratios.svg", "seen-growth.svg"}
