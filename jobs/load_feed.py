"""Feed files into bronze: ``python jobs/load_feed.py PATH… --source NAME --lake DIR``; the same as ``millrace load``.

Needs no Spark. It can be handed to spark-submit all the same, where jobs are started that way.
"""

from __future__ import annotations

import sys

import typer

from jobs.commands.load import load
from lakehouse.contract.errors import MillraceError


def main() -> int:
    """Run the command; returns the exit status."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(load)
    try:
        app()
    except MillraceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
