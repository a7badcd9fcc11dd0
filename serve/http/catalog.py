"""What there is: ``GET /v1/tables``, each table's declaration and how it fares; and the continuous queries.

Queries are added, listed and removed by the rules of ``lakehouse.contract.pipeline.added``. A query is only recorded
here; the driver runs it. So the server needs no Java, and queries can be added while the driver is down. Only keys that
may (``millrace key new --may queries``) and that see everything can change queries, because a query reads whole
tables. Without keys, only callers on this machine can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakehouse.contract.access import is_loopback
from lakehouse.contract.errors import ConfigError, MillraceError, QueryRefused
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.added import Declared, QuerySpec, State, checked_query
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.contract.pipeline.product import TAKEN_BY
from lakehouse.contract.settings import Settings
from lakehouse.contract.sql.closures import Columns
from serve.core.channel import Channel
from serve.core.hub import Hub
from serve.core.model import Principal
from serve.errors import RequestError
from serve.push.request import admitted, invalid, json_body, json_response, problem
from serve.tables.tables import Tables, now_ms

AGGREGATE, VIEW, STAGING = "aggregate", "view", "staging"
"""Kinds of tables that no operator makes."""
MAX_BODY = 65_536
_STATUS = {"taken": 409, "quota": 429, "unknown": 404}


async def tables(request: Request) -> Response:
    """Every table: what it is declared to be, whether it can be subscribed to, and how it fares"""
    hub: Hub = request.state.hub
    known: Tables = request.state.tables
    principal = admitted(request)
    found, declared, reported = await asyncio.to_thread(_found, known.lake, request.state.files.pipeline)
    listed = []
    for table in found:
        if not principal.may_read(table.name):
            continue
        channel = hub.channels.get(table.name)
        entry: dict[str, Any] = {"table": table.name, "layer": table.layer, "served": channel is not None}
        if table.name in declared:
            entry["declared"] = declared[table.name]
        if channel is not None:
            entry |= _fares(channel, principal) | {"position": hub.seal.token(channel.state.position())}
        elif why := known.problems.get(table.name):
            entry["detail"] = why
        listed.append(entry)
    report = {"report": "v1/quality/index.html"} if reported and principal.unlimited else {}
    return json_response({"tables": listed} | report)


def _fares(channel: Channel, principal: Principal) -> dict[str, Any]:
    state, seen = channel.state, channel.seen
    told: dict[str, Any] = {
        "key": state.table.key,
        "columns": seen.columns,
        "types": {name: kind for name, (_, kind) in Columns.of(seen).at.items()},
        "version": state.version,
        "position_lives_ms": state.table.retention_ms,
        "committed_at": state.facts.committed_at,
        "newest_at": state.facts.newest_at,
    }
    if not principal.condition(channel.name) and not channel.spec.narrows:  # others would learn of what they cannot see
        told |= {"rows": len(state.rows), "subscribers": channel.members()}
        told["events_per_s"] = channel.events_per_s(now_ms())
    return told


def _found(lake: Lake, pipeline: Pipeline) -> tuple[list[TableRef], dict[str, dict[str, Any]], bool]:
    return lake.tables(), dict(declarations(lake, pipeline)), (lake.data_docs / "index.html").is_file()


def declarations(lake: Lake, pipeline: Pipeline) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each table is declared to be, by the pipeline and by queries of the moment."""
    for product in pipeline.products.values():
        yield product.name, _of_product(product)
    for view in pipeline.views.values():
        yield view.name, {"kind": VIEW, "from": [view.base]}
    for copy in pipeline.staging.values():
        yield copy.name, {"kind": STAGING, "from": [copy.product]}
    for spec in Declared(lake, QuerySpec).all().values():
        declared = {"kind": VIEW, "from": [spec.relation]}
        if spec.relation in pipeline.sources:
            try:
                declared = _of_product(spec.product())
            except MillraceError:
                continue  # of another version
        yield spec.name, declared | {"query": True}


def _of_product(product: Product) -> dict[str, Any]:
    declared: dict[str, Any] = {
        "kind": product.operator or AGGREGATE,
        "from": [product.source, *([product.right] if product.right else [])],
    }
    taken = [name for name in ("window", "by", "item") if product.operator in TAKEN_BY[name]]
    return declared | {name: getattr(product, name) for name in taken if getattr(product, name)}


class NewQuery(msgspec.Struct, forbid_unknown_fields=True):
    """A query to be added; see ``lakehouse.contract.pipeline.added``."""

    name: str
    sql: str
    key: tuple[str, ...] = ()
    start: str = msgspec.field(name="from", default="now")
    source: str = ""
    options: dict[str, str | bool | int | float | list[Any]] = {}


async def list_queries(request: Request) -> Response:
    """Continuous queries with their states"""
    principal = admitted(request)
    found = await asyncio.to_thread(_listed, request.state.settings)
    return json_response({"queries": [each for each in found if principal.may_read(each["name"])]})


async def show_query(request: Request) -> Response:
    """A continuous query, and how it fares"""
    name = request.path_params["name"]
    for found in await asyncio.to_thread(_listed, request.state.settings):
        if found["name"] == name and admitted(request).may_read(name):
            return json_response(found)
    raise RequestError(RequestError.NOT_FOUND, "no_such_query", f"there is no query {name!r}")


async def add_query(request: Request) -> Response:
    """Check and add a continuous query"""
    _check_may(request)
    new = await json_body(request, MAX_BODY, NewQuery)
    spec = QuerySpec(new.name, new.sql, new.source, new.key, new.start, new.options)
    hub: Hub = request.state.hub
    columns = {name: channel.state.table.columns for name, channel in hub.channels.items()}
    try:
        made = await asyncio.to_thread(_add, request.state.settings, spec, columns)
    except QueryRefused as refused:
        return problem(_STATUS.get(refused.code, 422), refused.problem, refused.code, remedy=refused.remedy)
    return json_response(_shown(made, State("waiting")), 201, Location=f"/v1/queries/{made.name}")


async def remove_query(request: Request) -> Response:
    """Have the driver stop and remove a continuous query: ``?drop=``"""
    _check_may(request)
    drop = request.query_params.get("drop", "false")
    if drop not in ("true", "false"):
        raise invalid("bad_request", "drop is true or false")
    name = request.path_params["name"]
    if not await asyncio.to_thread(_remove, request.state.settings, name, drop == "true"):
        raise RequestError(RequestError.NOT_FOUND, "no_such_query", f"there is no query {name!r}")
    return json_response({"name": name, "state": "removing", "drop": drop == "true"}, 202)


ROUTES: list[BaseRoute] = [
    Route("/v1/tables", tables),
    Route("/v1/queries", list_queries, methods=["GET"]),
    Route("/v1/queries", add_query, methods=["POST"]),
    Route("/v1/queries/{name}", show_query, methods=["GET"]),
    Route("/v1/queries/{name}", remove_query, methods=["DELETE"]),
]


def _add(settings: Settings, spec: QuerySpec, columns: dict[str, tuple[str, ...]]) -> QuerySpec:
    lake = Lake.of(settings)
    try:
        pipeline = declared_pipeline(settings)
    except ConfigError as error:
        raise RequestError(RequestError.FULL, "busy", f"the server's pipeline cannot be read: {error}") from None
    checked = checked_query(spec, pipeline, lake, settings.queries, columns)
    Declared(lake, QuerySpec).add(checked)
    return checked


def _remove(settings: Settings, name: str, drop: bool) -> bool:
    declared = Declared(Lake.of(settings), QuerySpec)
    spec = declared.all().get(name)
    if spec is None:
        return False
    declared.replace(replace(spec, removed=True, drop=drop or spec.drop))
    return True


def _listed(settings: Settings) -> list[dict[str, Any]]:
    declared = Declared(Lake.of(settings), QuerySpec)
    return [_shown(spec, declared.state(name)) for name, spec in declared.all().items()]


def _shown(spec: QuerySpec, state: State) -> dict[str, Any]:
    shown = {
        "name": spec.name,
        "sql": spec.sql,
        "source": spec.relation,
        "key": list(spec.key),
        "from": spec.start,
        "options": spec.options,
        "created": spec.created,
        "state": "removing" if spec.removed else state.state,
    }
    return shown | ({"detail": state.reason} if state.reason else {})


def _check_may(request: Request) -> None:
    """Only a key with the right may change queries; without keys, only this machine, and no page of another site."""
    principal = admitted(request)
    if not principal.queries:
        raise _forbidden("this key may not change queries; make one with: millrace key new NAME --may queries")
    if principal.key:
        return
    settings: Settings = request.state.settings
    if not is_loopback(settings.serve.host):
        raise _forbidden("queries are changed on a loopback address, or with millrace query, only")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise _forbidden("a page of another site may not do this")


def _forbidden(detail: str) -> RequestError:
    return RequestError(RequestError.FORBIDDEN, "forbidden", detail)
