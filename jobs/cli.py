"""The ``millrace`` command. Each part imports what it needs when it is called: serving and collecting need no Java."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from jobs.commands import (
    alert,
    audit,
    feeds,
    keys,
    load,
    log,
    maintain,
    quality,
    query,
    refine,
    sketch,
    staging,
    state,
    tables,
    topics,
)
from jobs.console import (
    JsonOption,
    KafkaOption,
    LakeOption,
    PipelineOption,
    err,
    out,
    print_json,
    run_async,
    upstream_urls,
)
from jobs.log import log_to_stderr
from jobs.supervise import follow_parent
from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

app = typer.Typer(
    name="millrace",
    help="An event-sourced Delta Lake lakehouse that pushes its results.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
kafka_app = typer.Typer(help="The embedded Kafka broker of a lake.", no_args_is_help=True)
app.add_typer(kafka_app, name="kafka")
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


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Look whether this machine has what Millrace needs, and say what is missing."""
    import dataclasses

    from jobs.doctor import checks

    found = checks()
    if as_json:
        print_json([dataclasses.asdict(check) for check in found])
    else:
        table = Table(box=None, show_header=False)
        for check in found:
            table.add_row("[green]ok[/]" if check.ok else "[red]no[/]", check.name, check.detail, check.remedy)
        out.print(table)
    raise typer.Exit(0 if all(check.ok or check.optional for check in found) else 1)


@kafka_app.command("start")
def kafka_start(lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """Start the broker in the background and wait until it serves; a secure one gets the pipeline's access rules."""
    from jobs.broker import apply_topics, embedded
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline)
    broker = embedded(settings)
    if not broker.running():
        with err.status("Starting the broker …"):
            broker.start()
            if settings.kafka.secure:
                apply_topics(settings, load_pipeline(settings.pipeline_folder()))
    _kafka_say(broker, as_json)


@kafka_app.command("stop")
def kafka_stop(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """Stop the broker."""
    from jobs.broker import embedded

    broker = embedded(load_settings(lake=lake))
    broker.stop()
    _kafka_say(broker, as_json)


@kafka_app.command("status")
def kafka_status(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """Say whether the broker runs, and where; exit status 3 where it does not."""
    from jobs.broker import embedded

    broker = embedded(load_settings(lake=lake))
    _kafka_say(broker, as_json)
    raise typer.Exit(0 if broker.running() else 3)


@app.command()
def simulate(
    input: Annotated[Path | None, typer.Option(help="JSON-lines file to play; without one, made-up events.")] = None,
    rate: Annotated[float, typer.Option(help="Events a second.", min=0.001)] = 100.0,
    loop: Annotated[bool, typer.Option("--loop", help="Play the file again and again, with new ids.")] = False,
    count: Annotated[int | None, typer.Option(help="Stop after so many made-up events.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the made-up events.")] = 1,
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0: any free one.")] = 8402,
    pipeline: PipelineOption = None,
) -> None:
    """Play a recording as a live upstream: WebSocket (/stream), SSE (/sse) and chunked JSON lines (/lines)."""
    from ingest.simulate.play import play_pipeline
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(pipeline=pipeline)

    def ready(url: str) -> None:
        err.print(f"playing at {url} (ws …/stream, {url}/sse, {url}/lines)")

    run_async(
        lambda stop: play_pipeline(
            load_pipeline(settings.pipeline_folder()),
            input=input,
            rate=rate,
            loop=loop,
            count=count,
            seed=seed,
            port=port,
            ready=ready,
            stop=stop,
        )
    )


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
    from ingest.memory import calm_garbage_collector
    from ingest.node import run_collector
    from jobs.broker import resolve_kafka
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka, collect__port=port)
    loaded = load_pipeline(settings.pipeline_folder())
    settings = resolve_kafka(settings, "collector")
    bootstrap = settings.kafka.bootstrap
    urls = upstream_urls(url or [], list(loaded.sources))
    calm_garbage_collector()
    run_async(
        lambda stop: run_collector(
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
    from jobs.streams import run_stages
    from lakehouse.stream import Stages

    settings = load_settings(lake=lake, pipeline=pipeline, kafka__bootstrap=kafka)
    marker = Lake(settings.lake).state / "run" / "lakehouse.json"

    def started() -> None:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps({"started": time.time()}), encoding="utf-8")
        err.print("the pipeline runs")

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
        from jobs.serving import serve_many

        common = ["--lake", str(settings.lake), "--pipeline", settings.pipeline]
        run_async(lambda stop: serve_many(settings, common, ready=ready, stop=stop))
        return
    run_async(lambda stop: run_server(settings, ready=ready, stop=stop, shared=mark is not None))


@app.command()
def up(
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    upstream: Annotated[str | None, typer.Option(help="Upstream of every source, instead of the pipeline's.")] = None,
) -> None:
    """Run everything, supervised: broker, collector, Spark driver and server; Ctrl-C stops it all."""
    from jobs.up import Stack

    settings = load_settings(lake=lake, pipeline=pipeline)
    log_to_stderr()
    stack = Stack(settings, upstream=upstream or "")
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
    from jobs.demo import Options
    from jobs.demo import demo as run_demo

    settings = load_settings(lake=lake, pipeline=pipeline)
    options = Options(seconds, rate, input, seed, loop, browser=not no_browser, quiet=as_json, live=live)
    raise typer.Exit(run_demo(settings, options))


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the lake's tables.")],
    lake: LakeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Query the lake's tables with DuckDB, without Spark."""
    from serve.query import rows_as_json, run_sql

    found = run_sql(Lake(load_settings(lake=lake).lake), query)
    if as_json:
        sys.stdout.buffer.write(rows_as_json(found) + b"\n")
        return
    table = Table(*found.schema.names)
    for row in json.loads(rows_as_json(found)):
        table.add_row(*[_escaped("" if value is None else str(value)) for value in row.values()])
    out.print(table)
    err.print(f"{found.num_rows} rows", style="dim")


@app.command()
def subscribe(
    table: Annotated[str, typer.Argument(help="Name of the table.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8400",
    position_file: Annotated[Path | None, typer.Option(help="Keep the position here and go on from it.")] = None,
    count: Annotated[int | None, typer.Option(help="End after so many messages.", min=1)] = None,
) -> None:
    """Follow a table: one JSON object a line on standard output, a snapshot and then each change."""
    run_async(lambda stop: _print_changes(stop, table, url, position_file, count))


@app.command()
def replay(
    verify: Annotated[
        bool, typer.Option("--verify", help="Build every product again from bronze and compare.")
    ] = False,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that the products are what bronze gives: equal digests, or exit status 1."""
    if not verify:
        raise ConfigError("say what to do", key="replay", remedy="millrace replay --verify")
    import dataclasses

    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.replay import verify as compare
    from lakehouse.session import build_session

    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    with err.status("starting Spark …") as status:
        spark = build_session(settings, "millrace-replay")
        try:
            found = list(compare(spark, settings, loaded, step=lambda text: status.update(text + " …")))
        finally:
            spark.stop()
    if as_json:
        print_json([{**dataclasses.asdict(item), "equal": item.equal} for item in found])
    else:
        shown = Table("table", "version", "bronze", "rows live", "rows replayed", "digest", "equal")
        for item in found:
            row = (item.table, str(item.version), str(item.bronze), f"{item.rows[0]:,}", f"{item.rows[1]:,}")
            shown.add_row(*row, item.live[:16], "[green]yes[/]" if item.equal else "[red]NO[/]")
        out.print(shown)
    raise typer.Exit(0 if found and all(item.equal for item in found) else 1)


@app.command()
def jars() -> None:
    """Print the Spark jars, comma-separated, as spark-submit's --jars takes them; fetches what is missing."""
    from lakehouse.contract.jars import jar_paths

    sys.stdout.write(",".join(str(path) for path in jar_paths("spark")) + "\n")


async def _print_changes(stop: asyncio.Event, table: str, url: str, file: Path | None, count: int | None) -> None:
    import dataclasses

    import orjson

    from serve.client import FileStore, Snapshot
    from serve.client import subscribe as connect

    async def follow() -> None:
        seen = 0
        async with connect(url, table, FileStore(file) if file else None) as messages:
            async for message in messages:
                kind = "snapshot" if isinstance(message, Snapshot) else "change"
                line = orjson.dumps({"type": kind, **dataclasses.asdict(message)})
                sys.stdout.buffer.write(line + b"\n")
                sys.stdout.buffer.flush()
                seen += 1
                if seen == count:
                    return

    task = asyncio.create_task(follow())
    waiter = asyncio.create_task(stop.wait())
    await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        task.result()


def _kafka_say(broker: Any, as_json: bool) -> None:
    running = broker.running()
    state = {"running": running, "bootstrap": broker.bootstrap if running else None, "pid": broker.pid}
    if as_json:
        print_json({**state, "folder": str(broker.folder)})
    elif running:
        out.print(f"running at {state['bootstrap']} (process {state['pid']}), folder {broker.folder}")
    else:
        out.print("not running")


def main() -> None:
    """Console script: errors of ours are one line, not a traceback."""
    follow_parent()
    try:
        app()
    except MillraceError as error:
        err.print(f"[bold red]error:[/] {_escaped(str(error))}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
