"""Payloads in Avro, in the wire format of Confluent's serializers: a zero byte, a schema id (4 bytes), the record.

The driver asks a registry for each schema once, and keeps it in ``_millrace/schemas/ID.json`` of the lake, also that
there is none of this id. So whoever reads bronze decodes a record to the same JSON text, without a registry.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import orjson

from lakehouse.contract.storage import LakePath

SCHEMAS = "schemas"
"""Folder of the lake's shared state, with a file for each schema."""

_HEAD = struct.Struct(">bI")


def decode(payload: bytes | None, schema_of: Callable[[int], Any]) -> Mapping[str, str | None] | None:
    """The record as JSON ``text``; where it cannot be decoded, null, and the ``flaw`` says why. None: no payload.

    Args:
        schema_of: the parsed schema of an id, or as text why there is none.
    """
    if payload is None:
        return None
    if len(payload) < _HEAD.size or payload[0] != 0:
        return {"text": None, "flaw": "not Avro in the wire format of a schema registry"}
    _, number = _HEAD.unpack_from(payload)
    schema = schema_of(number)
    if isinstance(schema, str):
        return {"text": None, "flaw": schema}
    import fastavro

    record = io.BytesIO(payload)
    record.seek(_HEAD.size)
    try:
        value = fastavro.schemaless_reader(record, schema, None)
        text = orjson.dumps(value, default=_as_json).decode()
    except Exception:  # noqa: BLE001 - of fastavro's own and of Python's; the bytes are of a stranger
        return {"text": None, "flaw": f"does not fit Avro schema {number}"}
    if record.tell() != len(payload):
        return {"text": None, "flaw": f"does not fit Avro schema {number}"}
    return {"text": text, "flaw": None}


def _as_json(value: object) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(str(value))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()  # as Spark reads BINARY
    raise TypeError


def schema_file(folder: LakePath, number: int) -> LakePath:
    """Where the lake keeps a schema."""
    return folder / f"{number}.json"


def parsed_schema(number: int, found: Mapping[str, Any]) -> Any:
    """The schema of a :func:`schema_file` as fastavro takes it, or as text why there is none."""
    import fastavro

    if "flaw" in found:
        return found["flaw"]
    named: dict[str, Any] = {}
    try:
        for text in found["references"]:
            fastavro.parse_schema(json.loads(text), named_schemas=named)
        return fastavro.parse_schema(json.loads(found["schema"]), named_schemas=named)
    except (fastavro.schema.SchemaParseException, ValueError) as error:
        return f"Avro schema {number} cannot be read: {error}"[:200]
