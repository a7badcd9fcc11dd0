"""What there is: ``GET /v1/tables``, what each table is declared to be and how it fares; and the report on quality."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.added import Declared, QuerySpec
from lakehouse.contract.pipeline.product import TAKEN_BY
from lakehouse.contract.sql.closures import Columns
from serve.core.channel import Channel
from serve.core.hub import Hub
from serve.core.model import Principal
from serve.errors import RequestError
from serve.push.request import admitted, json_response
from serve.tables.tables import Tables, now_ms

_REPORT = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; sandbox"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "private, no-cache",
}
"""Headers of the report: its pages run no script, whatever is in the data that they show."""
AGGREGATE, VIEW, STAGING = "aggregate", "view", "staging"
"""Kinds of tables that no operator makes."""


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
            entry |= _fares(channel, principal) | {"position": hub.seal.token(channel.head)}
        elif why := known.problems.get(table.name):
            entry["detail"] = why
        listed.append(entry)
    report = {"report": "v1/quality/index.html"} if reported and principal.unlimited else {}
    return json_response({"tables": listed} | report)


async def data_docs(request: Request) -> Response:
    """A page of the Data Docs that the newest run of millrace quality wrote"""
    if not admitted(request).unlimited:
        raise RequestError(RequestError.FORBIDDEN, "forbidden", "the report is of all tables; this key sees some only")
    known: Tables = request.state.tables
    files = StaticFiles(directory=known.lake.data_docs, check_dir=False)
    try:
        response = await files.get_response(request.path_params["path"], request.scope)
    except HTTPException:
        raise RequestError(
            RequestError.NOT_FOUND, "no_such_page", "millrace quality has written no such page"
        ) from None
    response.headers.update(_REPORT)
    return response


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
