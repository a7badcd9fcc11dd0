"""Arrow into rows, and rows into JSON: the one place that says how a value looks to a subscriber.

Timestamps are ISO 8601 in UTC with ``Z`` and microseconds where there are any; numbers are numbers, whatever their
size; what is no number in JSON (NaN, infinity) is null; binary inside of structures is base64.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.rows import Row

_OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_NAIVE_UTC
_INT64 = range(-(2**63), 2**63)


def is_binary(kind: pa.DataType) -> bool:
    """Whether a column of this type is left out of what is pushed."""
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def rows_of(table: pa.Table) -> list[Row]:
    """The table's rows in its order of columns. Times without a zone, in UTC: they hash and compare faster."""
    columns = [_plain(column).to_pylist() for column in table.columns]
    if not columns:
        return [() for _ in range(table.num_rows)]
    return list(zip(*columns, strict=True))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us"), safe=False)
    if pa.types.is_floating(kind):
        return pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
    return column


def to_json(value: Any) -> bytes:
    """JSON of any value that a message or row is made of."""
    return orjson.dumps(value, default=_other, option=_OPTIONS)


def encode_rows(columns: Sequence[str], rows: Iterable[Row]) -> list[bytes]:
    """One JSON object a row."""
    rows = list(rows)  # they are gone through twice where there are large integers
    try:
        return [orjson.dumps(dict(zip(columns, row, strict=True)), default=_other, option=_OPTIONS) for row in rows]
    except TypeError as error:  # an integer beyond 64 bits is the one thing orjson neither takes nor asks about
        if "64-bit" not in str(error):
            raise
        return [to_json({name: _wide(value) for name, value in zip(columns, row, strict=True)}) for row in rows]


def _other(value: Any) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(format(value, "f")) if value.is_finite() else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, memoryview):
        return base64.b64encode(bytes(value)).decode()
    return str(value)


def _wide(value: Any) -> Any:
    return orjson.Fragment(str(value)) if isinstance(value, int) and value not in _INT64 else value
