"""What the commands of ``millrace`` share: options, consoles, and how an asynchronous command is run."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jobs.log import log_to_stderr
from lakehouse.contract.errors import ConfigError

out = Console()
err = Console(stderr=True)

LakeOption = Annotated[Path | None, typer.Option("--lake", help="Root folder of the tables.", show_default="lake")]
PipelineOption = Annotated[
    str | None, typer.Option("--pipeline", help="Folder below conf/pipelines, or a path.", show_default="meetup")
]
KafkaOption = Annotated[
    str | None, typer.Option("--kafka", help="host:port of the broker.", show_default="the lake's embedded one")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for scripts.")]


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def run_async(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run until it ends by itself, or SIGINT or SIGTERM sets the event it was given."""

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    log_to_stderr()
    import uvloop

    uvloop.run(guarded())


def upstream_urls(given: Sequence[str], sources: Sequence[str]) -> dict[str, str]:
    """Upstream by source from ``URL`` (every source) and ``SOURCE=URL``.

    Raises:
        ConfigError: there is no such source.
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
