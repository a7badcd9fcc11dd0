"""The ``millrace`` command. Each part imports what it needs when it is called: serving and collecting need no Java."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from jobs.commands import (
    alert,
    audit,
    doctor,
    feeds,
    kafka,
    keys,
    load,
    log,
    maintain,
    quality,
    query,
    read,
    refine,
    replay,
    simulate,
    sketch,
    staging,
    state,
    status,
    tables,
    topics,
)
from jobs.console import (
    KafkaOption,
    LakeOption,
    PipelineOption,
    err,
    log_to_stderr,
    run_async,
    upstream_urls,
)
from jobs.local.supervise import follow_parent
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

app = typer.Typer(
    name="millrace",
    help="An event-sourced Delta Lake lakehouse that pushes its results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor.doctor)
app.command()(doctor.prepare)
app.command()(doctor.jars)
app.add_typer(kafka.app, name="kafka")
app.command()(simulate.simulate)
app.command()(read.sql)
app.command()(read.subscribe)
app.command()(replay.replay)
app.add_typer(query.app, name="query")
app.add_typer(log.app, name="log")
app.add_typer(keys.app, name="keys")
app.add_typer(alert.app, name="alert")
app.add_typer(sketch.app, name="sketch")
app.add_typer(feeds.app, name="feeds")
app.add_typer(staging.app, name="staging")
app.command()(load.load)
app.add_typer(quality.app, name="quality")
app.command()(tables.tables)
app.command()(topics.topics)
app.command()(topics.latest)
app.command()(audit.audit)
app.command()(maintain.maintain)
app.command()(refine.refine)
app.command()(state.state)
app.command()(status.status)


@app.command()
def collect(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free one.", show_default="8401")] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Upstream instead of the pipeline's: URL for every source, or SOURCE=URL; may be repeated."),
    ] = None,
    node: Annotated[str, typer.Option(help="Id of this node; each has a log of its own.")] = "collector-1",
    front: Annotated[
        bool, typer.Option("--front", help="Take payloads in unread, into TOPIC.raw; millrace refine does the rest.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Start, stop and change sources when the pipeline's file changes.")
    ] = False,
) -> None:
    """Run a collecting node: the pipeline's upstreams, UDP and HTTP, into the log and Kafka."""
    from ingest.node import calm_garbage_collector
    from jobs.collecting import collect_until
    from jobs.local.broker import resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka, collect__port=port)
    loaded = load_pipeline(settings.pipeline_folder())
    settings = resolve_kafka(settings, "collector")
    bootstrap = settings.kafka.bootstrap
    urls = upstream_urls(url or [], list(loaded.sources))
    calm_garbage_collector()
    run_async(
        lambda stop: collect_until(
            err,
            settings,
            loaded,
            node=node,
            bootstrap=bootstrap,
            urls=urls,
            ready=lambda base: err.print(f"collecting; HTTP at {base}"),
            front=front,
            watch=watch,
            stop=stop,
        )
    )


@app.command()
def run(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    kafka: KafkaOption = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Go on where Kafka lost what bronze had not taken.")
    ] = False,
) -> None:
    """Run the pipeline's Spark queries in one driver: Kafka to bronze to products."""
    from jobs.local.stack import DRIVER, write_note
    from jobs.run_pipeline import run_stages
    from lakehouse.stages import Stages

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    note = Lake(settings.lake).state / "run" / DRIVER

    def started(metrics: str) -> None:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_note(note, {"started": time.time(), "pid": os.getpid(), "metrics": metrics})
        err.print(f"the pipeline runs; metrics at {metrics}")

    log_to_stderr()
    run_stages(settings, Stages(), accept_loss=accept_loss, started=started)


@app.command()
def serve(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free one.", show_default="8400")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Server processes on the port.", min=1, show_default="1")
    ] = None,
    mark: Annotated[Path | None, typer.Option(hidden=True, help="Of one of several: written when it is up.")] = None,
) -> None:
    """Serve the lake's products: WebSocket subscriptions, HTTP, the dashboard."""
    from serve.app import run_server

    settings = load_settings(lake=lake, pipeline=pipeline, serve__port=port, serve__processes=processes)

    def ready(base: str) -> None:
        if mark is not None:
            mark.write_text(json.dumps({"url": base}), encoding="utf-8")
        err.print(f"serving at {base}/")

    if settings.serve.processes > 1:
        from jobs.local.supervise import serve_many

        common = ["--lake", str(settings.lake), "--pipeline", settings.pipeline]
        run_async(lambda stop: serve_many(settings, common, ready=ready, stop=stop))
        return
    name = mark.stem if mark is not None else ""
    run_async(lambda stop: run_server(settings, ready=ready, stop=stop, alone=True, name=name))


@app.command()
def up(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    upstream: Annotated[str | None, typer.Option(help="Upstream of every source, instead of the pipeline's.")] = None,
    inbox: Annotated[
        list[str] | None,
        typer.Option(help="Load what arrives in this folder: DIR, or SOURCE=DIR; may be repeated."),
    ] = None,
) -> None:
    """Run everything, supervised: broker, collector, Spark driver, server and feeds; Ctrl-C stops it all."""
    from jobs.local.stack import Stack, inbox_folders
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline)
    folders = inbox_folders(inbox or [], list(load_pipeline(settings.pipeline_folder()).sources))
    log_to_stderr()
    stack = Stack(settings, upstream=upstream or "", feeds=True, inboxes=folders, watch=True)
    stopping: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopping.append(received))
    try:
        stack.start()
        told = False
        while not stopping:
            stack.tend()
            if not told and not stack.waiting_for():
                told = True
                err.print(f"ready: dashboard {stack.address.serve}/, collector {stack.address.collect}, ", end="")
                err.print(f"Kafka {stack.address.kafka}, logs {stack.log_file('serve').parent}")
            time.sleep(0.25)
    finally:
        stack.stop(lambda name: err.print(f"stopping {name} …"))


@app.command()
def demo(
    seconds: Annotated[float | None, typer.Option(help="Play for so long, then end.", min=1)] = None,
    rate: Annotated[float, typer.Option(help="Events a second.", min=0.1)] = 500.0,
    input: Annotated[
        Path | None,
        typer.Option(help="JSON-lines file of events; without one, made-up ones.", exists=True, dir_okay=False),
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Play the input again and again, with new ids.")] = False,
    seed: Annotated[int, typer.Option(help="Of the made-up events.")] = 1,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    live: Annotated[
        bool, typer.Option("--live", help="Read the upstreams that the pipeline names, and play nothing.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the dashboard.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="No live board; only the figures at the end.")] = False,
) -> None:
    """Play a stream through all of Millrace and show its results; prints one JSON object at the end."""
    from jobs.demo.playing import Options
    from jobs.demo.show import demo as run_demo

    settings = load_settings(lake=lake, pipeline=pipeline)
    options = Options(seconds, rate, input, seed, loop, browser=not no_browser, quiet=as_json, live=live)
    raise typer.Exit(run_demo(settings, options))


def main() -> None:
    """Console script: errors of ours are one line, not a traceback."""
    follow_parent()
    try:
        app()
    except MillraceError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
