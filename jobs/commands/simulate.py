"""``millrace simulate``: a recording, or made-up events, as a live upstream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.console import PipelineOption, err, run_async
from lakehouse.contract.settings import load_settings


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
    from ingest.simulate.server import Play, play_pipeline
    from lakehouse.contract.pipeline import load_pipeline

    settings = load_settings(pipeline=pipeline)

    def ready(url: str) -> None:
        err.print(f"playing at {url} (ws …/stream, {url}/sse, {url}/lines)")

    play = Play(input, rate, loop, count, seed, port=port)
    loaded = load_pipeline(settings.pipeline_folder())
    run_async(lambda stop: play_pipeline(loaded, play, ready=ready, stop=stop))
