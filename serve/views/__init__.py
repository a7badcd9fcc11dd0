"""Rows and columns of a table as one subscriber sees them: SQL conditions and live aggregates, in memory.

The text is parsed by sqlglot, and only what :mod:`lakehouse.contract.sql.filters` lists is accepted; nothing of it is
run as code or pasted into a statement. The meaning is that of SQL, NULL included; tests compare it with DuckDB.
"""
