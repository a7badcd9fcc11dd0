"""``millrace sketch``: ask the sketches of a table, of one window or of many merged. No Spark."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

if TYPE_CHECKING:
    from lakehouse.sketches.kinds import Answer, Question
    from lakehouse.sketches.tables import SketchTable, Span

app = typer.Typer(help="Ask the sketches of a table, without Spark.", no_args_is_help=True)

TableArgument = Annotated[str, typer.Argument(help="A table whose rows carry sketches.")]
ByOption = Annotated[list[str] | None, typer.Option("--by", help="Only the group COLUMN=VALUE; may be repeated.")]
ItemOption = Annotated[str | None, typer.Option(help="How often this item occurs, or whether.")]
QuantileOption = Annotated[list[float] | None, typer.Option(help="The value at this rank, 0 to 1; may be repeated.")]
RankOption = Annotated[float | None, typer.Option(help="The share of values that are no greater.")]
RangeOption = Annotated[str | None, typer.Option(help="How many integers lie in LOW:HIGH, both included.")]
NumberOption = Annotated[int, typer.Option("-n", help="So many of the most frequent items.", min=1)]


@app.command()
def estimate(
    table: TableArgument,
    window: Annotated[str | None, typer.Option(help="Start of the window; without one, the newest.")] = None,
    by: ByOption = None,
    item: ItemOption = None,
    quantile: QuantileOption = None,
    rank: RankOption = None,
    range: RangeOption = None,
    n: NumberOption = 10,
    inner: Annotated[str | None, typer.Option(help="Inner product with this window, of frequency.")] = None,
    confirm: Annotated[bool, typer.Option("--confirm", help='Look a "maybe" of membership up in a table.')] = False,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what the sketches of one window say, with bounds; its groups are merged."""
    from lakehouse.sketches.kinds import inner_product
    from lakehouse.sketches.tables import SketchTable

    question = _question(item, quantile, rank, range, n)
    found = SketchTable(Lake(load_settings(lake=lake).lake).find(table))
    groups = _groups(by)
    start = _time(window, "window") if window else found.newest()
    span = found.span(start, start + timedelta(microseconds=1), groups)
    if inner:
        other_start = _time(inner, "inner")
        other = found.span(other_start, other_start + timedelta(microseconds=1), groups)
        answers = [inner_product(span.sketch, other.sketch)]
    else:
        answers = span.sketch.answers(question)
    if confirm:
        answers = _confirmed(answers, found, span, groups, lake, pipeline)
    _say(table, found.operator, span, answers, as_json)


@app.command()
def merge(
    table: TableArgument,
    since: Annotated[str | None, typer.Option("--from", help="Windows that start at this time or later.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Windows that start before this time.")] = None,
    by: ByOption = None,
    item: ItemOption = None,
    quantile: QuantileOption = None,
    rank: RankOption = None,
    range: RangeOption = None,
    n: NumberOption = 10,
    confirm: Annotated[bool, typer.Option("--confirm", help='Look a "maybe" of membership up in a table.')] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write the merged sketch here, in DataSketches' binary form.", dir_okay=False)
    ] = None,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Merge the sketches of several windows and print what they say together, with bounds."""
    from lakehouse.sketches.tables import SketchTable

    question = _question(item, quantile, rank, range, n)
    found = SketchTable(Lake(load_settings(lake=lake).lake).find(table))
    groups = _groups(by)
    span = found.span(_time(since, "from") if since else None, _time(until, "to") if until else None, groups)
    answers = span.sketch.answers(question)
    if confirm:
        answers = _confirmed(answers, found, span, groups, lake, pipeline)
    if output is not None:
        output.write_bytes(span.sketch.serialize()["sketch"])
    _say(table, found.operator, span, answers, as_json)


def _question(
    item: str | None, quantiles: list[float] | None, rank: float | None, between: str | None, n: int
) -> Question:
    from lakehouse.sketches.kinds import Question

    low = high = None
    if between is not None:
        first, _, last = between.partition(":")
        try:
            low, high = int(first), int(last)
        except ValueError:
            raise ConfigError(f"{between!r} is no range", key="--range", remedy="Write LOW:HIGH, e.g. 10:19") from None
    if not all(0 <= found <= 1 for found in quantiles or ()):
        raise ConfigError("a rank lies from 0 to 1", key="--quantile", remedy="The median is 0.5")
    return Question(item, low, high, tuple(quantiles or ()), rank, n)


def _groups(given: list[str] | None) -> dict[str, str]:
    groups = {}
    for pair in given or []:
        column, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} names no group", key="--by", remedy="Write COLUMN=VALUE, e.g. city=Ulm")
        groups[column] = value
    return groups


def _time(text: str, option: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no time",
            key=f"--{option}",
            remedy="Write e.g. 2026-01-01T12:00:00Z; UTC where no zone is said",
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _confirmed(
    answers: list[Answer],
    table: SketchTable,
    span: Span,
    groups: Mapping[str, str],
    lake: Path | None,
    pipeline: str | None,
) -> list[Answer]:
    """The answers, a "maybe" among them looked up: in the table that the product names, else in bronze."""
    from lakehouse.sketches.kinds import MAYBE, NO, YES, Answer
    from lakehouse.sketches.tables import is_held

    if table.operator != "membership":
        raise ConfigError("only membership answers maybe", key="--confirm", remedy="Leave it out")
    settings = load_settings(lake=lake, pipeline=pipeline)
    found = []
    for answer in answers:
        if answer.estimate == MAYBE:
            place = table.parameters.get("confirm", "")
            if place:
                held = is_held(Lake(settings.lake), place, answer.what, span, groups)
            else:
                held = _in_bronze(settings, table.ref.name, answer.what, span, groups)
            answer = Answer(answer.what, YES if held else NO)
        found.append(answer)
    return found


def _in_bronze(settings: Any, table: str, item: str, span: Span, groups: Mapping[str, str]) -> bool:
    from lakehouse.confirm import is_in_bronze
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.session import build_session

    pipeline = load_pipeline(settings.pipeline_folder())
    if table not in pipeline.products:
        raise ConfigError(f"the pipeline has no product {table!r}", key="--pipeline", remedy="Name the one that has it")
    with err.status("looking it up in bronze …"):
        spark = build_session(settings, "millrace-confirm")
        try:
            lake, product = Lake(settings.lake), pipeline.products[table]
            return is_in_bronze(spark, lake, pipeline, product, item, span.start, span.end, groups)
        finally:
            spark.stop()


def _say(table: str, operator: str, span: Span, answers: list[Answer], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "table": table,
                "operator": operator,
                "from": span.start.isoformat(),
                "to": span.end.isoformat(),
                "windows": span.windows,
                "sketches": span.rows,
                "answers": [{key: _plain(value) for key, value in dataclasses.asdict(a).items()} for a in answers],
            }
        )
        return
    shown = Table("", "estimate", "lower", "upper", "confidence")
    for answer in answers:
        numbers = [_shown(value) for value in (answer.estimate, answer.lower, answer.upper)]
        shown.add_row(answer.what, *numbers, f"{answer.confidence:.1%}")
    out.print(shown)
    err.print(f"{span.windows} windows, {span.start.isoformat()} to {span.end.isoformat()}", style="dim")


def _plain(value: object) -> object:
    """JSON has no infinity, which a full filter estimates."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.6g}" if value % 1 else f"{value:,.0f}"
