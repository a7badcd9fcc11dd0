"""``POST /v1/sql``: one reading statement, in a worker process."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.core.messages import to_json
from serve.errors import RequestError
from serve.push.request import admitted, hung_up, json_body
from serve.sql.pool import Workers
from serve.sql.statement import StatementResult

ARROW = "application/vnd.apache.arrow.stream"
_MAX_SQL = 65_536


class NewStatement(msgspec.Struct, forbid_unknown_fields=True):
    """A statement to be run.

    Attributes:
        as_of: version or time of tables without one in the text.
        limit: rows at most.
        format: of the answer; absent: as the header ``Accept`` has it, by default JSON.
    """

    sql: Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_SQL)]
    as_of: str | int = ""
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    format: Literal["json", "arrow"] | None = None


async def run(request: Request) -> Response:
    """Run one reading statement; hanging up ends it"""
    workers: Workers = request.state.workers
    new = await json_body(request, 2 * _MAX_SQL, NewStatement)
    arrow = new.format == "arrow" if new.format else ARROW in request.headers.get("accept", "")
    sources = request.state.files.pipeline.sources.values()
    task = workers.start(new.sql, admitted(request), as_of=str(new.as_of), rows=new.limit, arrow=arrow, sources=sources)
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
        gone.cancel()
        task.cancel()
    return _answer(result, arrow)


ROUTES: list[BaseRoute] = [Route("/v1/sql", run, methods=["POST"])]


def _answer(result: StatementResult, arrow: bool) -> Response:
    headers = {"Cache-Control": "no-store", "Millrace-Truncated": "true" if result.truncated else "false"}
    if arrow:
        return Response(result.body, headers=headers, media_type=ARROW)
    content = {
        "columns": [{"name": name, "type": kind} for name, kind in result.columns],
        "rows": orjson.Fragment(result.body),
        "truncated": result.truncated,
        "versions": result.versions,
    }
    return Response(to_json(content), headers=headers, media_type="application/json")
