"""``millrace kafka``: the embedded broker of a lake."""

from __future__ import annotations

from typing import Any

import typer

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.settings import load_settings

app = typer.Typer(help="The embedded Kafka broker of a lake.", no_args_is_help=True)


@app.command("start")
def kafka_start(lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """Start the broker in the background and wait until it serves; a secure one gets the pipeline's access rules."""
    from jobs.local.broker import apply_topics, embedded
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(lake=lake, pipeline=pipeline)
    broker = embedded(settings)
    if not broker.running():
        with err.status("Starting the broker …"):
            broker.start()
            if settings.kafka.secure:
                apply_topics(settings, load_pipeline(settings.pipeline_folder()))
    _say(broker, as_json)


@app.command("stop")
def kafka_stop(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """Stop the broker."""
    from jobs.local.broker import embedded

    broker = embedded(load_settings(lake=lake))
    broker.stop()
    _say(broker, as_json)


@app.command("status")
def kafka_status(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """Say whether the broker runs, and where; exit status 3 where it does not."""
    from jobs.local.broker import embedded

    broker = embedded(load_settings(lake=lake))
    _say(broker, as_json)
    raise typer.Exit(0 if broker.running() else 3)


def _say(broker: Any, as_json: bool) -> None:
    running = broker.running()
    state = {"running": running, "bootstrap": broker.bootstrap if running else None, "pid": broker.pid}
    if as_json:
        print_json({**state, "folder": str(broker.folder)})
    elif running:
        out.print(f"running at {state['bootstrap']} (process {state['pid']}), folder {broker.folder}")
    else:
        out.print("not running")
