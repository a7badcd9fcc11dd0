"""What the commands of ``millrace`` share: the settings of the command line, consoles, logs, and how a command runs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lakehouse.contract.envelope import LOG_FIELDS
from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.java import LOG_VARIABLE
from lakehouse.contract.settings import Settings, load_settings

if TYPE_CHECKING:
    from lakehouse.contract.pipeline import Pipeline

out = Console()
err = Console(stderr=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for scripts.")]
PortOption = Annotated[
    int | None,
    typer.Option(
        help="Port of the server and its dashboard; 0: any free one.", min=0, max=65_535, show_default="serve.port"
    ),
]
NodeOption = Annotated[str, typer.Option(help="Id of this process; each one needs its own.")]

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_chosen: dict[str, Any] = {}


def choose(lake: str | None, pipeline: str | None, assignments: Sequence[str]) -> None:
    """Keep what the command line says of the settings, for :func:`chosen_settings`."""
    _chosen.update(lake=lake, pipeline=pipeline, assignments=tuple(assignments))


def chosen_settings() -> Settings:
    """The settings of this command: command line, then environment, then file.

    Raises:
        ConfigError: one of them is wrong.
    """
    return load_settings(**_chosen)


def serving_at(settings: Settings, port: int | None) -> Settings:
    """The settings with the server on this port; None changes nothing."""
    if port is None:
        return settings
    return dataclasses.replace(settings, serve=dataclasses.replace(settings.serve, port=port))


def chosen_pipeline() -> tuple[Settings, Pipeline]:
    """The settings of this command, and the pipeline that they name.

    Raises:
        ConfigError: a setting or the pipeline is wrong.
    """
    from lakehouse.contract.pipeline.files import declared_pipeline

    settings = chosen_settings()
    return settings, declared_pipeline(settings)


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_problems(found: Iterable[MillraceError]) -> None:
    """One message each, as :func:`jobs.cli.main` prints an error."""
    for problem in found:
        err.print(f"[bold red]error:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)


def refuse_to_start(settings: Settings, *, ports: bool) -> None:
    """Print what ``millrace check`` finds, and end with status 1 if it finds anything."""
    from jobs.local.machine import before_start

    if found := before_start(settings, ports=ports):
        print_problems(found)
        raise typer.Exit(1)


def stopped_by_signals() -> threading.Event:
    """An event that SIGINT and SIGTERM set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def run_async(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run until ``main`` returns; SIGINT and SIGTERM set the event that it gets."""

    async def guarded() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    log_to_stderr()
    import uvloop

    uvloop.run(guarded())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``at`` (UTC, RFC 3339), ``level``, ``logger``, ``message``, ``process``, ``error``.

    A line about one event has its ``event_id``, ``source`` and ``tenant`` too (:mod:`lakehouse.contract.envelope`).
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
        line |= {name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log from INFO on; libraries that say much from WARNING on. ``MILLRACE_LOG=json`` makes each line a JSON object.

    Raises:
        ConfigError: the variable has another value.
    """
    kind = os.environ.get(LOG_VARIABLE, "text")
    if kind not in ("text", "json"):
        raise ConfigError(f"{kind!r} is not known", key=LOG_VARIABLE, remedy="Use text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("py4j", "kafka", "alembic.runtime.plugins"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
