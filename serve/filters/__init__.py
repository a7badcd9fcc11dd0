"""Filters on a table's rows and columns, in SQL, evaluated in memory.

::

    kinds      what values a column holds          functions   scalar functions
    parse      SQL text → allow-listed tree        compile     tree → a function of a row
    view       rows and columns of a table, as one subscriber sees them (live aggregates: serve.live)

The text is parsed by sqlglot and only what is listed here is taken; nothing of it is ever run as code or pasted into a
statement. The meaning is SQL's, NULL included; tests compare it with DuckDB.
"""

from __future__ import annotations

from serve.errors import FilterError
from serve.filters.parse import parse_condition
from serve.filters.view import View

__all__ = ["FilterError", "View", "parse_condition"]
