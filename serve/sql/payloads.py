"""Payloads as columns: what ``SOURCE__events`` is, as DuckDB's SELECT over the rows of a bronze table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.source import column_of
from lakehouse.contract.sql import quoted
from lakehouse.contract.sql.ddl import Field, parse_ddl

EVENTS = "__events"
"""Suffix under which a source's events are reached."""

_ENVELOPE = ("event_id", "tenant", "received_at", "bronze_at", "origin")
_NUMBERS = ("BIGINT", "UBIGINT", "HUGEINT", "UHUGEINT", "DOUBLE")
# What DuckDB calls a JSON value that fits a field. Left alone it rounds 1.5, and takes "17" and true for numbers.
_FITS = {
    **dict.fromkeys(("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"), _NUMBERS[:2]),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE", "DECIMAL", "DEC", "NUMERIC"), _NUMBERS),
    "BOOLEAN": ("BOOLEAN",),
    "STRUCT": ("OBJECT",),
    "ARRAY": ("ARRAY",),
}
_TYPES = {
    **{name: name for name in ("SMALLINT", "INTEGER", "BIGINT", "DOUBLE", "DATE", "BOOLEAN", "TINYINT", "INT")},
    "BYTE": "TINYINT",
    "SHORT": "SMALLINT",
    "LONG": "BIGINT",
    "FLOAT": "FLOAT",
    "REAL": "FLOAT",
    **dict.fromkeys(("STRING", "CHAR", "CHARACTER", "VARCHAR", "BINARY"), "VARCHAR"),
    "TIMESTAMP": "TIMESTAMPTZ",
    "TIMESTAMP_LTZ": "TIMESTAMPTZ",
    "TIMESTAMP_NTZ": "TIMESTAMP",
}


@dataclass(frozen=True, slots=True)
class PayloadSchema:
    """What the JSON payloads of a source hold: fields, and the steps to the object that has them."""

    ddl: str
    unwrap: tuple[str, ...] = ()


def payload_schemas(sources: Iterable[Source]) -> dict[str, PayloadSchema]:
    """By source; sources in Avro have none."""
    return {one.name: PayloadSchema(one.schema, one.unwrap_path) for one in sources if one.format == "json"}


def events_sql(relation: str, columns: Collection[str], schema: PayloadSchema) -> str:
    """The SELECT: the envelope, ``reason`` (why the border refused it), ``payload`` as JSON, and the declared fields.

    A payload that is no JSON is null, and so is a field that is absent or does not fit its type. ``relation`` is the
    name of the rows, quoted where it needs to be, and ``columns`` are those that they have.
    """
    fields = parse_ddl(schema.ddl)
    structure = _text(json.dumps({name: _structure(field) for name, field in fields.items()}))
    unwrapped = f"json_extract(payload, {_pointer(*schema.unwrap)})" if schema.unwrap else "payload"
    shown = [
        *(name if name in columns else f"NULL AS {name}" for name in _ENVELOPE),
        "reject AS reason",
        "payload",
        *(_column(name, field) for name, field in fields.items()),
    ]
    parsed = f"json_transform(__fields, {structure})" if fields else "NULL"
    return (
        f"SELECT {', '.join(shown)} FROM (SELECT *, {parsed} AS __parsed FROM (SELECT *, {unwrapped} AS __fields "  # noqa: S608 - names and texts are quoted
        "FROM (SELECT * REPLACE (CASE WHEN json_valid(__text) THEN __text::JSON END AS payload) "
        f"FROM (SELECT *, TRY(decode(payload)) AS __text FROM {relation}))))"
    )


def _column(name: str, field: Field) -> str:
    value = f"__parsed.{quoted(name)}"
    if fits := _FITS.get(field.declared):
        kinds = ", ".join(map(_text, fits))
        value = f"CASE WHEN json_type(__fields, {_pointer(name)}) IN ({kinds}) THEN {value} END"
    return f"{value} AS {quoted(column_of(name))}"


def _structure(field: Field) -> Any:
    """A field's type as DuckDB's ``json_transform`` is told it; maps, for one, stay JSON."""
    if field.declared == "ARRAY" and field.element is not None:
        return [_structure(field.element)]
    if field.fields:
        return {name: _structure(inner) for name, inner in field.fields.items()}
    if field.declared in ("DECIMAL", "DEC", "NUMERIC"):
        return "DECIMAL" + ((field.text.partition("(")[1] and field.text[field.text.index("(") :]) or "(10, 0)")
    return _TYPES.get(field.declared, "JSON")


def _pointer(*steps: str) -> str:
    """A JSON pointer (RFC 6901), which takes names that a path cannot quote."""
    return _text("".join("/" + step.replace("~", "~0").replace("/", "~1") for step in steps))


def _text(text: str) -> str:
    return exp.Literal.string(text).sql(dialect="duckdb")
