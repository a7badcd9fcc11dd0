"""Values in filters: their kinds and literals, scalar functions, and the closures that conditions are made of.

SQL has three truth values; None stands for NULL. A function gives NULL for NULL, but for those that are about NULL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import pyarrow as pa
from sqlglot import exp

from serve.core.model import TableInfo
from serve.errors import FilterError

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


EXTRACTS = {
    "YEAR": exp.Year,
    "MONTH": exp.Month,
    "DAY": exp.Day,
    "HOUR": exp.Hour,
    "MINUTE": exp.Minute,
    "SECOND": exp.Second,
}


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns by name, for one description of a table.

    Attributes:
        at: index in a row, and kind, by name.
    """

    at: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, table: TableInfo) -> Columns:
        kinds = [kind_of(each) for each in table.types] or [OTHER] * len(table.columns)
        return cls({name: (i, kind) for i, (name, kind) in enumerate(zip(table.columns, kinds, strict=True))})

    def resolve(self, name: str) -> str:
        """The column's own spelling: exact, else ignoring case if unambiguous. Raises FilterError."""
        if name in self.at:
            return name
        alike = [known for known in self.at if known.lower() == name.lower()]
        if len(alike) != 1:
            raise FilterError(f"there is no column {name!r}", f"Columns: {', '.join(self.at)}")
        return alike[0]


def kind_of(kind: pa.DataType) -> str:
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
    """Kind and value of a number in SQL: with a point a decimal, with an exponent a float. Raises FilterError."""
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
    """A time as rows have it: in UTC, without a zone. Raises FilterError."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo is not None else moment
    except (ValueError, OverflowError):  # OverflowError: in UTC it is before year 1 or after 9999
        raise FilterError(f"{text!r} is no time", "Write TIMESTAMP '2026-01-31 12:00:00', in UTC") from None


def as_date(text: str) -> date:
    """A day. Raises FilterError."""
    try:
        return date.fromisoformat(text.strip())
    except ValueError:
        raise FilterError(f"{text!r} is no day", "Write DATE '2026-01-31'") from None


Getter = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of values that are not NULL.

    Attributes:
        takes: kinds by argument.
        gives: kind of the result; empty: that of the first argument.
        call: the function.
    """

    takes: tuple[tuple[str, ...], ...]
    gives: str
    call: Callable[..., Any]


_TEXT, _TIME = (TEXT,), (TIMESTAMP, DATE)

FUNCTIONS: dict[type[exp.Expr], Function | None] = {
    exp.Lower: Function((_TEXT,), TEXT, str.lower),
    exp.Upper: Function((_TEXT,), TEXT, str.upper),
    exp.Trim: Function((_TEXT,), TEXT, lambda text: text.strip(" ")),
    exp.Length: Function((_TEXT,), INT, len),
    exp.StartsWith: Function((_TEXT, _TEXT), BOOL, str.startswith),
    exp.Contains: Function((_TEXT, _TEXT), BOOL, lambda text, part: part in text),
    exp.Abs: Function((NUMBERS,), "", abs),
    exp.Floor: Function((NUMBERS,), INT, lambda number: math.floor(number) if math.isfinite(number) else None),
    exp.Ceil: Function((NUMBERS,), INT, lambda number: math.ceil(number) if math.isfinite(number) else None),
    exp.Year: Function((_TIME,), INT, lambda time: time.year),
    exp.Month: Function((_TIME,), INT, lambda time: time.month),
    exp.Day: Function((_TIME,), INT, lambda time: time.day),
    exp.Hour: Function(((TIMESTAMP,),), INT, lambda time: time.hour),
    exp.Minute: Function(((TIMESTAMP,),), INT, lambda time: time.minute),
    exp.Second: Function(((TIMESTAMP,),), INT, lambda time: time.second),
    exp.Coalesce: None,  # about NULL: compiled in compile.py
    exp.Nullif: None,
}
"""By sqlglot's node: docs/protocol.md lists their names."""


def like(pattern: str, escape: str | None, *, fold: bool) -> Callable[[str], bool]:
    """A test for SQL's LIKE. Linear in the text for each part between two ``%``: no pattern makes it explode.

    Args:
        pattern: ``%`` stands for any characters, ``_`` for one.
        escape: makes the next character stand for itself.
        fold: whether to ignore case.
    """
    parts: list[list[str | None]] = [[]]  # None: any one character
    letters = iter(pattern.lower() if fold else pattern)
    for letter in letters:
        if letter == escape:
            parts[-1].append(next(letters, escape))
        elif letter == "%":
            parts.append([])
        else:
            parts[-1].append(None if letter == "_" else letter)
    first, *rest = parts
    if not rest:
        return lambda text: len(text) == len(first) and _fits(text.lower() if fold else text, 0, first)
    *middle, last = rest

    def matches(text: str) -> bool:
        text = text.lower() if fold else text
        end = len(text) - len(last)
        if end < len(first) or not _fits(text, 0, first) or not _fits(text, end, last):
            return False
        at = len(first)
        for part in middle:
            found = _found(text, at, end, part)
            if found is None:
                return False
            at = found + len(part)
        return True

    return matches


def _fits(text: str, at: int, part: list[str | None]) -> bool:
    return all(letter is None or text[at + i] == letter for i, letter in enumerate(part))


def _found(text: str, start: int, end: int, part: list[str | None]) -> int | None:
    if None not in part:
        at = text.find("".join(letter or "" for letter in part), start, end)
        return None if at < 0 else at
    for at in range(start, end - len(part) + 1):
        if _fits(text, at, part):
            return at
    return None


def constant(kind: str, value: Any) -> tuple[str, Getter]:
    """An expression with the same value in every row."""
    return kind, lambda _: value


def unary(call: Callable[[Any], Any], value: Getter) -> Getter:
    """A function of one value; NULL for NULL."""
    return lambda row: None if (it := value(row)) is None else call(it)


def binary(call: Callable[[Any, Any], Any], left: Getter, right: Getter) -> Getter:
    """A function of two values; NULL if either is."""

    def called(row: Any) -> Any:
        a = left(row)
        if a is None:
            return None
        b = right(row)
        return None if b is None else call(a, b)

    return called


def all_of(parts: list[Getter]) -> Getter:
    """AND: one false value decides."""

    def all_true(row: Any) -> bool | None:
        known: bool | None = True
        for part in parts:
            value = part(row)
            if value is False:
                return False
            if value is None:
                known = None
        return known

    return all_true


def any_of(parts: list[Getter]) -> Getter:
    """OR: one true value decides."""

    def any_true(row: Any) -> bool | None:
        known: bool | None = False
        for part in parts:
            value = part(row)
            if value is True:
                return True
            if value is None:
                known = None
        return known

    return any_true


def negated(part: Getter) -> Getter:
    """NOT; NULL for NULL."""
    return lambda row: None if (it := part(row)) is None else not it


def remainder(a: Any, b: Any) -> Any:
    """Remainder with the sign of ``a``, as in SQL; Python's has that of ``b``."""
    if not b:
        return None
    if isinstance(a, float) or isinstance(b, float):
        return math.fmod(a, b)
    if isinstance(a, Decimal) or isinstance(b, Decimal):
        return Decimal(a) % Decimal(b)
    return abs(a) % abs(b) * (1 if a >= 0 else -1)


def finite(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Infinities and NaN become NULL, as rows cannot hold them."""

    def counted(a: Any, b: Any) -> Any:
        try:
            result = call(a, b)
        except (OverflowError, ArithmeticError):
            return None
        return None if isinstance(result, float) and not math.isfinite(result) else result

    return counted
