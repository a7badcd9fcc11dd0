"""``millrace feeds``: invented feed files to try the loader with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jobs.console import JsonOption, err, out, print_json
from lakehouse.contract.errors import ConfigError

app = typer.Typer(help="Feed files of invented merchants, to try the loader with.", no_args_is_help=True)


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(help="Where; made where absent.")],
    merchants: Annotated[int, typer.Option(help="So many, a folder each.", min=1)] = 100,
    offers: Annotated[int, typer.Option(help="Of a merchant.", min=1)] = 1_000,
    rounds: Annotated[int, typer.Option(help="Files of a merchant, newer versions in each.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Equal seeds make equal files.")] = 1,
    format: Annotated[list[str] | None, typer.Option(help="Of the files in turn; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write feed files of pipeline ``offers``: versions in any order, some rows again, a few malformed."""
    from ingest.simulate.offers import FORMATS, write_feeds

    formats = tuple(format or FORMATS)
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ConfigError(f"{unknown[0]!r} is not known", key="--format", remedy=f"Use of: {', '.join(FORMATS)}")
    with err.status("writing …"):
        done = write_feeds(folder, seed=seed, merchants=merchants, offers=offers, rounds=rounds, formats=formats)
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        out.print(f"{done.files:,} files, {done.rows:,} rows, {done.malformed:,} of them malformed, in {folder}")
