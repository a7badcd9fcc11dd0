"""``millrace state``: what sessions, windows by count, drift and joins remember."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings


def state(
    product: Annotated[str, typer.Argument(help="Of the pipeline; without it all that remember.")] = "",
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="COLUMN=VALUE: show what is remembered of this key; again for each."),
    ] = None,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of products that remember, beside the driver that keeps it or without one."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.stateful.look import look, remembered, stateful_products

    settings = load_settings(lake=lake, pipeline=pipeline)
    loaded, place = load_pipeline(settings.pipeline_folder()), Lake(settings.lake)
    known = {found.name: found for found in stateful_products(loaded)}
    if product and product not in known:
        raise ConfigError(
            f"{product!r} remembers nothing", key="state", remedy=f"Products that do: {', '.join(known) or 'none'}"
        )
    if key:
        if not product:
            raise ConfigError(
                "a key is one of a product", key="state", remedy="millrace state PRODUCT --key COLUMN=VALUE"
            )
        found = remembered(place, loaded, known[product], dict(_pair(text) for text in key))
        _show(found, as_json)
        return
    facts = [look(place, loaded, item) for item in known.values() if not product or item.name == product]
    _show([dataclasses.asdict(item) for item in facts if item is not None], as_json)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not COLUMN=VALUE", key="key", remedy="Write e.g. --key visitor=u7")
    return name, value


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    plain = [{name: _text(value) for name, value in row.items()} for row in rows]
    if as_json:
        print_json(plain)
    elif not plain:
        err.print("nothing is remembered")
    else:
        table = Table(*plain[0], box=None, pad_edge=False)
        for row in plain:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
        out.print(table, highlight=False, markup=False)


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
