"""Expectations that a source wants judged at the border: Spark SQL, compiled to a function of one event's JSON fields.

Spark judges every event again, so whatever fails here must fail there too. Therefore only expressions with the same
meaning in both are supported: comparisons, BETWEEN, IN, IS NULL, AND, OR and NOT over literals and fields of plain
types. And only unambiguous values are judged: an event whose value Spark might convert or refuse passes the border.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingest.border.ddl import Field, parse_ddl
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.expectations import BORDER
from lakehouse.contract.pipeline import Source
from lakehouse.contract.sqlcheck import QueryRefused, parse_condition
from lakehouse.contract.tomlfile import line_of

if TYPE_CHECKING:
    from sqlglot import exp

Fields = Mapping[str, Any]
Value = Callable[[Fields], Any]
"""The value of a field in an event; None is null."""
Verdict = Callable[[Fields], bool | None]
"""Whether a condition holds for an event; None is unknown."""

BITS = {"TINYINT": 8, "BYTE": 8, "SMALLINT": 16, "SHORT": 16, "INT": 32, "INTEGER": 32, "BIGINT": 64, "LONG": 64}
SINGLES, DOUBLES = ("FLOAT", "REAL"), ("DOUBLE",)

_INTEGER, _FLOAT, _STRING, _BOOLEAN = "integer", "float", "string", "boolean"
_LEAST_SINGLE, _MOST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_NUMBER = re.compile(r"\d{1,19}|(?=.{1,24}$)(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d{1,3})?", re.ASCII)
# Spark and sqlglot may read these differently: escapes, variables, comments.
_AMBIGUOUS = ("\\", "${", "--", "/*")
_SUPPORTED = (
    "comparisons, BETWEEN, IN, IS NULL, length, AND, OR, NOT over integers, floats, strings, booleans and literals"
)
_REMEDY = f"Supported there: {_SUPPORTED} of fitting types. Or leave out at: Spark judges it behind the border"


class _Unsupported(Exception):
    """A part of an expression that the border does not judge."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """A field, the length of one, or a literal.

    Attributes:
        kind: ``integer``, ``float``, ``string`` or ``boolean``.
        get: reads the value from an event; None for a literal.
        exact: greatest integer literal that it can be compared with exactly.
    """

    kind: str
    get: Value | None = None
    literal: Any = None
    exact: int = 2**63


def compile_expectations(source: Source, file: Path | None = None) -> Callable[[Fields], str | None] | None:
    """A function that returns the name of the first expectation that an event fails, or None; None if none is declared.

    Args:
        source: its expectations with ``at = "border"``.
        file: that declares it, for errors.

    Raises:
        ConfigError: an expectation cannot be judged at the border.
        EnvironmentProblem: sqlglot is not installed.
    """
    named = {name: found.sql for name, found in source.expectations.items() if found.at == BORDER}
    if not named:
        return None
    declared = parse_ddl(source.schema)
    verdicts = []
    for name, sql in named.items():
        try:
            verdicts.append((name, _ExpectationCompiler(declared).compile(sql)))
        except (_Unsupported, QueryRefused) as error:
            problem = error.problem if isinstance(error, QueryRefused) else str(error)
            key, line = f"sources.{source.name}.expectations.{name}", line_of(file, name) if file else None
            text = f"cannot be judged at the border: {problem}"
            raise ConfigError(text, key=key, remedy=_REMEDY, file=file, line=line) from None
        except ModuleNotFoundError as error:
            raise EnvironmentProblem(f"at = 'border' needs {error.name}", f"pip install {error.name}") from None

    def failed(fields: Fields) -> str | None:
        try:
            for name, holds in verdicts:
                if not holds(fields):
                    # Spark checks the schema first, and quarantine keeps the first reason.
                    return name if all(fits(fields.get(n), field) for n, field in declared.items()) else None
        except Doubtful:
            pass
        return None

    return failed


class _ExpectationCompiler:
    """Compiles a parsed expression to a function of an event's fields."""

    def __init__(self, declared: Mapping[str, Field]) -> None:
        self._declared = declared

    def compile(self, sql: str) -> Verdict:
        if bad := next((text for text in _AMBIGUOUS if text in sql), ""):
            raise _Unsupported(f"it has {bad!r} in it")
        return self._verdict(parse_condition(sql))

    def _verdict(self, node: exp.Expr) -> Verdict:
        from sqlglot import exp

        node = node.unnest()
        if isinstance(node, exp.And | exp.Or):
            left, right = self._verdict(node.left), self._verdict(node.right)
            return _both(left, right) if isinstance(node, exp.And) else _either(left, right)
        if isinstance(node, exp.Not):
            return _negated(self._verdict(node.this))
        if isinstance(node, exp.Is):
            return self._is(node)
        if isinstance(node, exp.Between):
            _only(node, "this", "low", "high")
            of, low, high = (self._operand(node.args[name]) for name in ("this", "low", "high"))
            return _both(_comparison(of, low, operator.ge, node), _comparison(of, high, operator.le, node))
        if isinstance(node, exp.In):
            return self._among(node)
        if isinstance(node, exp.Column | exp.Dot):
            of = self._operand(node)
            if of.kind != _BOOLEAN or of.get is None:
                raise _Unsupported(f"{_shown(node)} is no condition")
            return of.get
        compare = _comparisons().get(type(node))
        if compare is None:
            raise _Unsupported(_shown(node))
        _only(node, "this", "expression")
        return _comparison(self._operand(node.args["this"]), self._operand(node.args["expression"]), compare, node)

    def _is(self, node: exp.Is) -> Verdict:
        from sqlglot import exp

        _only(node, "this", "expression")
        of, wanted = self._operand(node.this), node.expression
        if of.get is None or not isinstance(wanted, exp.Null | exp.Boolean):
            raise _Unsupported(_shown(node))
        if isinstance(wanted, exp.Boolean) and of.kind != _BOOLEAN:
            raise _Unsupported(_shown(node))
        get, value = of.get, None if isinstance(wanted, exp.Null) else bool(wanted.this)
        return lambda fields: get(fields) is value

    def _among(self, node: exp.In) -> Verdict:
        _only(node, "this", "expressions")
        of, choices = self._operand(node.this), [self._operand(item) for item in node.expressions]
        if of.get is None or of.kind not in (_INTEGER, _STRING) or not choices:
            raise _Unsupported(_shown(node))
        if any(item.get is not None or item.kind != of.kind for item in choices):
            raise _Unsupported(f"{_shown(node)}: literals of its own kind are taken")
        get, values = of.get, frozenset(item.literal for item in choices)

        def among(fields: Fields) -> bool | None:
            value = get(fields)
            return None if value is None else value in values

        return among

    def _operand(self, node: exp.Expr) -> _Operand:
        from sqlglot import exp

        node = node.unnest()
        if isinstance(node, exp.Column | exp.Dot):
            return self._field(node)
        if isinstance(node, exp.Length):
            _only(node, "this")
            of = self._operand(node.this)
            if of.kind == _STRING and of.get is not None:
                get = of.get
                return _Operand(_INTEGER, lambda fields: None if (value := get(fields)) is None else len(value))
        if isinstance(node, exp.Boolean):
            return _Operand(_BOOLEAN, literal=bool(node.this))
        sign, number = (-1, node.this.unnest()) if isinstance(node, exp.Neg) else (1, node)
        if isinstance(number, exp.Literal) and number.is_string and number is node:
            return _Operand(_STRING, literal=number.this)
        if isinstance(number, exp.Literal) and not number.is_string and _NUMBER.fullmatch(number.this):
            if number.this.isdigit() and -(2**63) <= sign * int(number.this) < 2**63:
                return _Operand(_INTEGER, literal=sign * int(number.this))
            if not number.this.isdigit() and math.isfinite(float(number.this)):
                return _Operand(_FLOAT, literal=sign * float(number.this))
        raise _Unsupported(_shown(node))

    def _field(self, node: exp.Column | exp.Dot) -> _Operand:
        from sqlglot import exp

        below, path, field = self._declared, list[str](), None
        if not all(isinstance(inner, exp.Column | exp.Dot | exp.Identifier) for inner in node.walk()):
            raise _Unsupported(_shown(node))
        for part in node.parts:
            names = [name for name in below if name.lower() == part.name.lower()]  # Spark ignores case
            if len(names) != 1:
                raise _Unsupported(f"the schema has no one field {_shown(node)}")
            path, field = [*path, names[0]], below[names[0]]
            below = field.fields
        kind = field.declared if field is not None else ""
        if kind in BITS:
            return _Operand(_INTEGER, value_at(path, kind))
        if kind in SINGLES:
            return _Operand(_FLOAT, value_at(path, kind), exact=2**24)
        if kind in DOUBLES:
            return _Operand(_FLOAT, value_at(path, kind), exact=2**53)
        if kind in ("STRING", "BOOLEAN"):
            return _Operand(kind.lower(), value_at(path, kind))
        raise _Unsupported(f"{_shown(node)} is {kind}")


def _comparison(left: _Operand, right: _Operand, compare: Callable[[Any, Any], bool], node: exp.Expr) -> Verdict:
    if left.get is None:
        left, right, compare = right, left, _MIRRORED[compare]
    if left.get is None or not _fit(left, right):
        raise _Unsupported(f"{_shown(node)}: a field with a literal, or with a field, of its own kind is taken")
    if left.kind == _BOOLEAN and compare not in (operator.eq, operator.ne):
        raise _Unsupported(f"{_shown(node)}: booleans are equal or not")
    get, other = left.get, right.get
    if other is None:
        literal = float(right.literal) if left.kind == _FLOAT else right.literal

        def with_literal(fields: Fields) -> bool | None:
            value = get(fields)
            return None if value is None else compare(value, literal)

        return with_literal

    def with_field(fields: Fields) -> bool | None:
        value, second = get(fields), other(fields)
        return None if value is None or second is None else compare(value, second)

    return with_field


def _fit(field: _Operand, other: _Operand) -> bool:
    if other.get is None and other.kind == _INTEGER and field.kind in (_INTEGER, _FLOAT):
        return bool(abs(other.literal) <= field.exact)
    return field.kind == other.kind


def _both(left: Verdict, right: Verdict) -> Verdict:
    def both(fields: Fields) -> bool | None:
        first = left(fields)
        if first is False:
            return False
        second = right(fields)
        return False if second is False else None if first is None or second is None else True

    return both


def _either(left: Verdict, right: Verdict) -> Verdict:
    def either(fields: Fields) -> bool | None:
        first = left(fields)
        if first is True:
            return True
        second = right(fields)
        return True if second is True else None if first is None or second is None else False

    return either


def _negated(of: Verdict) -> Verdict:
    def negated(fields: Fields) -> bool | None:
        found = of(fields)
        return None if found is None else not found

    return negated


def _only(node: exp.Expr, *known: str) -> None:
    """Refuse a node with arguments that are not looked at."""
    if any(value for name, value in node.args.items() if name not in known):
        raise _Unsupported(_shown(node))


def _shown(node: exp.Expr) -> str:
    text = str(node.sql(dialect="spark"))
    return text if len(text) <= 60 else f"{text[:60]} …"


def _comparisons() -> Mapping[type, Callable[[Any, Any], bool]]:
    from sqlglot import exp

    return {
        exp.EQ: operator.eq, exp.NEQ: operator.ne, exp.LT: operator.lt,
        exp.LTE: operator.le, exp.GT: operator.gt, exp.GTE: operator.ge,
    }  # fmt: skip


_MIRRORED: Mapping[Callable[[Any, Any], bool], Callable[[Any, Any], bool]] = {
    operator.eq: operator.eq, operator.ne: operator.ne, operator.lt: operator.gt,
    operator.le: operator.ge, operator.gt: operator.lt, operator.ge: operator.le,
}  # fmt: skip


class Doubtful(Exception):
    """Only Spark can tell the value of a field: its JSON reader would convert it, wrap it around, or refuse it."""


def value_at(path: list[str], declared: str) -> Value:
    """A reader of the field at a path, of a type above, ``STRING`` or ``BOOLEAN``; it raises :class:`Doubtful`."""
    if declared in BITS:
        return _reader(path, _integer_of(BITS[declared]))
    if declared in SINGLES:
        return _reader(path, _single)
    if declared in DOUBLES:
        return _reader(path, _double)
    return _reader(path, _text if declared == "STRING" else _boolean)


def _reader(path: list[str], convert: Callable[[Any], Any]) -> Value:
    """A reader of the field at a path; it returns None if the field or an object around it is absent or null."""
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
    """The nearest 32-bit float; doubtful if rounding the text once and rounding it twice may differ."""
    value = _double(value)
    if value == 0:
        return 0.0
    halfway = struct.unpack("<Q", struct.pack("<d", value))[0] & 0x1FFFFFFF == 0x10000000
    if halfway or not _LEAST_SINGLE <= abs(value) <= _MOST_SINGLE:
        raise Doubtful
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def fits(value: Any, field: Field) -> bool:
    """Whether a value certainly has the declared type, as far as is known here."""
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
