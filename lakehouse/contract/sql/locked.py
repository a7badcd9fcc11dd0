"""DuckDB for SQL that others write."""

from __future__ import annotations

import duckdb


def locked_connection(*, memory_mb: int | None = None, threads: int | None = 1) -> duckdb.DuckDBPyConnection:
    """A connection in memory, with times in UTC: no files, no network, no extensions, and nothing can change that.

    Args:
        memory_mb: that it may take; None: DuckDB's default, and it may use temporary files.
    """
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
