"""A condition as a function of a row: closures over tuples, with SQL's three truth values (None is NULL).

A change has few rows, so the start-up cost counts: about 1 µs a row here, against 80 µs for Arrow and 1,000 µs for
DuckDB before the first row (docs/decisions/0015-filters-in-memory.md).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from sqlglot import exp

from serve.errors import FilterError
from serve.views.functions import (
    BOOL,
    DATE,
    DECIMAL,
    EXTRACTS,
    FLOAT,
    FUNCTIONS,
    INT,
    NULL,
    NUMBERS,
    OTHER,
    TEXT,
    TIMESTAMP,
    Columns,
    Getter,
    all_of,
    any_of,
    as_date,
    as_timestamp,
    binary,
    constant,
    finite,
    like,
    negated,
    number,
    remainder,
    unary,
)
from serve.views.parse import flat

Convert = Callable[[Any], Any]
Typed = tuple[str, Getter]
"""What an expression gives: the kind of its values, and its value in a row."""

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
_LITERALS = (exp.Literal, exp.Cast, exp.Null, exp.Boolean)
_SAME = (exp.NullSafeEQ, exp.NullSafeNEQ)


def compile_condition(tree: exp.Expr, columns: Columns) -> Getter:
    """The condition's value in a row: True, False or None; only True rows match. Raises FilterError."""
    kind, getter = compile_expression(tree, columns)
    if kind not in (BOOL, NULL):
        raise FilterError(f"{tree.sql('duckdb')} is no condition: it gives a value of kind {kind}")
    return getter


@dataclass(frozen=True, slots=True)
class Pin:
    """What a condition says of one column: rows that match have one of these values there.

    Attributes:
        column: its index in a row.
        values: as rows have them.
    """

    column: int
    values: frozenset[Any]


def pin_of(tree: exp.Expr, columns: Columns) -> Pin | None:
    """The pin with the fewest values, in a condition such as ``city = 'Bonn' AND …``; None if there is none."""
    compiler = _FilterCompiler(columns)
    found = [pin for part in flat(tree, exp.And) if (pin := compiler.pin(part)) is not None]
    return min(found, key=lambda pin: len(pin.values), default=None)


def compile_expression(tree: exp.Expr, columns: Columns) -> Typed:
    """Kind and value of an expression that :func:`serve.views.parse.check` accepted. Raises FilterError."""
    return _FilterCompiler(columns).expression(tree)


class _FilterCompiler:
    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def expression(self, node: exp.Expr) -> Typed:
        match node:
            case exp.Paren():
                return self.expression(node.this)
            case exp.Column():
                i, kind = self._columns.at[self._columns.resolve(node.name)]
                return kind, operator.itemgetter(i)
            case exp.Literal() | exp.Boolean() | exp.Null() | exp.Cast():
                return constant(*self._literal(node))
            case exp.And() | exp.Or():
                parts = [self._condition(part) for part in flat(node, type(node))]
                return BOOL, (all_of if isinstance(node, exp.And) else any_of)(parts)
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
                return kind, unary(operator.neg, value)
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

    def pin(self, node: exp.Expr) -> Pin | None:
        """The pin of ``column = literal``, either way round, or ``column IN (literals)``; None otherwise."""
        match node:
            case exp.EQ():
                sides = [(node.this, [node.expression]), (node.expression, [node.this])]
            case exp.In():
                sides = [(node.this, node.expressions)]
            case _:
                return None
        for column, others in sides:
            if isinstance(column, exp.Column) and all(isinstance(each, _LITERALS) for each in others):
                at, kind = self._columns.at[self._columns.resolve(column.name)]
                pairs = [self._pair(column, kind, other) for other in others]
                if all(convert is None for _, convert, _ in pairs):
                    return Pin(at, frozenset(value(()) for _, _, value in pairs) - {None})
        return None

    # Parts

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
            case exp.Neg():
                kind, value = self._literal(node.this)
                return kind, -value if kind in NUMBERS else value
            case exp.Paren():
                return self._literal(node.this)
            case exp.Cast() if isinstance(node.this, exp.Literal) and node.this.is_string:
                if node.to.is_type("timestamp", "timestamptz", "timestampntz"):
                    return TIMESTAMP, as_timestamp(node.this.name)
                if node.to.is_type("date"):
                    return DATE, as_date(node.this.name)
        raise FilterError(f"{node.sql('duckdb')} is not taken in a filter", "Casts: TIMESTAMP '…' and DATE '…' only")

    def _pair(self, node: exp.Expr, kind: str, other: exp.Expr) -> tuple[str, Convert | None, Getter]:
        """How to compare values of ``node``, which is of ``kind``, with ``other``.

        Returns:
            The common kind, the conversion to it (None: as they are), and the other's values in that kind. ``node``
            itself is
            not compiled here: if it is compared several times it is still evaluated once.
        """
        theirs, value = self.expression(other)
        fitted, ours = _fitting(node, kind, theirs)
        fitted_too, convert = _fitting(other, theirs, kind)
        if (fitted != fitted_too and NULL not in (kind, theirs)) or OTHER in (kind, theirs):
            raise FilterError(f"{node.sql('duckdb')} ({kind}) and {other.sql('duckdb')} ({theirs}) do not compare")
        return fitted, ours, value if convert is None else unary(convert, value)

    def _compared(self, node: exp.Expr) -> Getter:
        kind, value = self.expression(node.this)
        _, convert, right = self._pair(node.this, kind, node.expression)
        left = value if convert is None else unary(convert, value)
        if isinstance(node, exp.NullSafeEQ):
            return lambda row: left(row) == right(row)
        if isinstance(node, exp.NullSafeNEQ):
            return lambda row: left(row) != right(row)
        return binary(_COMPARE[type(node)], left, right)

    def _between(self, node: exp.Expr) -> Getter:
        kind, value = self.expression(node.this)
        _, to_low, low = self._pair(node.this, kind, node.args["low"])
        _, to_high, high = self._pair(node.this, kind, node.args["high"])

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
        _, convert, other = self._pair(node.this, kind, node.expression)

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
        pairs = [self._pair(node.this, kind, item) for item in node.expressions]
        if not pairs:
            raise FilterError("IN takes at least one value")
        if len({to for _, to, _ in pairs}) > 1 or not all(isinstance(each, _LITERALS) for each in node.expressions):
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
