"""A source's schema, which is Spark DDL, as DuckDB needs it to read payloads; no JVM."""

from __future__ import annotations

import json
from typing import Any

import sqlglot
from sqlglot import exp

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Source


def fields_of(source: Source) -> dict[str, exp.DataType]:
    """The payload's fields with their types.

    Raises:
        ConfigError: the schema is no DDL.
    """
    try:
        tree = sqlglot.parse_one(f"CREATE TABLE t ({source.schema})", dialect="spark")
        return {column.name: column.args["kind"] for column in tree.this.expressions}
    except (sqlglot.errors.SqlglotError, KeyError, AttributeError):
        raise ConfigError("not a Spark DDL schema", key=f"sources.{source.name}.schema") from None


def structure_of(source: Source) -> str:
    """What DuckDB's ``json_transform`` takes: the shape of the payload as JSON."""
    return json.dumps({name: _shape(kind) for name, kind in fields_of(source).items()})


def names_below(kind: exp.DataType) -> dict[str, exp.DataType] | None:
    """Fields of a struct, or of the structs in an array; None for anything else."""
    if kind.is_type("array") and kind.expressions:
        return names_below(kind.expressions[0])
    if kind.is_type("struct"):
        return {field.name: field.args["kind"] for field in kind.expressions}
    return None


def spark_name(kind: exp.DataType) -> str:
    """The type as Spark writes it, in lower case, e.g. ``bigint``."""
    return str(kind.sql(dialect="spark")).lower()


def plain_times(node: exp.Expr) -> exp.Expr:
    """Times in UTC, without a zone: DuckDB computes with zones only with an extension that it would have to fetch."""
    if isinstance(node, exp.DataType) and node.is_type("timestamptz", "timestampltz"):
        return exp.DataType.build("timestamp")
    return node


def _shape(kind: exp.DataType) -> Any:
    if kind.is_type("struct"):
        return {field.name: _shape(field.args["kind"]) for field in kind.expressions}
    if kind.is_type("array") and kind.expressions:
        return [_shape(kind.expressions[0])]
    return kind.transform(plain_times).sql(dialect="duckdb")
