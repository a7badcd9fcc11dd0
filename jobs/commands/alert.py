"""``millrace alert``: conditions over products, added and removed while the driver runs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

if TYPE_CHECKING:
    from lakehouse.contract.alerts import Alert

app = typer.Typer(help="Alerts: one push when a condition comes about, one when it ends.", no_args_is_help=True)


@app.command("add")
def add(
    name: Annotated[str, typer.Option(help="Of the alert.")],
    product: Annotated[str, typer.Option(help="The product or view it looks at.")],
    when: Annotated[str, typer.Option(help="SQL condition over its columns.")],
    clear: Annotated[str, typer.Option(help="SQL condition that ends it; by default that `when` is not true.")] = "",
    patience: Annotated[str, typer.Option("--for", help="Versions or duration that it must hold.")] = "1",
    hold: Annotated[str, typer.Option(help="Versions or duration that `clear` must hold.")] = "1",
    by: Annotated[list[str] | None, typer.Option(help="Column that tells alerts apart; again for each.")] = None,
    value: Annotated[str, typer.Option(help="SQL expression of the number it carries.")] = "",
    time: Annotated[str, typer.Option(help="Timestamp column that durations go by.")] = "",
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an alert and have it watched; a driver that runs takes it up within a second."""
    from jobs.commands.query import columns_of
    from lakehouse.contract.alerts import Alert
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.contract.queries import Declared, checked_alert

    settings = load_settings(lake=lake, pipeline=pipeline)
    place = Lake(settings.lake)
    alert = Alert(product, when, clear, _patience(patience), _patience(hold), tuple(by or ()), value, time, name)
    loaded = load_pipeline(settings.pipeline_folder())
    Declared(place, Alert).add(checked_alert(alert, loaded, place, settings.queries, columns_of(place)))
    if as_json:
        print_json(_shown(alert))
    else:
        err.print(f"alert {name} is written down; follow it with: millrace subscribe alerts")


@app.command("ls")
def ls(lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """List the alerts, how each fares, and for how many keys it stands."""
    from lakehouse.contract.alerts import Alert
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.contract.queries import Declared

    settings = load_settings(lake=lake, pipeline=pipeline)
    place = Lake(settings.lake)
    declared = Declared(place, Alert)
    try:
        own = load_pipeline(settings.pipeline_folder()).alerts
    except ConfigError:
        own = {}
    raised = _raised(place)
    found: list[dict[str, Any]] = []
    for name, alert in {**declared.all(), **own}.items():
        state = declared.state(name)
        keys = sorted(raised.get(name, []))
        found.append({**_shown(alert), "state": state.state, "reason": state.reason, "raised": keys})
    if as_json:
        print_json(found)
        return
    table = Table("alert", "product", "when", "state", "raised", "reason")
    for row in found:
        colour = {"running": "green", "failed": "red"}.get(row["state"], "yellow")
        shown = f"[{colour}]{row['state']}[/]"
        table.add_row(
            row["name"], row["product"], escape(row["when"]), shown, str(len(row["raised"])), escape(row["reason"])
        )
    out.print(table)


@app.command("rm")
def rm(name: Annotated[str, typer.Argument(help="Of the alert.")], lake: LakeOption = None) -> None:
    """Remove an alert that was added; its rows go from table alerts."""
    from lakehouse.contract.alerts import Alert
    from lakehouse.contract.errors import QueryRefused
    from lakehouse.contract.queries import Declared

    declared = Declared(Lake(load_settings(lake=lake).lake), Alert)
    if name not in declared.all():
        raise QueryRefused(
            "unknown", f"no alert {name!r} was added", "One of the pipeline is removed from its pipeline.toml"
        )
    declared.remove(name)
    err.print(f"alert {name} is removed")


def _shown(alert: Alert) -> dict[str, Any]:
    return {f.metadata.get("key", f.name): getattr(alert, f.name) for f in fields(alert)}


def _patience(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _raised(lake: Lake) -> dict[str, list[str]]:
    from deltalake import DeltaTable

    table = lake.table("gold", "alerts")
    if not table.exists():
        return {}
    found: dict[str, list[str]] = {}
    for row in DeltaTable(str(table.path)).to_pyarrow_table(columns=["alert", "key", "state"]).to_pylist():
        if row["state"] == "raised":
            found.setdefault(row["alert"], []).append(row["key"])
    return found
