"""``millrace sql`` and ``millrace subscribe``: reading the products, once or as they change."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, LakeOption, err, out, run_async
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over the lake's tables.")],
    lake: LakeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Query the lake's tables with DuckDB, without Spark."""
    from serve.sql.statement import rows_as_json, run_sql

    found = run_sql(Lake(load_settings(lake=lake).lake), query)
    if as_json:
        sys.stdout.buffer.write(rows_as_json(found) + b"\n")
        return
    table = Table(*found.schema.names)
    for row in json.loads(rows_as_json(found)):
        table.add_row(*[escape("" if value is None else str(value)) for value in row.values()])
    out.print(table)
    err.print(f"{found.num_rows} rows", style="dim")


def subscribe(
    table: Annotated[str, typer.Argument(help="Name of the table.")],
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8400",
    position_file: Annotated[Path | None, typer.Option(help="Keep the position here and go on from it.")] = None,
    count: Annotated[int | None, typer.Option(help="End after so many messages.", min=1)] = None,
) -> None:
    """Follow a table: one JSON object a line on standard output, a snapshot and then each change."""
    run_async(lambda stop: _print_changes(stop, table, url, position_file, count))


async def _print_changes(stop: asyncio.Event, table: str, url: str, file: Path | None, count: int | None) -> None:
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
