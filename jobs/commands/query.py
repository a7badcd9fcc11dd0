"""``millrace query``: continuous queries, added and removed while the driver runs."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from jobs.console import JsonOption, LakeOption, PipelineOption, err, out, print_json
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import load_settings

if TYPE_CHECKING:
    from lakehouse.contract.queries import QuerySpec

app = typer.Typer(help="Continuous queries: SQL that becomes a product with a channel.", no_args_is_help=True)


@app.command("add")
def add(
    sql: Annotated[str, typer.Option(help="One SELECT over a source or a product, or @FILE.")],
    name: Annotated[str, typer.Option(help="Of the query, its table and its channel.")],
    key: Annotated[list[str] | None, typer.Option(help="Column that names a row; again for each.")] = None,
    start: Annotated[str, typer.Option("--from", help="Over a source: now, or start (all that bronze holds).")] = "now",
    source: Annotated[str, typer.Option(help="What it reads; by default what its SQL says.")] = "",
    option: Annotated[
        list[str] | None, typer.Option("--set", help="A product's key, as in TOML: operator='top_n'; again for each.")
    ] = None,
    lake: LakeOption = None,
    pipeline: PipelineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a query and have it started; a driver that runs takes it up within a second."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.contract.queries import Declared, QuerySpec, checked_query

    settings = load_settings(lake=lake, pipeline=pipeline)
    text = Path(sql[1:]).read_text(encoding="utf-8") if sql.startswith("@") else sql
    spec = QuerySpec(name, text, source, tuple(key or ()), start, _options(option or []))
    loaded, place = load_pipeline(settings.pipeline_folder()), Lake(settings.lake)
    spec = checked_query(spec, loaded, place, settings.queries, columns_of(place))
    if spec.relation in loaded.sources:
        _check_merges(spec)
    Declared(place, QuerySpec).add(spec)
    if as_json:
        print_json({**asdict(spec), "state": "waiting"})
    else:
        err.print(f"query {name} is written down; watch it with: millrace query ls, its rows with: ", end="")
        err.print(f"millrace subscribe {name}")


@app.command("ls")
def ls(lake: LakeOption = None, pipeline: PipelineOption = None, as_json: JsonOption = False) -> None:
    """List the queries, and the pipeline's views, and how each fares."""
    from lakehouse.contract.pipeline import load_pipeline
    from lakehouse.contract.queries import Declared, QuerySpec

    settings = load_settings(lake=lake, pipeline=pipeline)
    declared = Declared(Lake(settings.lake), QuerySpec)
    views = {
        name: replace(_of_view(view), created="pipeline") for name, view in _views(load_pipeline, settings).items()
    }
    found: list[dict[str, Any]] = []
    for name, spec in {**views, **declared.all()}.items():
        state = declared.state(name)
        shown = "removing" if spec.removed else state.state
        found.append({**asdict(spec), "state": shown, "reason": state.reason})
    if as_json:
        print_json(found)
        return
    table = Table("query", "reads", "key", "from", "state", "reason")
    for row in found:
        colour = {"running": "green", "failed": "red"}.get(row["state"], "yellow")
        cells = (row["name"], row["relation"], ", ".join(row["key"]), row["start"], f"[{colour}]{row['state']}[/]")
        table.add_row(*cells, escape(row["reason"]))
    out.print(table)


@app.command("rm")
def rm(
    name: Annotated[str, typer.Argument(help="Of the query.")],
    drop: Annotated[bool, typer.Option("--drop", help="Remove its table too; without it the rows stay.")] = False,
    lake: LakeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a query and remove its checkpoint and index; its table stays unless --drop says otherwise."""
    from lakehouse.contract.errors import QueryRefused
    from lakehouse.contract.queries import Declared, QuerySpec
    from lakehouse.errors import TableBusy
    from lakehouse.lock import WriterLocks
    from lakehouse.queries.forget import forget, is_ours

    place = Lake(load_settings(lake=lake).lake)
    declared = Declared(place, QuerySpec)
    spec = declared.all().get(name)
    if spec is None and not (drop and is_ours(place, name)):
        raise QueryRefused("unknown", f"there is no query {name!r}", "millrace query ls shows those there are")
    if spec is not None:
        declared.replace(replace(spec, removed=True, drop=drop))
    done = True
    try:
        with WriterLocks(place, [name]):  # nobody runs it: it is cleared away at once
            forget(place, name, drop=drop)
    except TableBusy:
        done = False
    if as_json:
        print_json({"name": name, "removed": done, "dropped": drop and done})
    else:
        err.print(f"query {name} is removed" if done else f"query {name} is being removed by the driver")


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
    from lakehouse.contract.errors import QueryRefused
    from lakehouse.errors import BadProduct
    from lakehouse.operators import operator_of

    try:
        operator_of(spec.product())
    except BadProduct as bad:
        raise QueryRefused("sql", bad.problem, bad.remedy) from None


def _options(given: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads("\n".join(given))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML: {error}", key="--set", remedy="Write e.g. --set \"operator='top_n'\"") from None


def _views(load: Any, settings: Any) -> dict[str, Any]:
    try:
        return dict(load(settings.pipeline_folder()).views)
    except ConfigError:  # the queries of a lake can be listed without its pipeline
        return {}


def _of_view(view: Any) -> QuerySpec:
    from lakehouse.contract.queries import QuerySpec

    return QuerySpec(view.name, view.sql, view.base, view.key, created="pipeline")
