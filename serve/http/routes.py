"""All HTTP routes, and the access check in front of them: a request without a good key gets no further.

Streams that own their connection (:mod:`serve.push.base`) ask the same gate themselves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from lakehouse.contract.lake import Lake, UnknownTable
from serve.access import LIVES_S, ReaderGate, needs_key
from serve.core.hub import Hub
from serve.errors import RequestError
from serve.http import catalog, schema
from serve.http.metrics import ServerMetrics
from serve.http.rows import history, row, rows
from serve.push import longpoll
from serve.push.request import admitted, http_error, json_response, problem, refused, refused_request
from serve.sql import routes as sql
from serve.tables.tables import Tables
from serve.webhooks import routes as webhooks

WEB = Path(__file__).parents[1] / "web"
_SAFE = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_REPORT = _SAFE | {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; sandbox"
    ),
    "Cache-Control": "private, no-cache",
}
"""Headers of the report on quality: its pages run no script, whatever is in the data that they show."""


class AccessMiddleware:
    """ASGI middleware: puts the principal into the request's state, or refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and needs_key(scope["path"]):
            gate: ReaderGate = scope["state"]["gate"]
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            try:
                scope["state"]["principal"] = gate.admit(headers, scope["query_string"].decode("latin-1"))
            except RequestError as error:
                await refused(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def middleware(origins: Sequence[str]) -> list[Middleware]:
    """What stands in front of the routes. Pages of ``origins`` may read answers."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["authorization", "x-api-key", "content-type", "if-none-match", "last-event-id"],
        expose_headers=["etag", "retry-after"],
    )
    return [cors, Middleware(AccessMiddleware)]


async def new_ticket(request: Request) -> Response:
    """A ticket for one stream of a browser, good for 30 s, with the rights of the caller's key"""
    gate: ReaderGate = request.state.gate
    return json_response({"ticket": gate.ticket(admitted(request)), "lives_s": LIVES_S}, 201)


async def unknown_table(_: Request, error: Exception) -> Response:
    return problem(404, str(error), "no_such_table")


async def server_error(_: Request, __: Exception) -> Response:
    """A bug; the log has it."""
    return problem(500, "the server failed; its log says how")


async def subscribe(_: Request) -> Response:
    """WebSocket, or events with Accept: text/event-stream: ``?table=&from=&where=&columns=&select=&conflate=&window=``

    Upgrades and requests for events never reach this route.
    """
    return problem(406, "subscribe with a WebSocket, or with Accept: text/event-stream on a connection of its own")


async def healthz(_: Request) -> Response:
    """The process answers"""
    return json_response({"status": "ok", "process": os.getpid()})


async def readyz(request: Request) -> Response:
    """Every table found is in memory"""
    hub: Hub = request.state.hub
    known: Tables = request.state.tables
    if not known.ready:
        return problem(503, "tables are still being read")
    return json_response({"status": "ready", "tables": len(hub.channels), "not_served": len(known.problems)})


async def metrics(request: Request) -> Response:
    """Prometheus text of all processes of the port"""
    if not admitted(request).unlimited:
        raise RequestError(RequestError.FORBIDDEN, "forbidden", "metrics are of all tables; this key sees some only")
    known: ServerMetrics = request.state.metrics
    return Response(known.text(), media_type=CONTENT_TYPE_LATEST)


async def data_docs(request: Request) -> Response:
    """A page of the Data Docs that the newest run of millrace quality wrote"""
    if not admitted(request).unlimited:
        raise RequestError(RequestError.FORBIDDEN, "forbidden", "the report is of all tables; this key sees some only")
    lake = Lake.of(request.state.settings)
    files = StaticFiles(directory=lake.data_docs, check_dir=False)
    try:
        response = await files.get_response(request.path_params["path"], request.scope)
    except HTTPException:
        detail = "millrace quality has written no such page"
        raise RequestError(RequestError.NOT_FOUND, "no_such_page", detail) from None
    response.headers.update(_REPORT)
    return response


class Web(StaticFiles):
    """The dashboard's files, with headers that forbid loading anything from elsewhere."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_SAFE)
        return response


ROUTES: list[BaseRoute] = [
    Route("/v1/tables/{name}/{key:path}", row),  # first, because it is called by the thousand
    Route("/v1/tables/{name}", rows),
    Route("/v1/history/{name}", history),
    Route("/v1/poll", longpoll.poll),
    Route("/v1/subscribe", subscribe),
    Route("/v1/quality/{path:path}", data_docs),
    *catalog.ROUTES,
    *schema.ROUTES,
    *sql.ROUTES,
    *webhooks.ROUTES,
    Route("/v1/tickets", new_ticket, methods=["POST"]),
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
