"""Closures that conditions are made of: SQL's three truth values (None is NULL), arithmetic without surprises."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from serve.filters.functions import Getter


def constant(kind: str, value: Any) -> tuple[str, Getter]:
    """Kind and value of what is the same in every row."""
    return kind, lambda _: value


def of(call: Callable[[Any], Any], value: Getter) -> Getter:
    """A function of a value; NULL of NULL."""
    return lambda row: None if (it := value(row)) is None else call(it)


def both(call: Callable[[Any, Any], Any], left: Getter, right: Getter) -> Getter:
    """A function of two values; NULL where one of them is."""

    def called(row: Any) -> Any:
        a = left(row)
        if a is None:
            return None
        b = right(row)
        return None if b is None else call(a, b)

    return called


def every(parts: list[Getter]) -> Getter:
    """AND of three truth values: one that is false decides."""

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


def some(parts: list[Getter]) -> Getter:
    """OR of three truth values: one that is true decides."""

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
    """NOT; of NULL, NULL."""
    return lambda row: None if (it := part(row)) is None else not it


def remainder(a: Any, b: Any) -> Any:
    """The sign is that of ``a``, as in SQL; Python's is that of ``b``."""
    if not b:
        return None
    if isinstance(a, float) or isinstance(b, float):
        return math.fmod(a, b)
    if isinstance(a, Decimal) or isinstance(b, Decimal):
        return Decimal(a) % Decimal(b)
    return abs(a) % abs(b) * (1 if a >= 0 else -1)


def finite(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Results that rows could not hold either, infinities and NaN, are NULL."""

    def counted(a: Any, b: Any) -> Any:
        try:
            result = call(a, b)
        except (OverflowError, ArithmeticError):
            return None
        return None if isinstance(result, float) and not math.isfinite(result) else result

    return counted
