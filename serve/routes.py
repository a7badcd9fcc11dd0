"""HTTP routes: what tables there are, their current rows, health, metrics, and the dashboard's files."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from lakehouse.contract.lake import UnknownTable
from serve.hub import Hub
from serve.rows import to_json
from serve.tables import Tables

WEB = Path(__file__).parent / "web"
_MAX_LIMIT = 100_000
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


def problem(status: int, detail: str) -> Response:
    """An error as RFC 9457 has it."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return json(content, status, "application/problem+json")


async def http_error(_: Request, error: Exception) -> Response:
    """Starlette's own errors, in the same form."""
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail)


async def unknown_table(_: Request, error: Exception) -> Response:
    """A table that the lake does not have."""
    return problem(404, str(error))


async def server_error(_: Request, __: Exception) -> Response:
    """A bug; the log has it."""
    return problem(500, "the server failed; its log says how")


async def tables(request: Request) -> Response:
    """Every table, and whether it can be subscribed to."""
    hub, known = _hub(request), _tables(request)
    listed = []
    for table in await asyncio.to_thread(known.lake.tables):
        channel = hub.channels.get(table.name)
        entry: dict[str, Any] = {"table": table.name, "layer": table.layer, "served": channel is not None}
        if channel is not None:
            state = channel.state
            entry |= {
                "key": state.table.key,
                "columns": state.table.columns,
                "version": state.version,
                "position": channel.head.token(),
                "rows": len(state.rows),
                "committed_at": state.facts.committed_at,
                "subscribers": sum(len(lane.members()) for lane in channel.lanes.values()),
            }
        elif why := known.problems.get(table.name):
            entry["detail"] = why
        listed.append(entry)
    return json({"tables": listed})


async def rows(request: Request) -> Response:
    """A table's current rows, from memory."""
    hub, known = _hub(request), _tables(request)
    name: str = request.path_params["name"]
    limit = _limit(request.query_params.get("limit"))
    await known.wait_for(name)
    channel = hub.channels.get(name)
    if channel is None:
        why = known.problems.get(name)
        if why is None:
            table = known.lake.find(name)
            why = f"{table.layer} table {name!r} is not kept in memory; query it with SQL"
        return problem(409, why)
    state = channel.state
    content = {
        "table": name,
        "key": state.table.key,
        "columns": state.table.columns,
        "position": channel.head.token(),
        "rows": [orjson.Fragment(row) for row in channel.rows(limit)],
        "through": state.facts.through,
        "committed_at": state.facts.committed_at,
    }
    return json(content)


async def healthz(_: Request) -> Response:
    """The process answers."""
    return json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Every table found is in memory."""
    known = _tables(request)
    if not known.ready:
        return problem(503, "tables are still being read")
    return json({"status": "ready", "tables": len(_hub(request).channels), "not_served": known.problems})


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    registry: CollectorRegistry = request.state.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Web(StaticFiles):
    """The dashboard's files, with headers that let it load nothing from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """The file."""
        response = await super().get_response(path, scope)
        response.headers.update(_SAFE)
        return response


ROUTES: list[BaseRoute] = [
    Route("/v1/tables", tables),
    Route("/v1/tables/{name}", rows),
    Route("/healthz", healthz),
    Route("/readyz", readyz),
    Route("/metrics", metrics),
    Mount("/", Web(directory=WEB, html=True, check_dir=False)),
]
HANDLERS = {HTTPException: http_error, UnknownTable: unknown_table, Exception: server_error}


def _hub(request: Request) -> Hub:
    hub: Hub = request.state.hub
    return hub


def _tables(request: Request) -> Tables:
    known: Tables = request.state.tables
    return known


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_LIMIT:
        raise HTTPException(400, f"limit is a whole number from 1 to {_MAX_LIMIT}")
    return int(text)
