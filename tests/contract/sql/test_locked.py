"""What SQL of others cannot reach, even if a statement got past the checks."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from lakehouse.contract.sql import locked_connection


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "COPY (SELECT 1) TO '{file}'",
        "ATTACH '{file}' AS other",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "SET memory_limit = '64GB'",
        "SELECT * FROM local",
    ],
)
def test_a_locked_connection_reaches_nothing_outside(sql: str, tmp_path: Path) -> None:
    local = {"a": [1]}  # DuckDB would find it by its name
    file = tmp_path / "f.csv"
    file.write_text("a\n1\n", encoding="utf-8")
    with locked_connection(memory_mb=64) as connection, pytest.raises(duckdb.Error):
        connection.execute(sql.format(file=file))
    assert local and file.read_text(encoding="utf-8") == "a\n1\n"


def test_times_are_in_utc() -> None:
    with locked_connection() as connection:
        [(zone,)] = connection.sql("SELECT current_setting('TimeZone')").fetchall()
    assert zone == "UTC"
