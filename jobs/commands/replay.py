"""``millrace replay``: every product built again from bronze, and compared."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.settings import load_settings


def replay(
    verify: Annotated[
        bool, typer.Option("--verify", help="Build every product again from bronze and compare.")
    ] = False,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that the products are what bronze gives: equal digests, or exit status 1."""
    if not verify:
        raise ConfigError("say what to do", key="replay", remedy="millrace replay --verify")
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.replay import verify as compare
    from lakehouse.session import build_session

    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded = load_pipeline(settings.pipeline_folder())
    with err.status("starting Spark …") as status:
        spark = build_session(settings, "millrace-replay")
        try:
            found = list(compare(spark, settings, loaded, step=lambda text: status.update(text + " …")))
        finally:
            spark.stop()
    if as_json:
        print_json([{**dataclasses.asdict(item), "equal": item.equal} for item in found])
    else:
        shown = Table("table", "version", "bronze", "rows live", "rows replayed", "digest", "equal")
        for item in found:
            row = (item.table, str(item.version), str(item.bronze), f"{item.rows[0]:,}", f"{item.rows[1]:,}")
            shown.add_row(*row, item.live[:16], "[green]yes[/]" if item.equal else "[red]NO[/]")
        out.print(shown)
    raise typer.Exit(0 if found and all(item.equal for item in found) else 1)
