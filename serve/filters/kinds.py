"""Kinds of values that a filter tells apart, and literals of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa

from serve.errors import FilterError
from serve.model import TableInfo

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


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns by name, for one description of a table.

    Attributes:
        at: index in a row, and kind, by name.
    """

    at: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, table: TableInfo) -> Columns:
        """The columns of a table."""
        kinds = [kind_of(each) for each in table.types] or [OTHER] * len(table.columns)
        return cls({name: (i, kind) for i, (name, kind) in enumerate(zip(table.columns, kinds, strict=True))})

    def resolve(self, name: str) -> str:
        """The column's own spelling: exact, else without regard to case where that is unambiguous.

        Raises:
            FilterError: there is no such column.
        """
        if name in self.at:
            return name
        alike = [known for known in self.at if known.lower() == name.lower()]
        if len(alike) != 1:
            raise FilterError(f"there is no column {name!r}", f"Columns: {', '.join(self.at)}")
        return alike[0]


def kind_of(kind: pa.DataType) -> str:
    """The kind of an Arrow type's values."""
    for test, name in _KINDS:
        if test(kind):
            return name
    return OTHER


_KINDS: tuple[tuple[Any, str], ...] = (
    (pa.types.is_boolean, BOOL),
    (pa.types.is_integer, INT),
    (pa.types.is_floating, FLOAT),
    (pa.types.is_decimal, DECIMAL),
    (pa.types.is_string, TEXT),
    (pa.types.is_large_string, TEXT),
    (pa.types.is_string_view, TEXT),
    (pa.types.is_timestamp, TIMESTAMP),
    (pa.types.is_date, DATE),
)


def number(text: str) -> tuple[str, Any]:
    """Kind and value of a number as SQL writes it: with a point it is a decimal, with an exponent a float.

    Raises:
        FilterError: it is no number, or beyond what a float holds.
    """
    try:
        if text.isdecimal():
            return INT, int(text)
        found = (FLOAT, float(text)) if "e" in text.lower() else (DECIMAL, Decimal(text))
    except (ValueError, InvalidOperation):
        raise FilterError(f"{text!r} is no number") from None
    if not math.isfinite(float(found[1])):
        raise FilterError(f"{text[:80]!r} is beyond what a number holds")
    return found


def as_timestamp(text: str) -> datetime:
    """A time as rows have it: in UTC, without a zone.

    Raises:
        FilterError: it is none.
    """
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo is not None else moment
    except (ValueError, OverflowError):  # the latter: in UTC it is before the year 1, or after 9999
        raise FilterError(f"{text!r} is no time", "Write TIMESTAMP '2026-01-31 12:00:00', in UTC") from None


def as_date(text: str) -> date:
    """A day.

    Raises:
        FilterError: it is none.
    """
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        raise FilterError(f"{text!r} is no day", "Write DATE '2026-01-31'") from None
