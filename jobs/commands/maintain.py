"""``millrace maintain``: care of tables for a lake whose driver does not run."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer
from rich.markup import escape

from jobs.console import JsonOption, LakeOption, PipelineOption, err, log_to_stderr, print_json
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


def maintain(
    once: Annotated[bool, typer.Option("--once", help="Look after every table once, then end.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Put together whatever can be, not only where it is worth while.")
    ] = False,
    every: Annotated[float, typer.Option(help="Seconds between two rounds.", min=1)] = 600.0,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put small files together, fold partials, keep retention. Tables whose writer runs are left to it."""
    import dataclasses

    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.maintain.job import maintain as look_after

    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    log_to_stderr()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    while True:
        done = []
        with err.status("looking …") as status:
            for item in look_after(Lake(settings.lake), loaded, everything=everything):
                done.append(item)
                status.update(f"{item.table} …")
        if as_json:
            print_json([dataclasses.asdict(item) for item in done])
        else:
            for item in done:
                said = "left to its writer, which runs" if item.busy else item.said or "nothing to do"
                err.print(f"{item.table}: {escape(said)}", highlight=False)
        if once or stop.wait(every):
            return
