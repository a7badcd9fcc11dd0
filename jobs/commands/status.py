"""``millrace status``: which parts of a lake's stack run, and where they listen."""

from __future__ import annotations

import dataclasses

import typer
from rich.table import Column, Table

from jobs.console import JsonOption, LakeOption, err, out, print_json
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


def status(lake: LakeOption = None, as_json: JsonOption = False) -> None:
    """Say which parts that millrace up or demo started run, since when, and where they listen; exit status 3: none."""
    from jobs.local.stack import parts

    found = parts(Lake(load_settings(lake=lake).lake))
    running = any(part.running for part in found)
    if as_json:
        print_json([{**dataclasses.asdict(part), "running": part.running} for part in found])
    elif not found:
        err.print("nothing was started here by millrace up or demo")
    else:
        addresses = [Column(name, overflow="fold") for name in ("address", "metrics")]
        table = Table("part", "state", "process", *addresses, "remarks")
        for part in found:
            state = "[green]runs[/]" if part.running else "[red]does not run[/]"
            table.add_row(part.name, state, str(part.pid or ""), part.address, part.metrics, part.remarks)
        out.print(table)
    raise typer.Exit(0 if running else 3)
