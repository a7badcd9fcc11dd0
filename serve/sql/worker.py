"""The process that runs statements, one at a time: ``python -m serve.sql.worker``.

Requests and answers go over standard input and output, each with its length in front. A statement that does not end is
ended with its process: the server kills it, or the alarm that the worker has set.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lakehouse.contract.errors import MillraceError
from lakehouse.contract.lake import UnknownTable
from serve.core.model import Principal
from serve.errors import SqlError
from serve.sql.statement import Statement, StatementResult, run

LENGTH = struct.Struct(">II")  # of the head, a JSON object, and of the body
READY = b"ready\n"
"""Said once, when everything is imported: a statement's time begins after it."""

_SPARE_BYTES = 1_073_741_824  # stacks and arenas of threads
_SPARE_S = 5  # after the time at which the server should have killed us


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    sink.write(READY)
    sink.flush()
    while (asked := receive(source)) is not None:
        head, body = _answered(asked)
        sink.write(packed(head, body))
        sink.flush()


def packed(head: Any, body: bytes = b"") -> bytes:
    text = orjson.dumps(head)
    return LENGTH.pack(len(text), len(body)) + text + body


def receive(source: BinaryIO) -> Any:
    """The next request; None at the end."""
    lengths = source.read(LENGTH.size)
    if len(lengths) < LENGTH.size:
        return None
    size, _ = LENGTH.unpack(lengths)
    return orjson.loads(source.read(size))


def _answered(asked: Any) -> tuple[dict[str, Any], bytes]:
    limits, rights = asked["limits"], asked["principal"]
    _limit_memory(limits["memory_mb"])
    signal.alarm(int(limits["seconds"]) + _SPARE_S)
    tables = None if rights["tables"] is None else frozenset(rights["tables"])
    try:
        found = run(
            Statement(
                Path(asked["lake"]),
                asked["sql"],
                Principal(tables=tables, rows=rights["rows"]),
                asked["as_of"],
                limits["rows"],
                limits["size"],
                limits["memory_mb"],
                asked["arrow"],
            )
        )
        return _told(found), found.body
    except UnknownTable as error:
        return {"code": "no_such_table", "detail": str(error), "remedy": ""}, b""
    except SqlError as error:
        return {"code": "bad_sql", "detail": error.problem, "remedy": error.remedy}, b""
    except MemoryError:
        return {"code": "bad_sql", "detail": "it takes more memory than is given", "remedy": ""}, b""
    except MillraceError as error:
        return {"code": "bad_sql", "detail": str(error), "remedy": ""}, b""
    finally:
        signal.alarm(0)


def _told(found: StatementResult) -> dict[str, Any]:
    return {
        "code": "",
        "columns": found.columns,
        "rows": found.rows,
        "truncated": found.truncated,
        "versions": found.versions,
    }


def _limit_memory(memory_mb: int) -> None:
    """Limit the process too: DuckDB does not count everything, for instance a single huge text."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mapped = int(status.partition("VmSize:")[2].split()[0]) * 1024
    most = mapped + 2 * memory_mb * 1024 * 1024 + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
