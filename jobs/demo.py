"""``millrace demo``: everything on free loopback ports, a stream played into it, its results shown live.

What it reports at the end is counted from the tables (:mod:`jobs.account`) and measured at two real sockets: when the
player sent an event, and when a subscriber of a product got the first message that contains it. With ``live`` nothing
is played: the pipeline's own upstreams are read, and there is nothing to compare the tables with.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from jobs.outcome import percentiles
from jobs.playing import Options
from jobs.show import Seen, Show
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import Settings

__all__ = ["Options", "demo", "percentiles", "run_demo"]


async def run_demo(settings: Settings, options: Options, console: Console) -> dict[str, Any]:
    """Run the demo to its end; returns its figures.

    Raises:
        EnvironmentProblem: a part did not get ready, or a live upstream is not reached.
        ConfigError: there is nothing to play for the pipeline.
    """
    settings = dataclasses.replace(
        settings,
        serve=dataclasses.replace(settings.serve, port=0),
        collect=dataclasses.replace(settings.collect, port=0),
    )
    shown = Show(settings, load_pipeline(settings.pipeline_folder()), options, console)
    with _signals(shown.seen):
        try:
            with console.status("Starting broker, Spark, server and collector …"):
                await asyncio.to_thread(shown.stack.start)
                await shown.until_ready()
                if options.live:
                    await shown.until_connected()
            return await shown.play()
        finally:
            with console.status("Stopping …"):
                await asyncio.to_thread(shown.stack.stop)


@contextlib.contextmanager
def _signals(seen: Seen) -> Iterator[None]:
    """Ctrl-C ends the playing; a second one, during the wait for the last events, ends that."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        seen.stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def demo(settings: Settings, options: Options) -> int:
    """The command: board and messages on standard error, one JSON object as the last line of standard output."""
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("serve.client").setLevel(logging.ERROR)  # the board says how old results are
    result = asyncio.run(run_demo(settings, options, console))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0 if not result["lost"] and not result["counted_twice"] and result["arrived"] else 1
