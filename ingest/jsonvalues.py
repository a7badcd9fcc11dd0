"""Values of JSON as Spark would have them for a declared type: those that are beyond doubt.

Spark's JSON reader converts (a number to a text), wraps around, or says that an event does not fit its schema. Whoever
has to be sure that Spark would see the same value leaves these to Spark: :class:`Doubtful`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ingest.ddl import Field

Fields = Mapping[str, Any]
Value = Callable[[Fields], Any]
"""The value that an event has in a field; None is null."""

BITS = {"TINYINT": 8, "BYTE": 8, "SMALLINT": 16, "SHORT": 16, "INT": 32, "INTEGER": 32, "BIGINT": 64, "LONG": 64}
SINGLES, DOUBLES = ("FLOAT", "REAL"), ("DOUBLE",)
_LEAST_SINGLE, _MOST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class Doubtful(Exception):
    """A value of which only Spark can say what it is."""


def value_at(path: list[str], declared: str) -> Value:
    """Reads the field at a path, of one of the types above, ``STRING`` or ``BOOLEAN``; it raises :class:`Doubtful`."""
    if declared in BITS:
        return _reader(path, _integer_of(BITS[declared]))
    if declared in SINGLES:
        return _reader(path, _single)
    if declared in DOUBLES:
        return _reader(path, _double)
    return _reader(path, _text if declared == "STRING" else _boolean)


def _reader(path: list[str], convert: Callable[[Any], Any]) -> Value:
    """Reads the field at a path; null where it, or an object that it would be in, is absent or null."""
    if len(path) == 1:
        name = path[0]

        def read_field(fields: Fields) -> Any:
            value = fields.get(name)
            return None if value is None else convert(value)

        return read_field

    def read(fields: Fields) -> Any:
        value: Any = fields
        for step in path:
            if type(value) is not dict:
                raise Doubtful
            value = value.get(step)
            if value is None:
                return None
        return convert(value)

    return read


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    raise Doubtful


def _boolean(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise Doubtful


def _integer_of(bits: int) -> Callable[[Any], int]:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def integer(value: Any) -> int:
        if type(value) is int and low <= value <= high:
            return value
        raise Doubtful

    return integer


def _double(value: Any) -> float:
    if type(value) is float or type(value) is int:
        return float(value)
    raise Doubtful


def _single(value: Any) -> float:
    """The nearest number of 32 bits; in doubt where rounding the text once and rounding it twice may differ."""
    value = _double(value)
    if value == 0:
        return 0.0
    halfway = struct.unpack("<Q", struct.pack("<d", value))[0] & 0x1FFFFFFF == 0x10000000
    if halfway or not _LEAST_SINGLE <= abs(value) <= _MOST_SINGLE:
        raise Doubtful
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def fits(value: Any, field: Field) -> bool:
    """Whether a value surely is of a type, as far as that is known here."""
    if value is None:
        return True
    if field.declared in BITS:
        half = 1 << BITS[field.declared] - 1
        return type(value) is int and -half <= value < half
    if field.declared in (*SINGLES, *DOUBLES):
        return type(value) in (int, float) and (field.declared in DOUBLES or abs(value) <= _MOST_SINGLE)
    if field.json and type(value) not in field.json:
        return False
    return all(fits(value.get(name), inner) for name, inner in field.fields.items())
