"""``init`` and ``test``: a pipeline made from a sample of events, and its fixtures run through Spark."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jobs.console import (
    JsonOption,
    PipelineArgument,
    chosen_settings,
    err,
    out,
    print_json,
    print_problems,
    print_table,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import NAME_PATTERN
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.source import column_of

if TYPE_CHECKING:
    from jobs.local.fixtures import FixtureResult
    from jobs.local.guess import Sample
    from jobs.local.scaffold import Choices, Scaffold

_ASKED = {"event_id": "event id", "key": "key", "event_time": "event time"}
_NONE = "none"


def init(
    name: Annotated[str, typer.Argument(help="Name of the pipeline and its source, or a path that ends with it.")],
    sample: Annotated[
        Path, typer.Option("--from", help="Sample of the events: JSON lines or CSV, with gzip or without.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Take every guess and ask nothing.")] = False,
) -> None:
    """Make a pipeline's folder from a sample: schema, event id, key and time are guessed, and the guesses shown.

    The folder has one window, one top-n, one distinct count and a fixture for millrace test.
    """
    from jobs.local.check import pipeline_problems
    from jobs.local.guess import Sample
    from jobs.local.scaffold import Choices, Scaffold

    folder = Path(name)
    if not NAME_PATTERN.fullmatch(folder.name):
        raise ConfigError(f"{folder.name!r} is not a name", key="NAME", remedy="Use [a-z][a-z0-9_]*")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already", key="NAME", remedy="Choose another name, or remove it")
    if not yes and not sys.stdin.isatty():
        raise ConfigError("there is nobody to ask", key="init", remedy="Add --yes to take every guess")
    seen = Sample.of(sample)
    time = seen.event_time()
    parts, share = seen.event_id(time)
    key = seen.key(parts)
    _show_fields(seen)
    guess = Choices(
        event_id=":".join(f"{{{leaf.dotted}}}" for leaf in parts),
        key=f"{{{key.dotted}}}" if key else "",
        event_time=time.sql if time else "received_at",
    )
    sure = Choices(
        event_id=f"{share:.1%} of events have one of their own",
        key=f"{key.filled:.1%} of events have it" if key else "",
        event_time=f"{time.share:.1%} of events have it" if time else "",
    )
    guesses = [
        (what, escape(getattr(guess, option)) or _NONE, getattr(sure, option) or "no field looks like one")
        for option, what in _ASKED.items()
    ]
    print_table(("guess", "value", "how sure"), guesses, to=err)

    def made_of(choices: Choices) -> Scaffold:
        return Scaffold(folder.name, seen, time, choices)

    for file in made_of(guess if yes else _asked(guess, made_of)).write(folder):
        err.print(f"wrote {file}", highlight=False)
    problems = pipeline_problems(load_pipeline(folder))
    print_problems(problems)
    err.print(f"next: millrace check {name}, millrace test {name}, millrace up --pipeline {name}", highlight=False)
    raise typer.Exit(1 if problems else 0)


def _asked(choices: Choices, made_of: Callable[[Choices], Scaffold]) -> Choices:
    """What the user makes of the guesses; an answer that the pipeline cannot have is asked for again."""
    err.print("Enter takes what is in brackets", highlight=False)
    for option, what in _ASKED.items():
        while True:
            answer = typer.prompt(what, getattr(choices, option) or _NONE, err=True).strip()
            tried = dataclasses.replace(choices, **{option: "" if answer == _NONE else answer})
            if not (problems := _problems_of(made_of(tried))):
                break
            for one in [one for one in problems if one.key.endswith(f".{option}")] or problems:
                err.print(f"[red]no:[/] {escape(one.problem)}. {escape(one.remedy)}", highlight=False)
        choices = tried
    return choices


def _problems_of(scaffold: Scaffold) -> list[ConfigError]:
    from jobs.local.check import pipeline_problems

    with TemporaryDirectory(prefix="millrace-init-") as draft:
        try:
            scaffold.write(Path(draft) / scaffold.name)
            return pipeline_problems(load_pipeline(Path(draft) / scaffold.name))
        except ConfigError as error:
            return [error]


def _show_fields(seen: Sample) -> None:
    rows: list[tuple[str, ...]] = []
    for name, shape in seen.fields:
        leaves = [leaf for leaf in seen.leaves if leaf.path[0] == name]
        for leaf in leaves:
            rows.append((escape(leaf.dotted), leaf.told, f"{leaf.filled:.1%}", f"{leaf.shape.share:.1%}"))
        if not leaves:
            filled = (sum(shape.kinds.values()) - shape.kinds["null"]) / len(seen.rows)
            rows.append((escape(name), escape(shape.ddl), f"{filled:.1%}", f"{shape.share:.1%}"))
    err.print(f"{len(seen.rows):,} events", highlight=False)
    shares = ("in events", "of this type")
    print_table(("field", "type", *shares), rows, right=shares, to=err)
    for name, _ in seen.fields:
        if column_of(name) != name:
            err.print(f"field {name} is {column_of(name)} in SQL", highlight=False, style="yellow")


def test(
    pipeline: PipelineArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Run the fixtures beside a pipeline through Spark and compare its products' rows. Exit status 1: one differs.

    A fixture is tests/NAME/input.jsonl, and tests/NAME/PRODUCT.jsonl with the rows and columns that are expected.
    """
    from jobs.local.check import pipeline_problems

    settings = chosen_settings()
    settings = dataclasses.replace(settings, pipeline=pipeline or settings.pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    if problems := pipeline_problems(loaded):
        print_problems(problems)
        raise typer.Exit(1)
    from jobs.local.fixtures import read_fixtures, run_fixture
    from lakehouse.session import build_session

    fixtures = read_fixtures(loaded)
    with err.status("starting Spark …") as status:
        spark = build_session(settings, f"millrace test {loaded.name}")
        try:
            found = []
            for fixture in fixtures:
                status.update(f"{fixture.folder.name} …")
                for result in run_fixture(spark, loaded, fixture):
                    found.append(result)
                    if not as_json:
                        _show_result(result)
        finally:
            spark.stop()
    if as_json:
        print_json([dataclasses.asdict(result) for result in found])
    raise typer.Exit(1 if any(result.differences for result in found) else 0)


def _show_result(result: FixtureResult) -> None:
    name = f"{result.fixture}/{result.table}"
    if not result.differences:
        out.print(f"[green]ok[/] {name}: {result.rows} rows", highlight=False)
        return
    out.print(f"[red]NO[/] {name}: {result.rows} rows", highlight=False)
    for one in result.differences:
        row = _cells(one.row)
        if one.problem == "different":
            cells = ", ".join(f"{column}: {was!r}, expected {wanted!r}" for column, (wanted, was) in one.cells.items())
            out.print(f"  [yellow]different[/] {escape(row)}", highlight=False, soft_wrap=True)
            out.print(f"    {escape(cells)}", highlight=False, soft_wrap=True)
        else:
            colour = "red" if one.problem == "missing" else "magenta"
            out.print(f"  [{colour}]{one.problem}[/] {escape(row)}", highlight=False, soft_wrap=True)


def _cells(row: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in row.items())
