"""The long-running parts: ``up``, ``demo``, ``collect``, ``run``, ``serve`` and ``simulate``; and ``status``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jobs.console import (
    KEY_VARIABLE,
    JsonOption,
    chosen_pipeline,
    chosen_settings,
    err,
    log_to_stderr,
    print_json,
    print_table,
    refuse_to_start,
    run_async,
    stopped_by_signals,
)
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline.folder import PipelineFiles, declared_pipeline

if TYPE_CHECKING:
    from rich.console import Console

    from ingest.node import CollectorNode

_log = logging.getLogger(__name__)

_BAR_S = 0.2
_LINE_S = 5.0


def up(
    inbox: Annotated[
        list[str] | None,
        typer.Option(help="Load files that arrive in this folder: DIR or SOURCE=DIR; may be repeated."),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Run a control plane too: it says who may send and read.")
    ] = False,
) -> None:
    """Run everything, supervised: broker, collector, Spark driver, server and loaders. Ctrl-C stops all of it."""
    from jobs.local.stack import Stack, inbox_folders

    settings = chosen_settings()
    refuse_to_start(settings, ports=True)
    folders = inbox_folders(inbox or [], list(declared_pipeline(settings).sources))
    log_to_stderr()
    stack = Stack(settings, feeds=True, inboxes=folders)
    stop = stopped_by_signals()
    try:
        if control:
            stack.start_control()
        stack.start()
        announced = False
        while not stop.is_set():
            stack.tend()
            if not announced and not stack.waiting_for():
                announced = True
                where, logs = stack.where, stack.log_file("serve").parent
                err.print(f"ready: dashboard {where['serve']}/, collector {where['collect']}, ", end="")
                err.print(f"Kafka {where['broker']}, logs {logs}")
            stop.wait(0.25)
    finally:
        stack.stop(lambda name: err.print(f"stopping {name} …"))


def demo(
    seconds: Annotated[float | None, typer.Option(help="End after this many seconds.", min=1)] = None,
    rate: Annotated[float, typer.Option(help="Events a second.", min=0.1)] = 500.0,
    input: Annotated[
        Path | None,
        typer.Option(help="Play this JSON-lines file instead of made-up events.", exists=True, dir_okay=False),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Read the pipeline's own upstreams and play nothing.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the dashboard.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the figures at the end.")] = False,
) -> None:
    """Play a stream through all of Millrace and show its results; print one JSON object at the end."""
    from jobs.demo import DemoOptions
    from jobs.demo import demo as run_demo

    options = DemoOptions(seconds, rate, input, browser=not no_browser, quiet=as_json, live=live)
    settings = chosen_settings()
    refuse_to_start(settings, ports=False)
    raise typer.Exit(run_demo(settings, options))


class Role(StrEnum):
    """What a collecting node does."""

    COLLECT = "collect"
    FRONT = "front"
    REFINE = "refine"
    LATEST = "latest"


def collect(
    url: Annotated[
        list[str] | None,
        typer.Option(help="Read this upstream instead of the pipeline's: URL or SOURCE=URL; may be repeated."),
    ] = None,
    node: Annotated[
        str, typer.Option(help="Id of this process; each one needs its own.", show_default="collector-1 or refiner-1")
    ] = "",
    role: Annotated[
        Role,
        typer.Option(
            help="front: put payloads into TOPIC.raw unread; refine: validate and enrich those; "
            "latest: keep the newest event of each key in TOPIC.latest, for sources that say latest_topic."
        ),
    ] = Role.COLLECT,
) -> None:
    """Run a collecting node: the pipeline's upstreams, UDP and HTTP, into the log and Kafka."""
    if role in (Role.REFINE, Role.LATEST):
        _relay(role, node or "refiner-1")
        return
    from ingest.node import CollectorNode, NodeOptions, calm_garbage_collector
    from jobs.local.broker import resolve_kafka

    settings = chosen_settings()
    files = PipelineFiles.of(settings)
    pipeline = files.load()
    settings = resolve_kafka(settings, "collector")
    urls = upstream_urls(url or [], list(pipeline.sources))
    options = NodeOptions(node or "collector-1", urls, role is Role.FRONT, files)
    calm_garbage_collector()

    async def main(stop: asyncio.Event) -> None:
        collector = CollectorNode(settings, pipeline, options)
        await collect_until(stop, collector, err, lambda base: err.print(f"collecting; HTTP at {base}"))

    run_async(main)


def _relay(role: Role, node: str) -> None:
    """Read topics and write others: ``refine`` or ``latest``."""
    from ingest.relay import LatestMirror, RefineNode
    from jobs.local.broker import resolve_kafka
    from jobs.metrics import metrics_server, relay_counts

    settings, pipeline = chosen_pipeline()
    settings = resolve_kafka(settings, "collector" if role is Role.REFINE else "lakehouse")

    async def main(stop: asyncio.Event) -> None:
        relay: RefineNode | LatestMirror
        if role is Role.REFINE:
            relay, told = RefineNode(settings, pipeline, node=node), "refining"
            names: tuple[str, ...] = ("read", "refined", "rejected", "sent_again")
        else:
            relay, told, names = LatestMirror(settings, pipeline), "copying", ("copied",)
        counts = relay_counts(f"millrace_{role}", relay.counts, *names)
        with metrics_server(settings.metrics_port, *counts) as metrics:
            await relay.run(lambda: err.print(f"{told}; metrics at {metrics}"), stop)

    run_async(main)


def run(
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Continue although Kafka lost events that bronze does not have.")
    ] = False,
) -> None:
    """Run the pipeline's Spark queries in one driver: Kafka to bronze to products."""
    from jobs.local.stack import DRIVER, write_note
    from jobs.local.supervise import is_supervised
    from jobs.run_pipeline import run_stages
    from lakehouse.stages import Stages

    settings = chosen_settings()
    if not is_supervised():  # else the supervisor has done it
        refuse_to_start(settings, ports=False)
    note = Lake.of(settings).state / "run" / DRIVER

    def started(metrics: str) -> None:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_note(note, {"started": time.time(), "pid": os.getpid(), "metrics": metrics})
        err.print(f"the pipeline runs; metrics at {metrics}")

    log_to_stderr()
    run_stages(settings, Stages(), accept_loss=accept_loss, started=started)


def serve() -> None:
    """Serve the lake's products: WebSocket, SSE, long polling, HTTP, webhooks and the dashboard."""
    from jobs.local.supervise import mark_of_child, serve_many
    from serve.app import run_server

    settings = chosen_settings()
    mark = mark_of_child()

    def ready(base: str) -> None:
        if mark is not None:
            mark.write_text(json.dumps({"url": base}), encoding="utf-8")
        err.print(f"serving at {base}/")

    if settings.serve.processes > 1:
        run_async(lambda stop: serve_many(settings, ready=ready, stop=stop))
        return
    name = mark.stem if mark is not None else ""
    run_async(lambda stop: run_server(settings, ready=ready, stop=stop, alone=True, name=name))


def simulate(
    input: Annotated[Path | None, typer.Option(help="Play this JSON-lines file instead of made-up events.")] = None,
    rate: Annotated[float, typer.Option(help="Events a second.", min=0.001)] = 100.0,
    seed: Annotated[int, typer.Option(help="Seed of made-up events; equal seeds make equal events.")] = 1,
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0: any free one.")] = 8402,
    feeds: Annotated[
        Path | None, typer.Option(help="Write feed files of pipeline offers into this folder and play nothing.")
    ] = None,
    merchants: Annotated[int, typer.Option(help="Of --feeds: merchants, with a folder each.", min=1)] = 100,
    offers: Annotated[int, typer.Option(help="Of --feeds: offers of each merchant.", min=1)] = 1_000,
    rounds: Annotated[int, typer.Option(help="Of --feeds: files of each merchant.", min=1)] = 1,
    to: Annotated[
        str, typer.Option(help="Publish to this collector instead, and only while somebody is interested.")
    ] = "",
) -> None:
    """Play a stream as a live upstream: WebSocket (/stream), SSE (/sse) and chunked JSON lines (/lines).

    With --feeds it writes feed files instead: versions in any order, repeated rows, and a few malformed ones. With --to
    it is a device for each source: it publishes to a collector while somebody is interested, and rests otherwise; it
    takes its key from MILLRACE_KEY.
    """
    if feeds is not None:
        from ingest.simulate.scenes import write_feeds

        with err.status("writing …"):
            done = write_feeds(feeds, seed, merchants, offers, rounds)
        print_json(dataclasses.asdict(done))
        return
    from ingest.simulate.player import Play
    from ingest.simulate.server import SimulatedDevice, play_pipeline, run_devices

    _, pipeline = chosen_pipeline()
    play = Play(input, rate, seed, port=port)

    def told(device: SimulatedDevice, wanted: bool) -> None:
        state = "somebody is interested, the device publishes" if wanted else "nobody is interested, the device rests"
        err.print(f"{device.source}: {state} ({device.sent} events sent, {device.acknowledged} acknowledged)")

    if to:
        run_async(lambda stop: run_devices(pipeline, play, to, os.environ.get(KEY_VARIABLE, ""), told, stop))
        return

    def ready(base: str) -> None:
        err.print(f"playing at {base} (ws …/stream, {base}/sse, {base}/lines)")

    run_async(lambda stop: play_pipeline(pipeline, play, ready=ready, stop=stop))


def status(as_json: JsonOption = False) -> None:
    """Show which parts that up or demo started run, and where they listen. Exit status 3: none runs."""
    from jobs.local.stack import parts

    found = parts(Lake.of(chosen_settings()))
    running = any(part.running for part in found)
    if as_json:
        print_json([{**dataclasses.asdict(part), "running": part.running} for part in found])
    elif not found:
        err.print("nothing was started here by millrace up or demo")
    else:
        rows = [
            (
                part.name,
                "[green]runs[/]" if part.running else "[red]does not run[/]",
                part.address,
                part.metrics,
                str(part.pid or ""),
                part.remarks,
            )
            for part in found
        ]
        print_table(("part", "state", "address", "metrics", "process", "remarks"), rows, spare=("metrics",))
    raise typer.Exit(0 if running else 3)


def upstream_urls(given: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """Upstream by source from ``URL`` (every source) and ``SOURCE=URL``.

    Raises ConfigError: there is no such source.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            found |= dict.fromkeys(sources, text)
        elif name in sources:
            found[name] = url
        else:
            raise ConfigError(f"there is no source {name!r}", key="--url", remedy=f"Sources: {', '.join(sources)}")
    return found


async def collect_until(
    stop: asyncio.Event, node: CollectorNode, console: Console, ready: Callable[[str], None]
) -> None:
    """:meth:`ingest.node.CollectorNode.run`, with the progress of its replay.

    A terminal shows a bar; elsewhere the log gets a line every few seconds.
    """
    report = asyncio.create_task(_report_replay(node, console))
    try:
        await node.run(stop, ready)
    finally:
        report.cancel()
        await asyncio.gather(report, return_exceptions=True)


async def _report_replay(node: CollectorNode, console: Console) -> None:
    left, of = node.replay
    if not console.is_terminal:
        while left:
            _log.info("%d of %d events of an earlier run are still to be sent to Kafka", left, of)
            await asyncio.sleep(_LINE_S)
            left, of = node.replay
        return
    columns = (TextColumn("sending again"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not left) as bar:
        shown = bar.add_task("", total=of)
        while left:
            bar.update(shown, completed=of - left)
            await asyncio.sleep(_BAR_S)
            left, of = node.replay
        bar.update(shown, completed=of)
