"""Arrow rows as JSON texts, by DuckDB: times as text in UTC, decimals as numbers, nulls kept."""

from __future__ import annotations

import threading

import duckdb
import pyarrow as pa

_local = threading.local()  # a connection is opened once a thread: a load may have thousands of files


def to_json(rows: pa.Table, select: str = "to_json(r)") -> list[bytes]:
    """Each row as one JSON text.

    Args:
        select: SQL of the text; the rows are called ``r``.
    """
    connection: duckdb.DuckDBPyConnection | None = getattr(_local, "connection", None)
    if connection is None:
        connection = _local.connection = duckdb.connect(config={"threads": "1"})
        connection.execute("SET TimeZone = 'UTC'")
    connection.register("r", rows)
    try:
        found = connection.sql(f"SELECT {select} AS payload FROM r").to_arrow_table()  # noqa: S608 - ours; names are quoted
    finally:
        connection.unregister("r")
    return list(found["payload"].cast(pa.large_binary()).to_pylist())
