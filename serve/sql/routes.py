"""``POST /v1/sql``: one reading statement, in one of a few worker processes. They are killed instead of waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings
from serve.core.messages import to_json
from serve.core.model import Principal
from serve.errors import RequestError
from serve.push.request import admitted, hung_up, json_body
from serve.sql.payloads import payload_schemas
from serve.sql.statement import LENGTH, READY, Statement, StatementResult, packed

_START_S = 60.0
MAX_ROWS = 100_000  # of an answer; a page shows fewer, and history and tables are there for more
_WAITING = 4  # waiting statements, for each worker
_ROOT = Path(__file__).parents[2]
ARROW = "application/vnd.apache.arrow.stream"
_MAX_SQL = 65_536


class Workers:
    """At most ``serve.max_sql`` processes, started for the first statements.

    Attributes:
        running: statements that run or wait.
        counts: statements by how they ended, for metrics.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.serve.max_sql)
        self.running = 0
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False
        self.counts: dict[str, int] = dict.fromkeys(("done", "failed", "cancelled", "timeout", "busy"), 0)

    async def close(self) -> None:
        self._closed = True
        for process in self._idle:
            await _killed(process)
        self._idle.clear()

    def start(self, sql: str, principal: Principal, **options: Any) -> asyncio.Task[StatementResult]:
        """Run a statement as a task; cancelling it at any time ends its process. Arguments as for :meth:`run`."""
        task = asyncio.create_task(self.run(sql, principal, **options))
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[StatementResult]) -> None:
        if task.cancelled():  # possibly before it started
            self.counts["cancelled"] += 1

    async def run(
        self,
        sql: str,
        principal: Principal,
        *,
        as_of: str = "",
        rows: int | None = None,
        arrow: bool = False,
        sources: Iterable[Source] = (),
    ) -> StatementResult:
        """Run a statement. Cancelling ends it, with its process. The payloads of ``sources`` can be read as columns.

        Raises RequestError: it is refused, fails or takes too long, or too many wait.
        """
        serve = self._settings.serve
        if self.running >= serve.max_sql * (1 + _WAITING):
            self.counts["busy"] += 1
            raise RequestError(RequestError.FULL, "busy", f"{self.running} statements run or wait; ask again")
        statement = Statement(
            str(self._settings.lake),
            sql,
            principal,
            as_of,
            rows=min(rows or MAX_ROWS, MAX_ROWS),
            memory_mb=serve.sql_memory_mb,
            seconds=serve.sql_timeout_s,
            arrow=arrow,
            payloads=payload_schemas(sources),
        )
        self.running += 1
        try:
            async with self._slots:
                return await self._run(packed(statement))
        finally:
            self.running -= 1

    async def _run(self, statement: bytes) -> StatementResult:
        process = self._idle.pop() if self._idle else await _started()
        seconds = self._settings.serve.sql_timeout_s
        usable = False
        try:
            async with asyncio.timeout(seconds):
                answer = await _exchange(process, statement)
            usable = True
        except TimeoutError:
            self.counts["timeout"] += 1
            raise RequestError(4408, "timeout", f"it ran for more than {seconds:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self.counts["failed"] += 1
            detail = "the statement ended its worker; most likely it took too much memory"
            raise RequestError(RequestError.BAD_REQUEST, "bad_sql", detail) from None
        finally:
            if usable and process.returncode is None and not self._closed:
                self._idle.append(process)
            else:
                await asyncio.shield(_killed(process))
        if answer.code:
            self.counts["failed"] += 1
            close = RequestError.NOT_FOUND if answer.code == "no_such_table" else RequestError.BAD_REQUEST
            raise RequestError(close, answer.code, answer.detail)
        self.counts["done"] += 1
        return answer


async def _started() -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "serve.sql.statement",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "2"},  # arenas reserve address space, which the worker's limit counts
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_S):
            await process.stdout.readexactly(len(READY))
    except (TimeoutError, asyncio.IncompleteReadError):
        await _killed(process)
        raise RequestError(RequestError.FULL, "busy", "no worker could be started; the server's log says why") from None
    except asyncio.CancelledError:
        await asyncio.shield(_killed(process))
        raise
    return process


async def _exchange(process: asyncio.subprocess.Process, statement: bytes) -> StatementResult:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(statement)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=StatementResult)


async def _killed(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


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
