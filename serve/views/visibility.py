"""Which rows and columns of a table a subscriber sees.

Its request is applied under its principal's condition, to the channel that the pipeline declares
(``[products.NAME.channel]``). Snapshot, changes, resume, look-ups and history all use this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.product import EVERYTHING, ChannelSpec
from lakehouse.contract.sql.closures import Columns
from lakehouse.contract.sql.filters import checked, conjunction, parse_condition
from lakehouse.contract.tomlfile import line_of
from serve.core.model import SubscribeRequest, TableInfo
from serve.errors import FilterError
from serve.views.aggregate import aggregate_view
from serve.views.view import SubscriberView, rows_view

NOT_SERVED = "its pipeline declares that it has no channel; query it with SQL"


def channels_of(pipeline: Pipeline) -> dict[str, ChannelSpec]:
    """The declared channels of products and views.

    Raises:
        ConfigError: a condition is not SQL, or not allowed in filters. Its columns are checked when the table is known
            (:func:`visible`, :func:`view_of`).
    """
    found = {name: product.channel for name, product in pipeline.products.items()}
    found |= {name: view.channel for name, view in pipeline.views.items()}
    for name, spec in found.items():
        try:
            if spec.where:
                checked(spec.where)
        except FilterError as error:
            raise ConfigError(
                str(error),
                key=f"products.{name}.channel.where",
                remedy="docs/protocol.md lists what a filter may hold",
                file=pipeline.path,
                line=line_of(pipeline.path, f"{name}.channel") or line_of(pipeline.path, name),
            ) from None
    return found


def visible(table: TableInfo, spec: ChannelSpec) -> TableInfo:
    """The table with the columns that subscribers may see. Raises FilterError if one is missing."""
    if not spec.columns:
        return table
    known = Columns.of(table)
    chosen = {known.resolve(name) for name in spec.columns} | set(table.key)
    at = [i for i, name in enumerate(table.columns) if name in chosen]
    types = tuple(table.types[i] for i in at) if table.types else ()
    return replace(table, columns=tuple(table.columns[i] for i in at), types=types)


def view_of(table: TableInfo, request: SubscribeRequest, guard: str, spec: ChannelSpec = EVERYTHING) -> SubscriberView:
    """The view for a request.

    Args:
        table: the table as it is.
        request: filter, columns or aggregate. It may name visible columns only.
        guard: its principal's condition, on any column.
        spec: the declared channel.

    Raises:
        FilterError: the request is refused, or the declaration does not fit the table.
    """
    seen = visible(table, spec)
    known = Columns.of(table)
    both = conjunction(*(parse_condition(text, known) for text in (spec.where, guard)))
    guard = "" if both is None else both.sql("duckdb")
    if request.select and request.columns:
        raise FilterError("columns and select are two ways to say the same", "Give one of them")
    if request.select:
        return aggregate_view(table, request.select, request.where, guard, seen)
    columns = request.columns or (seen.columns if spec.columns else ())
    return rows_view(table, request.where, columns, guard, seen)


def channel_problem(table: TableInfo, specs: Mapping[str, ChannelSpec]) -> str:
    """Why the declared channel does not fit the table; empty if it fits."""
    spec = specs.get(table.name, EVERYTHING)
    try:
        if spec.narrows:
            view_of(table, SubscribeRequest(table.name), "", spec)
    except FilterError as error:
        return str(error)
    return ""
