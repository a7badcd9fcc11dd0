"""``millrace doctor``, ``millrace prepare`` and ``millrace jars``: what this machine has."""

from __future__ import annotations

import dataclasses
import sys

import typer
from rich.table import Table

from jobs.console import JsonOption, err, out, print_json


def doctor(as_json: JsonOption = False) -> None:
    """Look whether this machine has what Millrace needs, and say what is missing."""
    from jobs.local.machine import checks

    found = checks()
    if as_json:
        print_json([dataclasses.asdict(check) for check in found])
    else:
        table = Table(box=None, show_header=False)
        for check in found:
            table.add_row("[green]ok[/]" if check.ok else "[red]no[/]", check.name, check.detail, check.remedy)
        out.print(table)
    raise typer.Exit(0 if all(check.ok or check.optional for check in found) else 1)


def prepare() -> None:
    """Do what is done once on a machine: fetch the jars, and let Java start in half the time from now on."""
    from jobs.local.machine import prepare as do_all

    do_all(err.print)


def jars() -> None:
    """Print the Spark jars, comma-separated, as spark-submit's --jars takes them; fetches what is missing."""
    from lakehouse.contract.jars import jar_paths

    sys.stdout.write(",".join(str(path) for path in jar_paths("spark")) + "\n")
