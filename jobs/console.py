"""What the commands of ``millrace`` share: the settings of the command line, consoles, logs, and how a command runs."""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lakehouse.contract.envelope import LOG_FIELDS
from lakehouse.contract.errors import ConfigError, MillraceError
from lakehouse.contract.settings import LOG_VARIABLE, Settings, load_settings
from lakehouse.contract.storage import is_away

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.status import Status

    from lakehouse.contract.pipeline import Pipeline

_WHOLE = 100_000  # columns: nothing is cut or wrapped where no terminal is to be fitted


def _console(*, stderr: bool) -> Console:
    fits = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if fits else _WHOLE)


out = _console(stderr=False)
err = _console(stderr=True)


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="Print rows as a table, as JSON or as CSV.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for scripts.")]

KEY_VARIABLE = "MILLRACE_KEY"
"""The API key of commands that subscribe or publish; not an option, which other users of the machine could see."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_chosen: dict[str, Any] = {}


def choose(lake: str | None, pipeline: str | None, assignments: Sequence[str]) -> None:
    """Keep what the command line says of the settings, for :func:`chosen_settings`."""
    _chosen.update(lake=lake, pipeline=pipeline, assignments=tuple(assignments))


def named_pipeline() -> str | None:
    """The pipeline that ``--pipeline`` names, if it does."""
    named: str | None = _chosen.get("pipeline")
    return named


def chosen_settings() -> Settings:
    """The settings of this command: command line, then environment, then file.

    Raises ConfigError: one of them is wrong.
    """
    return load_settings(**_chosen)


def chosen_pipeline() -> tuple[Settings, Pipeline]:
    """The settings of this command, and the pipeline that they name.

    Raises ConfigError: a setting or the pipeline is wrong.
    """
    from lakehouse.contract.pipeline.folder import declared_pipeline

    settings = chosen_settings()
    return settings, declared_pipeline(settings)


@contextmanager
def spark_session(settings: Settings, name: str) -> Iterator[tuple[SparkSession, Status]]:
    """A Spark session of its own, and the line of the terminal that says what it does."""
    from lakehouse.session import build_session

    with err.status("starting Spark …") as status:
        spark = build_session(settings, name)
        try:
            yield spark, status
        finally:
            spark.stop()


def print_json(value: Any) -> None:
    """One JSON value on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    spare: Collection[str] = (),
    to: Console = out,
) -> None:
    """A table of rows whose values are markup.

    Args:
        right: columns of numbers.
        spare: columns that are left out where the terminal is too narrow for all.
    """
    for left_out in ((), spare):
        table = Table(box=None, pad_edge=False)
        kept = [number for number, name in enumerate(columns) if name not in left_out]
        for name in (columns[number] for number in kept):
            table.add_column(name, overflow="fold", justify="right" if name in right else "left")
        for row in rows:
            table.add_row(*(row[number] for number in kept))
        if _fits(table):
            break
    to.print(table, highlight=False)


def _fits(table: Table) -> bool:
    return out.measure(table, options=out.options.update(max_width=_WHOLE)).maximum <= out.width


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """A table; where it is wider than the terminal, a line for each column of a row instead. No value is cut."""
    cells = [["" if row.get(name) is None else _plain(row[name]) for name in columns] for row in rows]
    table = Table(box=None, pad_edge=False)
    for name in columns:
        numbers = [isinstance(row.get(name), int | float) for row in rows if row.get(name) is not None]
        table.add_column(Text(name), no_wrap=True, justify="right" if numbers and all(numbers) else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    if _fits(table):
        out.print(table)
        return
    widest = max(map(len, columns))
    for number, row in enumerate(cells, 1):
        out.print(Text(f"row {number}", style="dim"))
        for name, value in zip(columns, row, strict=True):
            out.print(Text(f"{name:<{widest}}  {value}"), soft_wrap=True)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, header: bool = True) -> None:
    """Rows as CSV, with a header; null is empty."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows([["" if row.get(n) is None else _plain(row[n]) for n in columns] for row in rows])
    sys.stdout.flush()


def print_problems(found: Iterable[MillraceError]) -> None:
    """One message each, as :func:`jobs.cli.main` prints an error."""
    for problem in found:
        err.print(f"[bold red]error:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)


def refuse_to_start(settings: Settings, *, ports: bool) -> None:
    """Print what ``millrace check PIPELINE`` finds, and end with status 1 if it finds anything."""
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


class OneAMinute(logging.Filter):
    """Passes one record a minute of the loggers below a name: a client that retries says the same many times a second.

    Args:
        above: name of the logger.
    """

    def __init__(self, above: str) -> None:
        super().__init__()
        self._above = above
        self._due = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != self._above:
            return True
        if record.created < self._due:
            return False
        self._due = record.created + 60
        return True


def _not_of_an_outage(record: logging.LogRecord) -> bool:
    """An object store that is away says so once. Whoever waits for it says nothing more."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not is_away(error)


def log_to_stderr() -> None:
    """Log from INFO on; libraries that say much from WARNING on. ``MILLRACE_LOG=json`` makes each line a JSON object.

    Raises ConfigError: the variable has another value.
    """
    kind = os.environ.get(LOG_VARIABLE, "text")
    if kind not in ("text", "json"):
        raise ConfigError(f"{kind!r} is not known", key=LOG_VARIABLE, remedy="Use text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("py4j", "kafka", "alembic.runtime.plugins"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    handler.addFilter(OneAMinute("kafka"))
    handler.addFilter(_not_of_an_outage)
