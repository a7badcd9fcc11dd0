"""SQL that others write, in one place: nothing is decided by looking at the text, and only trees that were checked run.

::

    spark      SQL of pipelines, queries, views and alerts (Spark's dialect): parse, and an allow-list of functions
    filters    conditions of subscribers and keys (DuckDB's dialect): parse, and an allow-list of nodes
    closures   conditions compiled to Python functions of a row: filters, live aggregates, expectations at the border
    ddl        schemas of sources
    locked     DuckDB connections without files, network and extensions

The collectors' processes need :mod:`~lakehouse.contract.sql.ddl` only, which imports no parser.
"""

from __future__ import annotations

from typing import Final

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
