"""A condition as a function of a row: closures over its values, with SQL's three truth values (None is NULL).

A change has few rows, so the start-up cost counts: about 1 µs a row here, against 80 µs for Arrow and 1,000 µs for
DuckDB before the first row (docs/decisions/0015-filters-in-memory.md).

The trees were checked before: those of filters and live aggregates by :mod:`lakehouse.contract.sql.filters`, those of
expectations by :mod:`ingest.border.expectations`. Where a column's value comes from is said by whoever compiles: see
:class:`Columns`. A function gives NULL for NULL, but for those that are about NULL.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from sqlglot import exp

from lakehouse.contract.errors import FilterError
from lakehouse.contract.sql import BOOL, DATE, DECIMAL, FLOAT, INT, NULL, NUMBERS, OTHER, TEXT, TIMESTAMP

Getter = Callable[[Any], Any]
"""The value of an expression in a row."""
Typed = tuple[str, Getter]
"""What an expression gives: the kind of its values, and its value in a row."""
Convert = Callable[[Any], Any]

_DATE_PARTS: tuple[type[exp.Expr], ...] = (exp.Year, exp.Month, exp.Day)
_TIME_PARTS: tuple[type[exp.Expr], ...] = (exp.Hour, exp.Minute, exp.Second)
EXTRACTS = {part.key.upper(): part for part in (*_DATE_PARTS, *_TIME_PARTS)}


class ColumnTypes(Protocol):
    """A table by the names and Arrow types of its columns; no types: they are not known."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def types(self) -> tuple[Any, ...]: ...


class ColumnValues(Protocol):
    """Where the values of columns come from."""

    def column(self, node: exp.Expr) -> Typed:
        """Kind and value of a column."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of rows that are tuples, by name, for one description of a table.

    Attributes:
        at: index in a row, and kind, by name.
    """

    at: Mapping[str, tuple[int, str]]

    @classmethod
    def of(cls, table: ColumnTypes) -> Columns:
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

    def column(self, node: exp.Expr) -> Typed:
        """Kind and value of a column. Raises FilterError."""
        i, kind = self.at[self.resolve(node.name)]
        return kind, operator.itemgetter(i)


_KINDS = {
    "bool": BOOL, "int": INT, "uint": INT, "float": FLOAT, "double": FLOAT, "halffloat": FLOAT, "decimal": DECIMAL,
    "string": TEXT, "large_string": TEXT, "string_view": TEXT, "timestamp": TIMESTAMP, "date": DATE,
}  # fmt: skip


def kind_of(kind: Any) -> str:
    """The kind of values of an Arrow type."""
    return _KINDS.get(str(kind).partition("[")[0].partition("(")[0].rstrip("0123456789"), OTHER)


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


@dataclass(frozen=True, slots=True)
class Function:
    """A function of values that are not NULL.

    Attributes:
        gives: kind of the result; empty: that of the first argument.
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
    **{part: Function((_TIME,), INT, operator.attrgetter(part.key)) for part in _DATE_PARTS},
    **{part: Function(((TIMESTAMP,),), INT, operator.attrgetter(part.key)) for part in _TIME_PARTS},
    exp.Coalesce: None,  # about NULL: compiled below
    exp.Nullif: None,
}
"""By sqlglot's node: docs/reference/protocol.md lists their names."""


def like(pattern: str, escape: str | None, *, fold: bool) -> Callable[[str], bool]:
    """A test for SQL's LIKE. Linear in the text for each part between two ``%``: no pattern makes it explode."""
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


def combined(parts: list[Getter], *, decisive: bool) -> Getter:
    """AND, where one False decides, or OR, where one True does."""
    neutral = not decisive

    def value_of_all(row: Any) -> bool | None:
        known: bool | None = neutral
        for part in parts:
            value: bool | None = part(row)
            if value is not neutral:
                if value is decisive:
                    return decisive
                known = None
        return known

    return value_of_all


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


_COMPARE: dict[Any, Callable[[Any, Any], bool]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
}
_ARITHMETIC: dict[Any, Callable[[Any, Any], Any]] = {
    exp.Add: operator.add,
    exp.Sub: operator.sub,
    exp.Mul: operator.mul,
}
_SAME = (exp.NullSafeEQ, exp.NullSafeNEQ)


def compile_condition(tree: exp.Expr, columns: ColumnValues) -> Getter:
    """The condition's value in a row: True, False or None; only True rows match. Raises FilterError."""
    kind, getter = compile_expression(tree, columns)
    if kind not in (BOOL, NULL):
        raise FilterError(f"{tree.sql('duckdb')} is no condition: it gives a value of kind {kind}")
    return getter


@dataclass(frozen=True, slots=True)
class Pin:
    """What a condition says of one column: rows that match have one of these values there."""

    column: int
    values: frozenset[Any]


def pin_of(tree: exp.Expr, columns: Columns) -> Pin | None:
    """The pin with the fewest values, in a condition such as ``city = 'Bonn' AND …``; None if there is none."""
    found = [pin for part in flat(tree, exp.And) if (pin := _pin(part, columns)) is not None]
    return min(found, key=lambda pin: len(pin.values), default=None)


def _pin(node: exp.Expr, columns: Columns) -> Pin | None:
    """The pin of ``column = literal``, either way round, or ``column IN (literals)``; None otherwise."""
    match node:
        case exp.EQ():
            sides = [(node.this, [node.expression]), (node.expression, [node.this])]
        case exp.In():
            sides = [(node.this, node.expressions)]
        case _:
            return None
    compiler = _Compiler(columns)
    for column, others in sides:
        if isinstance(column, exp.Column) and all(map(_is_constant, others)):
            at, kind = columns.at[columns.resolve(column.name)]
            pairs = [compiler.pair(column, kind, other) for other in others]
            if all(convert is None for _, convert, _ in pairs):
                return Pin(at, frozenset(value(()) for _, _, value in pairs) - {None})
    return None


def compile_expression(tree: exp.Expr, columns: ColumnValues) -> Typed:
    """Kind and value of an expression. Raises FilterError."""
    return _Compiler(columns).expression(tree)


class _Compiler:
    def __init__(self, columns: ColumnValues) -> None:
        self._columns = columns

    def expression(self, node: exp.Expr) -> Typed:
        match node:
            case exp.Paren():
                return self.expression(node.this)
            case exp.Column() | exp.Dot():
                return self._columns.column(node)
            case exp.Literal() | exp.Boolean() | exp.Null() | exp.Cast():
                return constant(*self._literal(node))
            case exp.And() | exp.Or():
                parts = [self._condition(part) for part in flat(node, type(node))]
                return BOOL, combined(parts, decisive=isinstance(node, exp.Or))
            case exp.Not():
                return BOOL, negated(self._condition(node.this))
            case exp.Is():
                return BOOL, self._is(node)
            case exp.In():
                return BOOL, self._in(node)
            case exp.Between():
                return BOOL, self._between(node)
            case exp.Like() | exp.ILike():
                return BOOL, self._like(node, None)
            case exp.Escape():
                return BOOL, self._like(node.this, node.expression)
            case exp.Neg():
                kind, value = self._number(node.this)
                return kind, _applied(operator.neg, value, node.this)
            case exp.Add() | exp.Sub() | exp.Mul() | exp.Div() | exp.Mod():
                return self._arithmetic(node)
            case exp.Coalesce():
                return self._coalesce([node.this, *node.expressions])
            case exp.Nullif():
                return self._nullif(node)
            case exp.Extract():
                unit = EXTRACTS.get(node.name.upper())
                if unit is None:
                    raise FilterError(f"EXTRACT({node.name}) is not taken", f"Units: {', '.join(EXTRACTS)}")
                return self._called(unit, [node.expression])
            case _ if isinstance(node, (*_COMPARE, *_SAME)):
                return BOOL, self._compared(node)
            case _ if type(node) in FUNCTIONS:
                second = node.args.get("expression")
                return self._called(type(node), [node.this] if second is None else [node.this, second])
        raise FilterError(f"{node.sql('duckdb')} is not taken in a filter")

    def _condition(self, node: exp.Expr) -> Getter:
        return compile_condition(node, self._columns)

    def _number(self, node: exp.Expr) -> Typed:
        kind, value = self.expression(node)
        if kind not in (*NUMBERS, NULL):
            raise FilterError(f"{node.sql('duckdb')} is no number: it is of kind {kind}")
        return kind, value

    def _literal(self, node: exp.Expr) -> tuple[str, Any]:
        match node:
            case exp.Null():
                return NULL, None
            case exp.Boolean():
                return BOOL, bool(node.this)
            case exp.Literal():
                return (TEXT, str(node.this)) if node.is_string else number(str(node.this))
            case exp.Cast() if isinstance(node.this, exp.Literal) and node.this.is_string:
                if node.to.is_type("timestamp", "timestamptz", "timestampntz"):
                    return TIMESTAMP, as_timestamp(node.this.name)
                if node.to.is_type("date"):
                    return DATE, as_date(node.this.name)
        raise FilterError(f"{node.sql('duckdb')} is not taken in a filter", "Casts: TIMESTAMP '…' and DATE '…' only")

    def pair(self, node: exp.Expr, kind: str, other: exp.Expr) -> tuple[str, Convert | None, Getter]:
        """How to compare values of ``node``, which is of ``kind``, with ``other``.

        Returns:
            The common kind, the conversion to it (None: as they are), and the other's values in that kind. ``node``
            itself is not compiled here: if it is compared several times it is still evaluated once.
        """
        theirs, value = self.expression(other)
        fitted, ours = _fitting(node, kind, theirs)
        fitted_too, convert = _fitting(other, theirs, kind)
        if (fitted != fitted_too and NULL not in (kind, theirs)) or OTHER in (kind, theirs):
            raise FilterError(f"{node.sql('duckdb')} ({kind}) and {other.sql('duckdb')} ({theirs}) do not compare")
        return fitted, ours, value if convert is None else _applied(convert, value, other)

    def _compared(self, node: exp.Expr) -> Getter:
        kind, value = self.expression(node.this)
        _, convert, right = self.pair(node.this, kind, node.expression)
        left = value if convert is None else unary(convert, value)
        if isinstance(node, exp.NullSafeEQ):
            return lambda row: left(row) == right(row)
        if isinstance(node, exp.NullSafeNEQ):
            return lambda row: left(row) != right(row)
        compare = _COMPARE[type(node)]
        if not _is_constant(node.expression):
            return binary(compare, left, right)
        wanted = right(())
        if wanted is None:
            return lambda row: None
        return lambda row: None if (it := left(row)) is None else compare(it, wanted)

    def _between(self, node: exp.Expr) -> Getter:
        kind, value = self.expression(node.this)
        _, to_low, low = self.pair(node.this, kind, node.args["low"])
        _, to_high, high = self.pair(node.this, kind, node.args["high"])

        def between(row: Any) -> bool | None:
            it = value(row)
            if it is None:
                return None
            least, most = low(row), high(row)
            above = None if least is None else (it if to_low is None else to_low(it)) >= least
            below = None if most is None else (it if to_high is None else to_high(it)) <= most
            return False if above is False or below is False else None if None in (above, below) else True

        return between

    def _nullif(self, node: exp.Expr) -> Typed:
        kind, value = self.expression(node.this)
        _, convert, other = self.pair(node.this, kind, node.expression)

        def unless(row: Any) -> Any:
            it = value(row)
            return None if it is None or (it if convert is None else convert(it)) == other(row) else it

        return kind, unless

    def _is(self, node: exp.Expr) -> Getter:
        wanted = node.expression
        if isinstance(wanted, exp.Null):
            _, value = self.expression(node.this)
            return lambda row: value(row) is None
        if not isinstance(wanted, exp.Boolean):
            raise FilterError(f"{node.sql('duckdb')} is not taken", "IS takes NULL, TRUE and FALSE")
        value, truth = self._condition(node.this), bool(wanted.this)
        return lambda row: value(row) is truth

    def _in(self, node: exp.Expr) -> Getter:
        kind, value = self.expression(node.this)
        pairs = [self.pair(node.this, kind, item) for item in node.expressions]
        if not pairs:
            raise FilterError("IN takes at least one value")
        if len({to for _, to, _ in pairs}) > 1 or not all(map(_is_constant, node.expressions)):
            return self._among(value, [(convert, item) for _, convert, item in pairs])
        convert = pairs[0][1]
        items = frozenset(item(()) for _, _, item in pairs)
        wanted, unknown = items - {None}, None if None in items else False

        def listed(row: Any) -> bool | None:
            it = value(row)
            if it is None:
                return None
            return True if (it if convert is None else convert(it)) in wanted else unknown

        return listed

    def _among(self, value: Getter, items: list[tuple[Convert | None, Getter]]) -> Getter:
        def among(row: Any) -> bool | None:
            it = value(row)
            if it is None:
                return None
            known: bool | None = False
            for convert, item in items:
                other = item(row)
                if other is None:
                    known = None
                elif (it if convert is None else convert(it)) == other:
                    return True
            return known

        return among

    def _like(self, node: exp.Expr, escape: exp.Expr | None) -> Getter:
        kind, value = self.expression(node.this)
        pattern = node.expression
        if not isinstance(node, (exp.Like, exp.ILike)) or not isinstance(pattern, exp.Literal) or not pattern.is_string:
            raise FilterError("LIKE takes a pattern as text")
        if kind not in (TEXT, NULL):
            raise FilterError(f"{node.this.sql('duckdb')} is no text: it is of kind {kind}")
        if escape is not None and (not isinstance(escape, exp.Literal) or len(escape.name) != 1):
            raise FilterError("ESCAPE takes one character")
        test = unary(like(pattern.name, escape.name if escape else None, fold=isinstance(node, exp.ILike)), value)
        return negated(test) if node.args.get("negate") else test

    def _arithmetic(self, node: exp.Expr) -> Typed:
        (left_kind, left), (right_kind, right) = self._number(node.this), self._number(node.expression)
        kinds = {left_kind, right_kind}
        if isinstance(node, exp.Div):
            return FLOAT, binary(finite(lambda a, b: float(a) / float(b) if b else None), left, right)
        kind = FLOAT if FLOAT in kinds else DECIMAL if DECIMAL in kinds else INT
        if kind == FLOAT and DECIMAL in kinds:
            left, right = unary(float, left), unary(float, right)
        if isinstance(node, exp.Mod):
            return kind, binary(finite(remainder), left, right)
        return kind, binary(finite(_ARITHMETIC[type(node)]), left, right)

    def _coalesce(self, nodes: list[exp.Expr]) -> Typed:
        found = [self.expression(node) for node in nodes]
        kinds = {kind for kind, _ in found if kind != NULL}
        if len(kinds) > 1 and not kinds <= set(NUMBERS):
            raise FilterError(f"COALESCE of {' and '.join(sorted(kinds))}", "Its values are of one kind")
        kind = FLOAT if FLOAT in kinds else DECIMAL if DECIMAL in kinds else next(iter(kinds), NULL)
        getters = [unary(float, value) if kind == FLOAT and each == DECIMAL else value for each, value in found]

        def first(row: Any) -> Any:
            return next((value for getter in getters if (value := getter(row)) is not None), None)

        return kind, first

    def _called(self, name: type[exp.Expr], nodes: list[exp.Expr]) -> Typed:
        function = FUNCTIONS[name]
        assert function is not None
        if len(nodes) != len(function.takes):
            raise FilterError(f"{name.key.upper()} takes {len(function.takes)} arguments")
        found = [self.expression(node) for node in nodes]
        for node, (kind, _), taken in zip(nodes, found, function.takes, strict=True):
            if kind not in (*taken, NULL):
                raise FilterError(f"{name.key.upper()} does not take {node.sql('duckdb')}, which is of kind {kind}")
        kind = function.gives or found[0][0]
        getters = [value for _, value in found]
        return kind, unary(function.call, getters[0]) if len(getters) == 1 else binary(function.call, *getters)


def _is_constant(node: exp.Expr) -> bool:
    inner = node.this if isinstance(node, exp.Neg) else node
    return isinstance(inner, exp.Literal | exp.Cast | exp.Null | exp.Boolean)


def _applied(call: Convert, value: Getter, node: exp.Expr) -> Getter:
    """A function of the node's value; a constant's is computed now."""
    return constant("", unary(call, value)(()))[1] if _is_constant(node) else unary(call, value)


def _fitting(node: exp.Expr, kind: str, other: str) -> tuple[str, Convert | None]:
    """Kind in which values of ``kind`` and ``other`` compare, and the conversion to it."""
    if kind == other:
        return kind, None
    if kind in NUMBERS and other in NUMBERS:
        if FLOAT in (kind, other):
            return FLOAT, float if kind == DECIMAL else None
        return DECIMAL, None
    if kind == TEXT and other in (TIMESTAMP, DATE) and isinstance(node, exp.Literal):
        read = as_timestamp if other == TIMESTAMP else as_date
        read(node.name)  # refuse what is not a time now, not row by row
        return other, read
    if kind == DATE and other == TIMESTAMP:
        return TIMESTAMP, _midnight
    return (TIMESTAMP, None) if (kind, other) == (TIMESTAMP, DATE) else (kind, None)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day)  # noqa: DTZ001 - rows have UTC without a zone


def flat(tree: exp.Expr, kind: type[exp.Expr]) -> list[exp.Expr]:
    """Operands of a chain such as ``a AND (b AND c)``, in order."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, kind):
            waiting += [node.args["expression"], node.this]
        elif isinstance(node, exp.Paren) and isinstance(node.this, (kind, exp.Paren)):
            waiting.append(node.this)
        else:
            found.append(node)
    return found
