"""Ad-hoc SQL over a lake's tables: DuckDB over Arrow, reading Delta directly. Blocking: not for the event loop.

One SELECT (or WITH, UNION, VALUES), DESCRIBE or SHOW TABLES. The statement is parsed first: only the tables that it
names are opened, anything that would write is refused, and DuckDB runs without files, network or extensions.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import duckdb
import pyarrow as pa
import sqlglot
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from sqlglot import exp
from sqlglot.errors import SqlglotError

from lakehouse.contract.deltalog import TableUnreadable
from lakehouse.contract.lake import Lake, UnknownTable
from lakehouse.contract.rows import Fold
from serve.errors import QueryError
from serve.reader import describe, metadata_of
from serve.rows import encode_rows

PARTIALS = "__partials"
"""Suffix under which the raw rows of a folded table are reached."""

_READS = (exp.Query, exp.Values, exp.Describe, exp.Summarize)
_WRITES = (
    exp.DML,
    exp.DDL,
    exp.Command,
    exp.Set,
    exp.Pragma,
    exp.Attach,
    exp.Detach,
    exp.Copy,
    exp.Drop,
    exp.Alter,
    exp.Merge,
    exp.Use,
    exp.Into,
)
_MEMORY = "1GB"
_THREADS = 2


def run_sql(lake: Lake, sql: str, *, limit: int | None = None) -> pa.Table:
    """The statement's result, at most ``limit`` rows of it.

    A table with ``millrace.fold`` is seen folded, one row a key; its partials are there as
    ``NAME__partials``. Times are in UTC.

    Raises:
        UnknownTable: the statement names a table that the lake does not have.
        QueryError: it is not a single reading statement, or it fails.
    """
    statement = read_statement(sql)
    if isinstance(statement, exp.Show):
        return pa.table({"name": [table.name for table in lake.tables()]}).slice(0, limit)
    connection = duckdb.connect(
        config={
            "enable_external_access": "false",
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "memory_limit": _MEMORY,
            "threads": str(_THREADS),
        }
    )
    try:
        connection.execute("SET TimeZone = 'UTC'")
        for name in _named(lake, statement):
            _open(connection, lake, name)
        connection.execute("SET lock_configuration = true")
        relation = connection.sql(sql.strip().rstrip(";"))
        result = relation.limit(limit) if limit is not None else relation
        return pa.table(result.to_arrow_table())
    except duckdb.Error as error:
        raise QueryError(str(error).strip()) from None
    finally:
        connection.close()


def rows_as_json(table: pa.Table) -> bytes:
    """A JSON array of row objects.

    Times are ISO 8601 in UTC with ``Z``, binary is base64, integers and decimals are numbers whatever their size.
    """
    columns = [_unscaled(column).to_pylist() for column in table.columns]
    return b"[" + b",".join(encode_rows(table.column_names, zip(*columns, strict=True))) + b"]"


def read_statement(sql: str) -> exp.Expression:
    """The tree of one reading statement.

    Raises:
        QueryError: it is none, or not SQL.
    """
    try:
        parsed = sqlglot.parse(sql, dialect="duckdb")
    except RecursionError:
        raise QueryError("the statement is nested too deeply") from None
    except SqlglotError as error:
        raise QueryError(f"not SQL: {str(error).splitlines()[0]}") from None
    statements = [cast(exp.Expression, statement) for statement in parsed if statement is not None]
    if len(statements) != 1:
        raise QueryError(f"one statement is taken, not {len(statements)}")
    statement = statements[0]
    if isinstance(statement, exp.Show):
        if statement.name.upper() != "TABLES":
            raise QueryError(f"SHOW {statement.name} is not taken", "Use SHOW TABLES or DESCRIBE NAME")
    elif not isinstance(statement, _READS) or any(True for _ in statement.find_all(*_WRITES)):
        raise QueryError("only reading statements are taken", "Use SELECT, WITH, DESCRIBE or SHOW TABLES")
    return statement


def _named(lake: Lake, statement: exp.Expression) -> list[str]:
    """Tables of the lake that the statement names, without the suffix for partials."""
    known = {table.name for table in lake.tables()}
    defined = {cte.alias.lower() for cte in statement.find_all(exp.CTE)}
    names = set()
    for table in statement.find_all(exp.Table):
        name = table.name.lower()
        if not name:  # a table function
            continue
        if table.db:
            raise QueryError(f"{table.sql()} is qualified", f"Names are unique in the lake: write {table.name}")
        base = name.removesuffix(PARTIALS)
        if base in known:
            names.add(base)
        elif name not in defined:
            raise UnknownTable(table.name, sorted(known))
    return sorted(names)


def _open(connection: duckdb.DuckDBPyConnection, lake: Lake, name: str) -> None:
    path = lake.find(name).path
    try:
        table = DeltaTable(path)
        rows = table.to_pyarrow_dataset()
    except (DeltaError, OSError) as error:
        raise QueryError(f"table {name!r} cannot be read: {str(error).splitlines()[0]}") from None
    fold = _fold(path, table)
    if fold is None:
        connection.register(name, rows)
        return
    connection.register(name + PARTIALS, rows)
    types = dict(zip(rows.schema.names, map(str, connection.table(name + PARTIALS).types), strict=True))
    selected = fold.sql(_quoted(name + PARTIALS), rows.schema.names, types)
    connection.execute(f"CREATE VIEW {_quoted(name)} AS {selected}")


def _fold(path: Path, table: DeltaTable) -> Fold | None:
    """How a table's rows are folded; None: they are no partials."""
    try:
        info = describe(path.name, metadata_of(table)).info
    except TableUnreadable:
        return None
    return info.folding if info.folded else None


def _quoted(name: str) -> str:
    return exp.to_identifier(name, quoted=True).sql(dialect="duckdb")


def _unscaled(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column
