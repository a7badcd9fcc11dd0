"""``millrace log``: what a collecting node's message log holds, and another try for what Kafka refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from jobs.console import JsonOption, KafkaOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

app = typer.Typer(help="The message logs of collecting nodes: what they hold, what failed.", no_args_is_help=True)

NodeOption = Annotated[str, typer.Option("--node", help="Id of the node.")]
_SHOWN = 60  # characters of a payload


@app.command("ls")
def log_ls(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """List every node's log: events under way, failed events with reasons, damage found."""
    from ingest.log.inspection import look, nodes

    folder = _logs(lake)
    found = [look(folder / node) for node in nodes(folder)]
    if as_json:
        print_json([dataclasses.asdict(view) for view in found])
        return
    table = Table("node", "state", "under way", "failed", "bytes", "files")
    for view in found:
        state = "running" if view.running else "closed" if view.clean else "[yellow]not closed properly[/]"
        numbers = (f"{view.transient:,}", f"{view.failed:,}", f"{view.bytes:,}", f"{view.segments:,}")
        table.add_row(escape(view.node), state, *numbers)
    out.print(table)
    for view in found:
        for reason, count in view.reasons.items():
            out.print(f"{view.node}: {count:,} failed: {reason}", markup=False)
        for text in view.damage:
            out.print(f"{view.node}: damage: {text}", markup=False)


@app.command("show")
def log_show(
    lake: LakeOption = None,
    node: NodeOption = "collector-1",
    transient: Annotated[bool, typer.Option("--transient", help="Events under way instead of failed ones.")] = False,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show what a log holds, event by event."""
    shown = [item for _, item in zip(range(limit), _items(lake, node, transient), strict=False)]
    if as_json:
        print_json(shown)
        return
    table = Table("seq", "source", "event id", "reason", "payload")
    for item in shown:
        payload = item.get("payload", item.get("payload_base64", ""))
        values = (item.get("seq", ""), item.get("source", ""), item.get("event_id", ""), item.get("reason", ""))
        table.add_row(*(escape(str(value)) for value in (*values, payload[:_SHOWN])))
    out.print(table)


@app.command("export")
def log_export(
    lake: LakeOption = None,
    node: NodeOption = "collector-1",
    transient: Annotated[bool, typer.Option("--transient", help="Events under way instead of failed ones.")] = False,
    output: Annotated[Path | None, typer.Option(help="File; without one, standard output.")] = None,
) -> None:
    """Write failed events as JSON lines: payload, reason and envelope; bytes that are no text in base64."""
    count = 0
    target = output.open("w", encoding="utf-8") if output is not None else sys.stdout
    try:
        for item in _items(lake, node, transient):
            target.write(json.dumps(item) + "\n")
            count += 1
    finally:
        if output is not None:
            target.close()
    err.print(f"{count:,} exported", style="dim")


@app.command("retry")
def log_retry(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    node: NodeOption = "collector-1",
    event_id: Annotated[list[str] | None, typer.Option("--id", help="This event only; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Send failed events to Kafka once more, under their own ids; the node must not run. Exit status 1: some failed."""
    import asyncio

    from ingest.kafka import make_publisher
    from ingest.log.inspection import Retried, log_of, retry
    from jobs.local.broker import resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    folder = log_of(_logs(lake), node)
    topics = {name: source.topic for name, source in load_pipeline(settings.pipeline_folder()).sources.items()}
    settings = resolve_kafka(settings, "collector")
    bootstrap = settings.kafka.bootstrap

    async def run(progress: Progress) -> Retried:
        bar = progress.add_task("sending", total=None)
        publisher = make_publisher(bootstrap, settings.kafka, topics)
        return await retry(
            folder,
            publisher,
            ids=event_id or (),
            progress=lambda done, of: progress.update(bar, completed=done, total=of),
        )

    with Progress(console=err, transient=True) as progress:
        found = asyncio.run(run(progress))
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        out.print(f"{found.sent:,} sent, {len(found.refused):,} refused again")
        for name, reason in list(found.refused.items())[:_SHOWN]:
            out.print(f"{name}: {reason}", markup=False)
    raise typer.Exit(1 if found.refused else 0)


def _logs(lake: Path | None) -> Path:
    return Lake(load_settings(lake=lake).lake).state / "log"


def _items(lake: Path | None, node: str, under_way: bool) -> Iterator[dict[str, Any]]:
    from ingest.log.inspection import failed, log_of, transient

    folder = log_of(_logs(lake), node)
    return transient(folder) if under_way else failed(folder)
