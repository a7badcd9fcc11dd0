"""``kafka``, ``doctor``, ``check`` and ``prepare``: the broker, its topics, and what this machine has."""

from __future__ import annotations

import dataclasses
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.markup import escape

from jobs.console import (
    JsonOption,
    PipelineArgument,
    chosen_pipeline,
    chosen_settings,
    err,
    out,
    print_json,
    print_problems,
    print_table,
)
from lakehouse.contract.errors import ConfigError


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


def _show_broker(broker: Any, as_json: bool) -> None:
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


def doctor(as_json: JsonOption = False) -> None:
    """Check whether this machine has what Millrace needs, and name a remedy for what is missing."""
    from jobs.local.machine import checks

    found = checks(chosen_settings)
    if as_json:
        print_json([dataclasses.asdict(check) for check in found])
    else:
        rows = [("[green]ok[/]" if one.ok else "[red]no[/]", one.name, one.detail, one.remedy) for one in found]
        print_table(("", "checked", "found", "remedy"), rows)
    raise typer.Exit(0 if all(check.ok or check.optional for check in found) else 1)


def check(
    pipeline: PipelineArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong before anything starts: files, types, SQL, ports, Java, lake, Kafka. Exit status 1: some is.

    It starts nothing, needs no Java, and changes nothing. up, demo and run begin with it.
    """
    from jobs.local.machine import before_start

    try:
        settings = chosen_settings()
        found = before_start(dataclasses.replace(settings, pipeline=pipeline or settings.pipeline))
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
