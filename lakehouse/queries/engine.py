"""SQL over a product's rows: DuckDB over Arrow, a few milliseconds where a Spark job would take a hundred.

The connection has no files, no network, no extensions, little memory and little time. The SQL was parsed and checked in
Spark's dialect (``lakehouse.contract.sql.spark``) and is translated from the tree, never from the text.
"""

from __future__ import annotations

import threading

import duckdb
import pyarrow as pa
from sqlglot import exp

from lakehouse.contract.sql.locked import locked_connection
from lakehouse.contract.sql.spark import to_duckdb
from lakehouse.queries.errors import QueryError

_MEMORY_MB = 512
_LIMIT_S = 10.0


class Engine:
    """One connection, for one thread."""

    def __init__(self) -> None:
        self._connection = locked_connection(memory_mb=_MEMORY_MB)

    def close(self) -> None:
        """Let go of its memory."""
        self._connection.close()

    def query(self, name: str, tree: exp.Expr, relation: str, rows: pa.Table) -> pa.Table:
        """The result of a checked query over ``rows``, which it calls ``relation``.

        Args:
            name: of the view or alert, for errors.

        Returns:
            Plain columns: integers and decimals of whole numbers as int64, times in microseconds UTC.

        Raises:
            QueryError: it fails, takes too long, or gives a type that no table has.
        """
        timer = threading.Timer(_LIMIT_S, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            self._connection.register(relation, rows)
            found = pa.table(self._connection.sql(to_duckdb(tree)).to_arrow_table())
        except duckdb.InterruptException:
            raise QueryError(name, f"it takes more than {_LIMIT_S:.0f} s", "Make it cheaper") from None
        except duckdb.Error as error:
            raise QueryError(name, str(error).strip().splitlines()[0]) from None
        finally:
            timer.cancel()
            self._connection.unregister(relation)
        return plain(name, found)


def plain(name: str, rows: pa.Table) -> pa.Table:
    """The same rows in types that a Delta table and a subscriber have.

    Raises:
        QueryError: there is no such type.
    """
    schema = pa.schema([pa.field(field.name, _plain(name, field)) for field in rows.schema])
    try:
        return rows.cast(schema)
    except pa.ArrowInvalid as error:
        raise QueryError(name, f"a value does not fit its column: {error}") from None


def _plain(name: str, field: pa.Field) -> pa.DataType:
    kind = field.type
    if pa.types.is_decimal(kind) and kind.scale == 0:  # the sum of integers
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    if pa.types.is_unsigned_integer(kind) or pa.types.is_integer(kind):
        return kind if pa.types.is_signed_integer(kind) else pa.int64()
    if pa.types.is_large_string(kind) or pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_time(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
        raise QueryError(name, f"column {field.name!r} is an interval or a time of day", "Give a timestamp or a number")
    return kind
