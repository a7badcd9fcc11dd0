"""What the commands of ``millrace`` share: consoles, the log of a process, and how an asynchronous command runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.java import LOG_VARIABLE
from lakehouse.contract.trace import FIELDS

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


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` (UTC, RFC 3339), ``level``, ``logger``, ``message``, ``process``, ``error``.

    A line about one event has its ``event_id``, ``source`` and ``tenant`` too (:mod:`lakehouse.contract.trace`).
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log from INFO on; py4j and kafka from WARNING on. ``MILLRACE_LOG=json`` makes each line a JSON object.

    Raises:
        ConfigError: the variable says something else.
    """
    kind = os.environ.get(LOG_VARIABLE, "text")
    if kind not in ("text", "json"):
        raise ConfigError(f"{kind!r} is not known", key=LOG_VARIABLE, remedy="Use text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("py4j", "kafka"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
