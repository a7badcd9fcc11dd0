"""Panes and the windows made of them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP, spread
from lakehouse.operators.registry import operator_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 60), st.lists(st.integers(-200, 200), min_size=1, max_size=10, unique=True))
def test_a_pane_lies_whole_in_each_of_its_windows(window: int, slide: int, numbers: list[int]) -> None:
    window, slide = max(window, slide), min(window, slide)
    pane = math.gcd(window, slide)
    starts = [EPOCH + timedelta(seconds=number * pane) for number in numbers]
    panes = pa.table({"window_start": pa.array(starts, TIMESTAMP), "n": numbers})
    rows = spread(panes, window * 1_000, slide * 1_000).to_pylist()
    found = sorted((row["n"], (row["window_start"] - EPOCH) // timedelta(seconds=1)) for row in rows)
    wanted = [
        (number, start)
        for number in numbers
        for start in range(-400 * slide, 400 * slide, slide)
        if start <= number * pane and (number + 1) * pane <= start + window
    ]
    # Windows beyond those that were looked through:
    assert [pair for pair in found if abs(pair[1]) < 400 * slide] == sorted(wanted)
    assert all(start <= number * pane < start + window and start % slide == 0 for number, start in found)
    assert {row["window_end"] - row["window_start"] for row in rows} == {timedelta(seconds=window)}


def sql_of(text: str) -> str:
    return operator_of(Product("gold", "r", text, name="p")).partial_sql()


SLIDING = "SELECT window.start AS window_start, count(*) AS n FROM r GROUP BY window(t, '30 minutes', '5 seconds')"


@pytest.mark.parametrize(
    "text",
    [
        SLIDING,
        SLIDING.replace("window(t", "WINDOW (coalesce(t, u)"),
        SLIDING.replace("AS n", "AS n, window.end AS window_end"),
        SLIDING.replace("'5 seconds'", '"5 seconds"'),
    ],
)
def test_sql_over_sliding_windows_is_asked_for_panes(text: str) -> None:
    assert ", '5000 milliseconds')" in sql_of(text)


@pytest.mark.parametrize(
    "text",
    [
        SLIDING.replace(", '5 seconds'", ""),
        SLIDING.replace("'5 seconds'", "'30 minutes'"),
        SLIDING.replace("'5 seconds'", "'1 month'"),
        SLIDING.replace("'5 seconds'", "'5 seconds', '2 seconds'"),  # begins two seconds later
        SLIDING.replace("'5 seconds'", "INTERVAL 5 SECONDS"),
        SLIDING.replace("window.start AS window_start", "window.start AS since"),
        SLIDING.replace("window.start AS window_start", "window.end AS window_end"),
        SLIDING.replace("AS n", "AS n, max(window.end) AS last"),
    ],
)
def test_other_sql_is_left_to_spark(text: str) -> None:
    assert sql_of(text) == text


def test_events_of_sliding_windows_are_not_told_by_adding_up() -> None:
    assert operator_of(Product("gold", "r", SLIDING, name="p")).counts is None
    assert operator_of(Product("gold", "r", SLIDING.replace(", '5 seconds'", ""), name="p")).counts == "n"
    late = Product("gold", "r", SLIDING.replace(", '5 seconds'", ""), lateness="1 hour", name="p")
    assert operator_of(late).counts is None
    assert operator_of(late).partial_sql().startswith("WITH `r` AS (SELECT * FROM `r` WHERE ")
    assert "<= 3600000)" in operator_of(late).partial_sql()
