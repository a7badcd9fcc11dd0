"""Sketches read from tables, and what cannot be asked of them. Right answers are in operators/test_spark.py."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.errors import BadSketch
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.store import ProductStore
from lakehouse.sketches.kinds import Question, inner_product, sketch_of
from lakehouse.sketches.tables import SketchTable, Span, is_held
from tests.lakehouse.operators.partials import OPERATORS, START, Event

STREAM = [Event(n, n, "a" if n % 2 else "b", n % 7) for n in range(240)]  # four minutes


def written(folder: Path, name: str, slide: str = "", pane: int = 60) -> SketchTable:
    """The table of an operator over :data:`STREAM`."""
    make, partial = OPERATORS[name]
    store = ProductStore(make(slide), Lake(folder).table("gold", "p"), "test")
    store.apply(partial(STREAM, pane), BatchMark("q", (0,)))
    return SketchTable(store.table)


def answers(span: Span, **question: Any) -> list[Any]:
    return [answer.estimate for answer in span.sketch.answers(Question(**question))]


def test_windows_and_groups(tmp_path: Path) -> None:
    table = written(tmp_path, "top_n")
    everything = table.span(None, None)
    assert (everything.windows, everything.rows) == (4, 8)
    assert (everything.start, everything.end) == (START, START + timedelta(minutes=4))
    assert answers(everything, item="3") == [sum(event.item == 3 for event in STREAM)]
    some = table.span(START + timedelta(minutes=1), START + timedelta(minutes=3), {"city": "a"})
    wanted = sum(60 <= event.at < 180 and event.city == "a" and event.item == 3 for event in STREAM)
    assert answers(some, item="3") == [wanted]
    assert table.newest() == START + timedelta(minutes=3)
    with pytest.raises(BadSketch, match="no such windows"):
        table.span(START + timedelta(hours=1), None)
    with pytest.raises(BadSketch, match="no groups by 'country'; it has: city"):
        table.span(None, None, {"country": "x"})


@pytest.mark.parametrize("name", ["frequency", "quantiles", "top_n"])
def test_overlapping_windows_are_laid_side_by_side(tmp_path: Path, name: str) -> None:
    table = written(tmp_path, name, slide="20 seconds", pane=20)
    span = table.span(None, None)
    assert span.start == START - timedelta(seconds=40)
    if name == "quantiles":
        assert answers(span, rank=6.0) == [1.0]
        assert answers(span, rank=3.0) == [sum(event.item <= 3 for event in STREAM) / len(STREAM)]
    else:
        assert answers(span, item="3") == [sum(event.item == 3 for event in STREAM)]
    later = table.span(START + timedelta(seconds=50), None)  # the first window from then on starts at 60
    assert later.start == START + timedelta(seconds=60)


def test_windows_that_cannot_be_laid_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(BadSketch, match="side by side"):
        written(tmp_path, "top_n", slide="40 seconds", pane=20).span(None, None)


def test_a_table_without_sketches(tmp_path: Path) -> None:
    with pytest.raises(BadSketch, match="table p holds no sketches"):
        written(tmp_path, "sql")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"operator": "median"}', '{"operator": "distinct"}'])
def test_a_property_of_another_kind(text: str) -> None:
    with pytest.raises(BadSketch):
        sketch_of(text)


def test_a_question_that_a_sketch_does_not_answer() -> None:
    distinct = sketch_of('{"operator": "distinct", "lg_k": 12}')
    with pytest.raises(BadSketch, match="do not answer --item; they answer: no question"):
        distinct.answers(Question(item="x"))
    with pytest.raises(BadSketch, match="only tables of frequency"):
        inner_product(distinct, distinct)
    frequency = sketch_of('{"operator": "frequency", "depth": 4, "width": 16}')
    with pytest.raises(BadSketch, match="do not answer --range; they answer: item"):
        frequency.answers(Question(low=1, high=2))
    with pytest.raises(BadSketch, match="only tables of frequency"):
        inner_product(frequency, distinct)
    ranges = sketch_of('{"operator": "frequency", "depth": 4, "width": 16, "range_bits": 3}')
    with pytest.raises(BadSketch, match="items are integers"):
        ranges.answers(Question(item="x"))
    quantiles = sketch_of('{"operator": "quantiles", "k": 200, "quantiles": [0.5]}')
    with pytest.raises(BadSketch, match="no values"):
        quantiles.answers(Question())


def test_a_maybe_is_looked_up(tmp_path: Path) -> None:
    span = written(tmp_path, "membership").span(None, None)
    make, partial = OPERATORS["sql"]
    counted = ProductStore(make(""), Lake(tmp_path).table("gold", "counted"), "test")
    counted.apply(partial(STREAM[:60], 60), BatchMark("q", (0,)))
    lake = Lake(tmp_path)
    assert is_held(lake, "counted.city", "a", span)
    assert not is_held(lake, "counted.city", "c", span)
    assert not is_held(lake, "counted.city", "a", replace(span, groups={"city": "b"}))
    later = Span(span.sketch, START + timedelta(minutes=2), span.end, 1, 1)
    assert not is_held(lake, "counted.city", "a", later)
    with pytest.raises(BadSketch, match="no column 'town'"):
        is_held(lake, "counted.town", "a", span)


def run(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["state", *arguments, "--lake", str(folder)])


def test_the_command(tmp_path: Path) -> None:
    import datasketches

    written(tmp_path, "distinct")
    shown = run(tmp_path, "p")
    assert shown.exit_code == 0
    assert "distinct items" in shown.output
    found = json.loads(run(tmp_path, "p", "--window", "..", "--json", "--output", str(tmp_path / "hll")).stdout)
    assert (found["operator"], found["windows"], found["sketches"]) == ("distinct", 4, 8)
    assert round(found["answers"][0]["estimate"]) == 7
    assert round(datasketches.hll_sketch.deserialize((tmp_path / "hll").read_bytes()).get_estimate()) == 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--range", "5"), "no range"),
        (("--quantile", "50"), "a rank lies from 0 to 1"),
        (("--key", "city"), "is not COLUMN=VALUE"),
        (("--window", "yesterday.."), "no time"),
        (("--confirm",), "only membership answers maybe"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    written(tmp_path, "distinct")
    result = run(tmp_path, "p", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
