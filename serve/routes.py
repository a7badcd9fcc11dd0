"""HTTP routes: what tables there are, their current rows, health, metrics, and the dashboard's files."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from lakehouse.contract.lake import UnknownTable
from serve import history, lookup, openapi
from serve.control import routes as control
from serve.errors import RequestError
from serve.hub import Hub
from serve.peers import gathered
from serve.push import etag, longpoll
from serve.push import request as asked
from serve.push.problems import problem, refused
from serve.rows import to_json
from serve.security import routes as security
from serve.sql import routes as sql
from serve.tables import Tables
from serve.webhooks import routes as webhooks

WEB = Path(__file__).parent / "web"
_SAFE = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def json(content: Any, status: int = 200, kind: str = "application/json", **headers: str) -> Response:
    """A JSON response that nobody keeps without asking again."""
    return Response(to_json(content), status, headers={"Cache-Control": "no-cache", **headers}, media_type=kind)


async def http_error(_: Request, error: Exception) -> Response:
    """Starlette's own errors, in the same form."""
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail)


async def unknown_table(_: Request, error: Exception) -> Response:
    """A table that the lake does not have."""
    return problem(404, str(error), "no_such_table")


async def refused_request(_: Request, error: Exception) -> Response:
    """A request that cannot be served."""
    assert isinstance(error, RequestError)
    return refused(error)


async def server_error(_: Request, __: Exception) -> Response:
    """A bug; the log has it."""
    return problem(500, "the server failed; its log says how")


async def tables(request: Request) -> Response:
    """Every table, and whether it can be subscribed to."""
    hub, known, principal = _hub(request), _tables(request), asked.admitted(request)
    listed = []
    for table in await asyncio.to_thread(known.lake.tables):
        if not principal.may_read(table.name):
            continue
        channel = hub.channels.get(table.name)
        entry: dict[str, Any] = {"table": table.name, "layer": table.layer, "served": channel is not None}
        if channel is not None:
            state = channel.state
            whole = not principal.condition(table.name) and not channel.spec.narrows
            entry |= {
                "key": state.table.key,
                "columns": channel.columns,
                "version": state.version,
                "position": hub.seal.token(channel.head),
                "position_lives_ms": state.table.retention_ms,
                "committed_at": state.facts.committed_at,
            }
            if whole:  # how many others there are is not for one who sees a part
                entry |= {"rows": len(state.rows), "subscribers": channel.members()}
        elif why := known.problems.get(table.name):
            entry["detail"] = why
        listed.append(entry)
    return json({"tables": listed})


async def table(request: Request) -> Response:
    """One table's rows: as they are, or as they were."""
    return await (history.rows if "as_of" in request.query_params else etag.rows)(request)


async def subscribe(_: Request) -> Response:
    """Reached only by a request that is neither an upgrade nor for events; those never come to a route."""
    return problem(406, "subscribe with a WebSocket, or with Accept: text/event-stream on a connection of its own")


async def healthz(_: Request) -> Response:
    """The process answers."""
    return json({"status": "ok", "process": os.getpid()})


async def readyz(request: Request) -> Response:
    """Every table found is in memory."""
    known = _tables(request)
    if not known.ready:
        return problem(503, "tables are still being read")
    return json({"status": "ready", "tables": len(_hub(request).channels), "not_served": len(known.problems)})


async def metrics(request: Request) -> Response:
    """Prometheus text; of all processes of the port, where there are several."""
    if not asked.admitted(request).unlimited:
        raise RequestError(RequestError.FORBIDDEN, "forbidden", "metrics are of all tables; this key sees some only")
    registry: CollectorRegistry = request.state.registry
    text, peers = generate_latest(registry), request.state.peers
    if peers is not None:
        text = gathered({peers.name: text.decode(), **await peers.ask("metrics")})
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class Web(StaticFiles):
    """The dashboard's files, with headers that let it load nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file."""
        response = await super().get_response(path, scope)
        response.headers.update(_SAFE)
        return response


ROUTES: list[BaseRoute] = [
    Route("/v1/tables/{name}/{key:path}", lookup.row),  # the first that is tried: it comes by the thousand
    Route("/v1/tables", tables),
    Route("/v1/tables/{name}", table),
    Route("/v1/poll", longpoll.poll),
    Route("/v1/subscribe", subscribe),
    Route("/v1/sse", subscribe),
    *openapi.ROUTES,
    *sql.ROUTES,
    *webhooks.ROUTES,
    *security.ROUTES,
    *control.ROUTES,
    Route("/healthz", healthz),
    Route("/readyz", readyz),
    Route("/metrics", metrics),
    Mount("/", Web(directory=WEB, html=True, check_dir=False)),
]
HANDLERS = {
    HTTPException: http_error,
    UnknownTable: unknown_table,
    RequestError: refused_request,
    Exception: server_error,
}


def _hub(request: Request) -> Hub:
    hub: Hub = request.state.hub
    return hub


def _tables(request: Request) -> Tables:
    known: Tables = request.state.tables
    return known
