"""SQL that others write, in one place: nothing is decided by looking at the text, and only trees that were checked run.

::

    spark      SQL of pipelines, queries, views and alerts (Spark's dialect): parse, and an allow-list of functions
    filters    conditions of subscribers and keys (DuckDB's dialect): parse, and an allow-list of nodes
    closures   conditions compiled to Python functions of a row: filters, live aggregates, expectations at the border
    ddl        schemas of sources

What runs in DuckDB runs on a :func:`locked_connection`. The collectors' processes need
:mod:`~lakehouse.contract.sql.ddl` only, which imports no parser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import duckdb

# Kinds of values
INT: Final = "integer"
FLOAT: Final = "float"
DECIMAL: Final = "decimal"
TEXT: Final = "text"
BOOL: Final = "boolean"
TIMESTAMP: Final = "timestamp"
DATE: Final = "date"
NULL: Final = "null"
OTHER: Final = "other"
NUMBERS: Final = (INT, FLOAT, DECIMAL)


def quoted(name: str) -> str:
    """A name as DuckDB's identifier."""
    return '"' + name.replace('"', '""') + '"'


def locked_connection(*, memory_mb: int | None = None, threads: int | None = 1) -> duckdb.DuckDBPyConnection:
    """A connection in memory, with times in UTC: no files, no network, no extensions, and nothing can change that.

    Args:
        memory_mb: that it may take; None: DuckDB's default, and it may use temporary files.
    """
    import duckdb  # here: most who import this package ask nothing of DuckDB

    config: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "python_enable_replacements": "false",
    }
    if memory_mb is not None:
        config |= {"memory_limit": f"{memory_mb}MB", "temp_directory": ""}
    if threads is not None:
        config["threads"] = str(threads)
    connection = duckdb.connect(config=config)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection
