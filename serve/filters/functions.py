"""Scalar functions of filters: each gives NULL for NULL, but for those that are about NULL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from serve.filters.kinds import BOOL, DATE, INT, NUMBERS, TEXT, TIMESTAMP

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
    exp.Coalesce: None,  # about NULL: compile.py has them
    exp.Nullif: None,
}
"""By sqlglot's node: docs/protocol.md lists their names."""

EXTRACTS = {
    "YEAR": exp.Year,
    "MONTH": exp.Month,
    "DAY": exp.Day,
    "HOUR": exp.Hour,
    "MINUTE": exp.Minute,
    "SECOND": exp.Second,
}


def like(pattern: str, escape: str | None, *, fold: bool) -> Callable[[str], bool]:
    """A test for SQL's LIKE. Linear in the text for each part between two ``%``: no pattern makes it explode.

    Args:
        pattern: ``%`` stands for any characters, ``_`` for one.
        escape: the character that makes the next one stand for itself.
        fold: without regard to case.
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
