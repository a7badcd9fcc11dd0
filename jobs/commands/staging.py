"""``millrace staging``: copies of a part of a product, for readers that take their time. No Java."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import load_settings

app = typer.Typer(help="Staging tables: a part of a product, copied for slow readers.", no_args_is_help=True)

NameArgument = Annotated[str | None, typer.Argument(help="Of the staging table; without one, all of the pipeline.")]


@app.command()
def rebuild(
    name: NameArgument = None, lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False
) -> None:
    """Drop a staging table and make it anew from the record, in one commit: readers see the old or the new one."""
    _make(name, lake, pipeline, as_json, anew=True)


@app.command()
def refresh(
    name: NameArgument = None, lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False
) -> None:
    """Bring a staging table up to its product's newest version; one that shows it is left alone."""
    _make(name, lake, pipeline, as_json, anew=False)


def _make(name: str | None, lake: LakeOption, pipeline: PipelineOption, as_json: bool, *, anew: bool) -> None:
    from lakehouse.load.staging import refresh as make

    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    if name is not None and name not in loaded.staging:
        remedy = f"There are: {', '.join(loaded.staging) or 'none; add [staging.NAME] to the pipeline'}"
        raise ConfigError(f"there is no staging table {name!r}", key="staging", remedy=remedy)
    found = []
    with err.status("copying …"):
        for wanted in [loaded.staging[name]] if name else loaded.staging.values():
            found.append(make(Lake(settings.lake), loaded, wanted, rebuild=anew))
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
        return
    table = Table("staging table", "of", "at version", "rows", "")
    for one in found:
        made = "made" if one.changed else "as it was"
        table.add_row(one.name, one.product, str(one.product_version), f"{one.rows:,}", made)
    out.print(table)
