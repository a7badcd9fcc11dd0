"""What live aggregates are made of: each takes a value in, takes it back, and says the result, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Context, Decimal
from typing import Any

_EXACT = Context(prec=76)  # decimal128 has 38 digits; this adds up 10^38 of them without rounding


class Accumulator:
    """Takes values in and out. NULLs never come here."""

    def add(self, value: Any) -> None:
        """One more."""

    def remove(self, value: Any) -> None:
        """One that was added, taken back."""

    def result(self) -> Any:
        """Of the values that are in."""


class Count(Accumulator):
    """How many."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, value: Any) -> None:
        self.count += 1

    def remove(self, value: Any) -> None:
        self.count -= 1

    def result(self) -> int:
        return self.count


class Total(Accumulator):
    """The exact sum, rounded once; None of nothing, and where it is beyond what a float holds.

    Floats: J. R. Shewchuk, Adaptive Precision Floating-Point Arithmetic, 1997: partials that do not overlap.
    """

    def __init__(self) -> None:
        self.count = 0
        self._whole: int | Decimal = 0
        self._partials: list[float] = []

    def add(self, value: Any) -> None:
        self.count += 1
        self._put(value)

    def remove(self, value: Any) -> None:
        self.count -= 1
        self._put(-value)

    def result(self) -> Any:
        if not self.count:
            return None
        if not self._partials:
            return self._whole
        return _finite(lambda: math.fsum([*self._partials, self._whole]))

    def _put(self, value: Any) -> None:
        if not isinstance(value, float):
            exact = isinstance(value, Decimal) or isinstance(self._whole, Decimal)
            self._whole = _EXACT.add(Decimal(self._whole), Decimal(value)) if exact else self._whole + value
            return
        kept = []
        for partial in self._partials:
            big, small = (value, partial) if abs(value) >= abs(partial) else (partial, value)
            value = big + small
            if rest := small - (value - big):
                kept.append(rest)
        self._partials = [*kept, value]


class Mean(Total):
    """The exact sum by the number; None as a sum is."""

    def result(self) -> float | None:
        total = super().result()
        return None if total is None else _finite(lambda: float(total) / self.count)


def _finite(result: Callable[[], float]) -> float | None:
    try:
        value = result()
    except (OverflowError, ValueError):  # the latter: of infinities of both signs
        return None
    return value if math.isfinite(value) else None


class Extreme(Accumulator):
    """The least or the greatest; looks through the distinct values when that one is taken back.

    Args:
        pick: ``min`` or ``max``.
    """

    def __init__(self, pick: Callable[[Iterable[Any]], Any]) -> None:
        self._pick = pick
        self._counts: dict[Any, int] = {}
        self._best: Any = None

    def add(self, value: Any) -> None:
        self._counts[value] = self._counts.get(value, 0) + 1
        self._best = value if self._best is None else self._pick((self._best, value))

    def remove(self, value: Any) -> None:
        self._counts[value] -= 1
        if not self._counts[value]:
            del self._counts[value]
            if value == self._best:
                self._best = self._pick(self._counts) if self._counts else None

    def result(self) -> Any:
        return self._best


class Distinct(Accumulator):
    """How many different ones."""

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}

    def add(self, value: Any) -> None:
        self._counts[value] = self._counts.get(value, 0) + 1

    def remove(self, value: Any) -> None:
        self._counts[value] -= 1
        if not self._counts[value]:
            del self._counts[value]

    def result(self) -> int:
        return len(self._counts)
