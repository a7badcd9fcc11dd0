"""``query``: continuous queries and alerts, added and removed while the driver runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jobs.console import (
    JsonOption,
    chosen_pipeline,
    chosen_settings,
    err,
    print_json,
    print_table,
)
from lakehouse.contract.errors import ConfigError, QueryRefused
from lakehouse.contract.lake import Lake

if TYPE_CHECKING:
    from lakehouse.contract.pipeline.added import QuerySpec
    from lakehouse.contract.pipeline.folder import Alert, View


def add(
    sql: Annotated[str, typer.Option(help="One SELECT over a source or a product, or @FILE.")],
    name: Annotated[str, typer.Option(help="Name of the query, its table and its channel.")],
    key: Annotated[list[str] | None, typer.Option(help="Column of the key; repeat it for each.")] = None,
    start: Annotated[str, typer.Option("--from", help="Over a source: now, or start (all that bronze holds).")] = "now",
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE of a product as in TOML, e.g. operator='top_n'; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a continuous query and register it; a running driver starts it within a second."""
    from lakehouse.contract.pipeline.added import Declared, QuerySpec, checked_query

    settings, loaded = chosen_pipeline()
    text = Path(sql[1:]).read_text(encoding="utf-8") if sql.startswith("@") else sql
    spec = QuerySpec(name, text, key=tuple(key or ()), start=start, options=_options(option or []))
    place = Lake.of(settings)
    spec = checked_query(spec, loaded, place, settings.queries, columns_of(place))
    if spec.relation in loaded.sources:
        _check_merges(spec)
    Declared(place, QuerySpec).add(spec)
    if as_json:
        print_json({**asdict(spec), "state": "waiting"})
    else:
        err.print(f"query {name} is registered; its state: millrace query ls; its rows: ", end="")
        err.print(f"millrace subscribe {name}")


def alert(
    name: Annotated[str, typer.Option(help="Name of the alert.")],
    product: Annotated[str, typer.Option(help="Product or view to watch.")],
    when: Annotated[str, typer.Option(help="SQL condition over its columns that raises the alert.")],
    clear: Annotated[
        str, typer.Option(help="SQL condition that clears it.", show_default="the condition is not true")
    ] = "",
    patience: Annotated[str, typer.Option("--for", help="Versions or duration that the condition must hold.")] = "1",
    hold: Annotated[str, typer.Option(help="Versions or duration that the clearing condition must hold.")] = "1",
    by: Annotated[list[str] | None, typer.Option(help="Column that tells alerts apart; repeat it for each.")] = None,
    value: Annotated[str, typer.Option(help="SQL expression of the number that the alert carries.")] = "",
    time: Annotated[str, typer.Option(help="Timestamp column that durations are measured by.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Check an alert and register it; a running driver watches it within a second."""
    from lakehouse.contract.pipeline.added import Declared, checked_alert
    from lakehouse.contract.pipeline.folder import Alert

    settings, loaded = chosen_pipeline()
    place = Lake.of(settings)
    made = Alert(product, when, clear, _patience(patience), _patience(hold), tuple(by or ()), value, time, name)
    Declared(place, Alert).add(checked_alert(made, loaded, place, settings.queries, columns_of(place)))
    if as_json:
        print_json(_alert_row(made))
    else:
        err.print(f"alert {name} is registered; follow it with: millrace subscribe alerts")


def ls(as_json: JsonOption = False) -> None:
    """List queries, views and alerts with their state; --json prints {"queries": […], "alerts": […]}."""
    settings = chosen_settings()
    try:
        _, pipeline = chosen_pipeline()
        views, alerts = dict(pipeline.views), dict(pipeline.alerts)
    except ConfigError:  # a lake's queries can be listed without its pipeline
        views, alerts = {}, {}
    place = Lake.of(settings)
    queries, watched = _query_rows(place, views), _alert_rows(place, alerts)
    if as_json:
        print_json({"queries": queries, "alerts": watched})
        return
    rows = [
        (q["name"], q["relation"], ", ".join(q["key"]), q["start"], _colored(q["state"]), escape(q["reason"]))
        for q in queries
    ]
    print_table(("query", "reads", "key", "from", "state", "reason"), rows)
    if watched:
        rows = [
            (
                a["name"],
                a["product"],
                escape(a["when"]),
                _colored(a["state"]),
                str(len(a["raised"])),
                escape(a["reason"]),
            )
            for a in watched
        ]
        print_table(("alert", "product", "when", "state", "raised", "reason"), rows, right=("raised",))


def rm(
    name: Annotated[str, typer.Argument(help="Name of the query or alert.")],
    drop: Annotated[bool, typer.Option("--drop", help="Remove the query's table too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove an alert and its rows, or stop a query and remove its checkpoint and index.

    A query's table stays without --drop. Where a query and an alert have the same name, the query goes first.
    """
    from lakehouse.contract.pipeline.added import Declared, QuerySpec
    from lakehouse.contract.pipeline.folder import Alert

    place = Lake.of(chosen_settings())
    if name in Declared(place, Alert).all() and name not in Declared(place, QuerySpec).all():
        Declared(place, Alert).remove(name)
        done, drop = True, False
    else:
        done = _remove_query(place, name, drop)
    if as_json:
        print_json({"name": name, "removed": done, "dropped": drop and done})
    else:
        err.print(f"{name} is removed" if done else f"{name} is being removed by the driver")


def _remove_query(place: Lake, name: str, drop: bool) -> bool:
    """Whether it is gone; False: the driver that runs it will remove it."""
    from lakehouse.contract.pipeline.added import Declared, QuerySpec
    from lakehouse.derived.derivations import forget, is_ours
    from lakehouse.errors import TableBusy
    from lakehouse.lock import WriterLocks

    declared = Declared(place, QuerySpec)
    spec = declared.all().get(name)
    if spec is None and not (drop and is_ours(place, name)):
        raise QueryRefused(
            "unknown",
            f"there is no query or alert {name!r} that was added",
            "millrace query ls lists them; those of the pipeline are removed from its pipeline.toml",
        )
    if spec is not None:
        declared.replace(replace(spec, removed=True, drop=drop))
    try:
        with WriterLocks(place, [name]):  # nobody runs it: it is cleared away at once
            forget(place, name, drop=drop)
    except TableBusy:
        return False
    return True


def _query_rows(place: Lake, views: Mapping[str, View]) -> list[dict[str, Any]]:
    from lakehouse.contract.pipeline.added import Declared, QuerySpec

    declared = Declared(place, QuerySpec)
    shown = {name: QuerySpec(name, view.sql, view.base, view.key, created="pipeline") for name, view in views.items()}
    found = []
    for name, spec in {**shown, **declared.all()}.items():
        state = declared.state(name)
        found.append({**asdict(spec), "state": "removing" if spec.removed else state.state, "reason": state.reason})
    return found


def _alert_rows(place: Lake, own: Mapping[str, Alert]) -> list[dict[str, Any]]:
    from lakehouse.contract.pipeline.added import Declared
    from lakehouse.contract.pipeline.folder import Alert

    declared = Declared(place, Alert)
    raised = _raised(place)
    found = []
    for name, one in {**declared.all(), **own}.items():
        state = declared.state(name)
        keys = sorted(raised.get(name, []))
        found.append({**_alert_row(one), "state": state.state, "reason": state.reason, "raised": keys})
    return found


def _colored(state: str) -> str:
    colour = {"running": "green", "failed": "red"}.get(state, "yellow")
    return f"[{colour}]{state}[/]"


def columns_of(lake: Lake) -> dict[str, tuple[str, ...]]:
    """Columns of the tables that there are."""
    from deltalake import DeltaTable

    return {
        ref.name: tuple(field.name for field in DeltaTable(str(ref.path)).schema().fields)
        for ref in lake.tables()
        if ref.layer != "bronze"
    }


def _check_merges(spec: QuerySpec) -> None:
    """Refuse now what the driver would refuse later: an aggregate that does not merge."""
    from lakehouse.errors import BadProduct
    from lakehouse.operators.registry import operator_of

    try:
        operator_of(spec.product())
    except BadProduct as bad:
        raise QueryRefused("sql", bad.problem, bad.remedy) from None


def _options(given: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads("\n".join(given))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"not TOML: {error}", key="--option", remedy="Write e.g. --option \"operator='top_n'\""
        ) from None


def _alert_row(alert: Alert) -> dict[str, Any]:
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
