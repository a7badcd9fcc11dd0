"""The server's SQL workers: a few processes, started for the first statements, killed instead of waited for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import Settings
from serve.core.model import Principal
from serve.errors import RequestError
from serve.sql.payloads import payload_schemas
from serve.sql.statement import Statement, StatementResult
from serve.sql.worker import LENGTH, READY, packed

log = logging.getLogger(__name__)

TIMEOUT = 4408
_START_S = 60.0
MAX_ROWS = 100_000  # of an answer; a page shows fewer, and history and tables are there for more
MAX_BYTES = 67_108_864  # of an answer, which the server holds in memory
_WAITING = 4  # waiting statements, for each worker
_ROOT = Path(__file__).parents[2]


class Workers:
    """At most ``serve.max_sql`` processes.

    Attributes:
        counts: statements by how they ended, for metrics.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.serve.max_sql)
        self._asked = 0
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False
        self.counts: dict[str, int] = dict.fromkeys(("done", "failed", "cancelled", "timeout", "busy"), 0)

    @property
    def running(self) -> int:
        """Statements that run or wait."""
        return self._asked

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

        Raises:
            RequestError: it is refused, fails or takes too long, or too many wait.
        """
        serve = self._settings.serve
        if self._asked >= serve.max_sql * (1 + _WAITING):
            self.counts["busy"] += 1
            raise RequestError(RequestError.FULL, "busy", f"{self._asked} statements run or wait; ask again")
        statement = Statement(
            str(self._settings.lake),
            sql,
            principal,
            as_of,
            min(rows or MAX_ROWS, MAX_ROWS),
            MAX_BYTES,
            serve.sql_memory_mb,
            serve.sql_timeout_s,
            arrow,
            payloads=payload_schemas(sources),
        )
        self._asked += 1
        try:
            async with self._slots:
                return await self._run(packed(statement))
        finally:
            self._asked -= 1

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
            raise RequestError(TIMEOUT, "timeout", f"it ran for more than {seconds:g} s") from None
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
        "serve.sql.worker",
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
