"""A message's payload in each encoding that a subscriber may choose. JSON is the one that defines how a value looks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time
from typing import Any

import msgpack
import pyarrow as pa

from lakehouse.contract.rows import Row
from serve.messages import Message
from serve.rows import to_json

HEAD = b"millrace"
"""Key in an Arrow message's schema metadata: the rest of the message, as JSON."""

CHANGE_COLUMN = "_change"


def as_json(message: Message) -> tuple[bytes, bool]:
    """The message's own form; text."""
    return message.body, True


def as_msgpack(message: Message) -> tuple[bytes, bool]:
    """The same object as in JSON. What MessagePack has no number for (decimals, integers beyond 64 bits) is text."""
    content: dict[str, Any] = dict(message.head)
    if message.table is not None:
        columns, key = message.table.columns, message.table.key
        rows = [dict(zip(columns, row, strict=True)) for row in message.rows]
        if message.kind == "snapshot":
            content["rows"] = rows
        else:
            content["upserts"] = rows
            content["deletes"] = [dict(zip(key, gone, strict=True)) for gone in message.deletes]
            if message.left:
                left = [gone for gone in message.deletes if gone in message.left]
                content["leaves"] = [dict(zip(key, gone, strict=True)) for gone in left]
    return msgpack.packb(content, default=_plain), False


def as_arrow(message: Message) -> tuple[bytes, bool]:
    """Rows as one Arrow IPC stream, the rest in its schema's metadata; messages without rows stay JSON text.

    A change has the column ``_change`` behind the others: ``upsert``, ``delete`` or ``leave``; the last two have values
    in the key's columns only.
    """
    table = message.table
    if table is None:
        return message.body, True
    rows: list[Row] = list(message.rows)
    columns, types = list(table.columns), list(table.types) or [None] * len(table.columns)
    if message.kind == "change":
        at = [table.key.index(name) if name in table.key else None for name in columns]
        rows += [tuple(None if i is None else key[i] for i in at) for key in message.deletes]
    arrays = [_array([row[i] for row in rows], kind) for i, kind in enumerate(types)]
    if message.kind == "change":
        kinds = ["upsert"] * len(message.rows)
        kinds += ["leave" if key in message.left else "delete" for key in message.deletes]
        columns.append(CHANGE_COLUMN)
        arrays.append(pa.array(kinds, pa.string()))
    batch = pa.record_batch(arrays, names=columns).replace_schema_metadata({HEAD: to_json(message.head)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes(), False


def _array(values: Sequence[Any], kind: pa.DataType | None) -> pa.Array:
    if kind is not None and pa.types.is_timestamp(kind):
        kind = pa.timestamp("us", kind.tz)
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # a sum beyond 64 bits, say
        return pa.array([None if value is None else _as_text(value) for value in values])


def _as_text(value: Any) -> str:
    """As JSON has it, without quotes; integers may have any size."""
    return str(value) if isinstance(value, int) else to_json(value).decode().strip('"')


def _plain(value: Any) -> Any:
    """What MessagePack has no form for, in the form that JSON has."""
    if isinstance(value, (datetime, date, time)):
        return to_json(value)[1:-1].decode()
    if isinstance(value, (set, frozenset)):
        return list(value)
    text = _as_text(value)
    return None if text == "null" else text
