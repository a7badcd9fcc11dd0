"""``POST /v1/sql``, and ``DELETE /v1/sql/ID`` to end a statement; closing the connection ends it too."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.core.values import to_json
from serve.errors import RequestError
from serve.push.request import admitted, hung_up, invalid, json_object
from serve.sql.pool import Result, Workers

ARROW = "application/vnd.apache.arrow.stream"
_MAX_SQL = 65_536
_NAMES = frozenset({"sql", "as_of", "limit", "format", "id"})
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


async def run(request: Request) -> Response:
    """Run one statement: ``{"sql", "as_of"?, "limit"?, "format"?: "json"|"arrow", "id"?}``."""
    workers: Workers = request.state.workers
    running: dict[tuple[str, str], asyncio.Task[Result]] = request.state.statements
    principal = admitted(request)
    body = await json_object(request, 2 * _MAX_SQL, _NAMES)
    sql, as_of, limit, ident = _read(body)
    arrow = _wants_arrow(body, request)
    key = principal.key, ident
    if key in running:
        raise RequestError(4409, "taken", f"a statement {ident!r} is running")
    task = workers.start(sql, principal, as_of=as_of, rows=limit, arrow=arrow)
    running[key] = task
    gone = asyncio.create_task(hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
        result = await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise  # the server stops
        raise RequestError(4408, "cancelled", "the statement was ended") from None
    finally:
        running.pop(key, None)
        gone.cancel()
        task.cancel()
    return _answer(result, ident, arrow)


async def cancel(request: Request) -> Response:
    """End one of the caller's statements, whichever process of the port runs it."""
    ident: str = request.path_params["ident"]
    key, peers = admitted(request).key, request.state.peers
    found = end(request.state.statements, key, ident)
    if not found and peers is not None:
        found = any((await peers.ask("end", key=key, id=ident)).values())
    if not found:
        raise RequestError(RequestError.NOT_FOUND, "no_such_statement", f"no statement {ident!r} is running here")
    return Response(to_json({"id": ident, "state": "cancelling"}), 202, media_type="application/json")


def end(running: Mapping[tuple[str, str], asyncio.Task[Result]], key: str, ident: str) -> bool:
    """End a statement of this process; False if it does not run it."""
    task = running.get((key, ident))
    return task is not None and task.cancel()


ROUTES: list[BaseRoute] = [
    Route("/v1/sql", run, methods=["POST"]),
    Route("/v1/sql/{ident}", cancel, methods=["DELETE"]),
]


def _read(body: dict[str, Any]) -> tuple[str, str, int | None, str]:
    sql, as_of, limit = body.get("sql"), body.get("as_of", ""), body.get("limit")
    if not isinstance(sql, str) or not sql.strip():
        raise invalid("bad_request", "sql is a text, one statement")
    if len(sql) > _MAX_SQL:
        raise invalid("bad_request", f"sql has more than {_MAX_SQL} characters")
    if not isinstance(as_of, str | int) or isinstance(as_of, bool):
        raise invalid("bad_request", "as_of is a version or a time")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise invalid("bad_request", "limit is a whole number above 0")
    ident = body.get("id", secrets.token_hex(8))
    if not isinstance(ident, str) or not _ID.fullmatch(ident):
        raise invalid("bad_request", "id has letters, digits, _ and -, up to 64")
    return sql, str(as_of), limit, ident


def _wants_arrow(body: dict[str, Any], request: Request) -> bool:
    form = body.get("format", "arrow" if ARROW in request.headers.get("accept", "") else "json")
    if form not in ("json", "arrow"):
        raise invalid("bad_request", "format is json or arrow")
    return bool(form == "arrow")


def _answer(result: Result, ident: str, arrow: bool) -> Response:
    head = result.head
    headers = {"Cache-Control": "no-store", "Millrace-Statement": ident}
    headers["Millrace-Truncated"] = "true" if head["truncated"] else "false"
    if arrow:
        return Response(result.body, headers=headers, media_type=ARROW)
    content = {
        "id": ident,
        "columns": [{"name": name, "type": kind} for name, kind in head["columns"]],
        "rows": orjson.Fragment(result.body),
        "truncated": head["truncated"],
        "versions": head["versions"],
    }
    return Response(to_json(content), headers=headers, media_type="application/json")
