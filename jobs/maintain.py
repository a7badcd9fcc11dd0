"""Care of a lake's tables, by a scheduler: ``python jobs/maintain.py --lake DIR --once`` (``millrace maintain``)."""

from __future__ import annotations

import sys

import typer

from jobs.commands.maintain import maintain
from lakehouse.contract.errors import MillraceError

if __name__ == "__main__":
    try:
        typer.run(maintain)
    except MillraceError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
