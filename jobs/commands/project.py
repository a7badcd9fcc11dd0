"""``init``, ``test``, ``check``, ``prepare`` and ``kafka``: a pipeline before it runs, and the machine it runs on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jobs.console import (
    JsonOption,
    chosen_pipeline,
    chosen_settings,
    err,
    named_pipeline,
    out,
    print_json,
    print_problems,
    print_table,
    spark_session,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import NAME_PATTERN
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.pipeline.source import column_of

if TYPE_CHECKING:
    from ingest.broker import EmbeddedBroker
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
    pipeline: Annotated[
        str | None, typer.Argument(help="Folder below conf/pipelines, or a path; default: that of the settings.")
    ] = None,
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

    fixtures, found = read_fixtures(loaded), []
    with spark_session(settings, f"millrace test {loaded.name}") as (spark, status):
        for fixture in fixtures:
            status.update(f"{fixture.folder.name} …")
            for result in run_fixture(spark, loaded, fixture):
                found.append(result)
                if not as_json:
                    _show_result(result)
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


def check(
    pipeline: Annotated[
        str | None, typer.Argument(help="Folder below conf/pipelines, or a path; default: the machine and all of them.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong before anything starts: Java, packages, jars, ports, lake, Kafka; files, types and SQL.

    With PIPELINE it names each problem that keeps this pipeline from running, with its file and line; up, demo and run
    begin with that. Without, it shows what this machine has, and a remedy for what is missing. It starts and changes
    nothing. Exit status 1: something is wrong.
    """
    pipeline = pipeline or named_pipeline()
    if pipeline is None:
        _check_machine(as_json)
        return
    from jobs.local.machine import before_start

    try:
        found = before_start(dataclasses.replace(chosen_settings(), pipeline=pipeline))
    except ConfigError as error:
        found = [error]
    if as_json:
        names = ("file", "line", "key", "problem", "remedy")
        rows = [{name: getattr(problem, name, None) for name in names} for problem in found]
        print_json([{**row, "file": str(row["file"]) if row["file"] else None} for row in rows])
    else:
        print_problems(found)
        if not found:
            err.print("nothing is wrong", highlight=False)
    raise typer.Exit(1 if found else 0)


def _check_machine(as_json: bool) -> None:
    from jobs.local.machine import checks

    found = checks(chosen_settings)
    if as_json:
        print_json([dataclasses.asdict(check) for check in found])
    else:
        rows = [("[green]ok[/]" if one.ok else "[red]no[/]", one.name, one.detail, one.remedy) for one in found]
        print_table(("", "checked", "found", "remedy"), rows)
    raise typer.Exit(0 if all(check.ok or check.optional for check in found) else 1)


def prepare(
    jars: Annotated[
        bool,
        typer.Option("--jars", help="Only fetch the Spark jars and print them as spark-submit's --jars takes them."),
    ] = False,
) -> None:
    """Fetch the jars and prepare Java's classes, once on a machine; Java then starts in half the time."""
    if jars:
        from lakehouse.contract.jvm import jar_paths

        sys.stdout.write(",".join(str(path) for path in jar_paths("spark")) + "\n")
        return
    from jobs.local.machine import prepare as do_all

    do_all(err.print)


class KafkaAction(StrEnum):
    """What ``millrace kafka`` does."""

    START = "start"
    STOP = "stop"
    STATUS = "status"
    TOPICS = "topics"
    APPLY = "apply"


def kafka(
    action: Annotated[
        KafkaAction,
        typer.Argument(
            help="start, stop or status of the embedded broker; topics to check topics; apply to make them."
        ),
    ],
    port: Annotated[
        int,
        typer.Option(help="Of start: port of the broker; 0: the one it had, at first any free one.", min=0, max=65_535),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the lake's embedded broker, or check and make the pipeline's topics on any broker.

    Exit status of status: 3 the broker does not run. Of topics and apply: 1 events would be lost or never taken.
    """
    from jobs.local.broker import apply_topics, embedded

    if action in (KafkaAction.TOPICS, KafkaAction.APPLY):
        _topics(action is KafkaAction.APPLY, as_json)
        return
    settings = chosen_settings()
    broker = embedded(settings, port=port)
    if action is KafkaAction.START and not broker.running():
        _, pipeline = chosen_pipeline()
        with err.status("Starting the broker …"):
            broker.start()
            if settings.kafka.secure:
                apply_topics(settings, pipeline)
    if action is KafkaAction.STOP:
        broker.stop()
    _show_broker(broker, as_json)
    if action is KafkaAction.STATUS and not broker.running():
        raise typer.Exit(3)


def _show_broker(broker: EmbeddedBroker, as_json: bool) -> None:
    running = broker.running()
    state = {"running": running, "bootstrap": broker.bootstrap if running else None, "pid": broker.pid}
    if as_json:
        print_json({**state, "folder": str(broker.folder)})
    elif running:
        out.print(f"running at {state['bootstrap']} (process {state['pid']}), folder {broker.folder}")
    else:
        out.print("not running")


def _topics(apply: bool, as_json: bool) -> None:
    from ingest.kafka import ALARM, check_topics
    from jobs.local.broker import apply_topics, resolve_kafka

    settings, pipeline = chosen_pipeline()
    if apply:
        remarks = apply_topics(settings, pipeline)
    else:
        found = resolve_kafka(settings, "lakehouse").kafka
        remarks = check_topics(found.bootstrap, list(pipeline.sources.values()), found.security)
    if as_json:
        print_json([dataclasses.asdict(remark) for remark in remarks])
    else:
        for remark in remarks:
            out.print(f"[{'red' if remark.severity == ALARM else 'yellow'}]{remark.severity}[/] {escape(str(remark))}")
        if not remarks:
            out.print("all topics are as declared")
    raise typer.Exit(1 if any(remark.severity == ALARM for remark in remarks) else 0)
