"""The process that runs statements, one at a time: ``python -m serve.sql.worker``.

Statements and answers go over standard input and output in MessagePack, each with its length in front. A statement that
does not end is ended with its process: the server kills it, or the alarm that the worker has set.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import UnknownTable
from serve.sql.statement import Statement, StatementResult, run

LENGTH = struct.Struct(">I")
READY = b"ready\n"
"""Said once, when everything is imported: a statement's time begins after it."""

_SPARE_BYTES = 1_073_741_824  # stacks and arenas of threads
_SPARE_S = 5  # after the time at which the server should have killed us


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    statements = msgspec.msgpack.Decoder(Statement)
    sink.write(READY)
    sink.flush()
    while len(length := source.read(LENGTH.size)) == LENGTH.size:
        statement = statements.decode(source.read(*LENGTH.unpack(length)))
        sink.write(packed(_answered(statement)))
        sink.flush()


def packed(message: Any) -> bytes:
    """A statement or an answer with its length in front."""
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def _answered(statement: Statement) -> StatementResult:
    _limit_memory(statement.memory_mb)
    signal.alarm(int(statement.seconds) + _SPARE_S)
    try:
        return run(statement)
    except UnknownTable as error:
        return StatementResult(code="no_such_table", detail=str(error))
    except MemoryError:
        return StatementResult(code="bad_sql", detail="it takes more memory than is given")
    except MillraceError as error:
        return StatementResult(code="bad_sql", detail=str(error))
    finally:
        signal.alarm(0)


def _limit_memory(memory_mb: int) -> None:
    """Limit the process too: DuckDB does not count everything, for instance a single huge text."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mapped = int(status.partition("VmSize:")[2].split()[0]) * 1024
    most = mapped + 2 * memory_mb * 1024 * 1024 + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
