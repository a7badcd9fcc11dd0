"""Expectations that a source wants judged at the border: Spark SQL, compiled to a function of one event's JSON fields.

Spark judges every event again, so whatever fails here must fail there too. Therefore only expressions with the same
meaning in both are supported: comparisons, BETWEEN, IN, IS NULL, AND, OR and NOT over literals and fields of plain
types. And only unambiguous values are judged: an event whose value Spark might convert or refuse passes the border.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlglot import exp

from lakehouse.contract.errors import ConfigError, StatementError
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.expectations import BORDER
from lakehouse.contract.sql import BOOL, FLOAT, INT, TEXT
from lakehouse.contract.sql.closures import compile_condition
from lakehouse.contract.sql.ddl import Field, parse_ddl
from lakehouse.contract.sql.spark import parse_condition
from lakehouse.contract.tomlfile import line_of

Fields = Mapping[str, Any]
Value = Callable[[Fields], Any]
"""The value of a field in an event; None is null."""

BITS = {"TINYINT": 8, "BYTE": 8, "SMALLINT": 16, "SHORT": 16, "INT": 32, "INTEGER": 32, "BIGINT": 64, "LONG": 64}
SINGLES, DOUBLES = ("FLOAT", "REAL"), ("DOUBLE",)
_KINDS = dict.fromkeys(BITS, INT) | dict.fromkeys((*SINGLES, *DOUBLES), FLOAT) | {"STRING": TEXT, "BOOLEAN": BOOL}

_LEAST_SINGLE, _MOST_SINGLE = 2.0**-126, (2 - 2.0**-23) * 2.0**127
_LITERAL = re.compile(r"\d{1,19}|(?=.{1,24}$)(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d{1,3})?", re.ASCII)
# Spark and sqlglot may read these differently: escapes, variables, comments.
_AMBIGUOUS = ("\\", "${", "--", "/*")
_SUPPORTED = (
    "comparisons, BETWEEN, IN, IS NULL, length, AND, OR, NOT over integers, floats, strings, booleans and literals"
)
_REMEDY = f"Supported there: {_SUPPORTED} of fitting types. Or leave out at: Spark judges it behind the border"


class _Unsupported(Exception):
    """A part of an expression that the border does not judge."""


def compile_expectations(source: Source, file: Path | None = None) -> Callable[[Fields], str | None]:
    """A function that returns the name of the first expectation with ``at = "border"`` that an event fails, or None.

    Raises:
        ConfigError: an expectation cannot be judged at the border.
    """
    declared = parse_ddl(source.schema)
    event_fields = _EventFields(declared)
    verdicts = []
    for name, expectation in source.expectations.items():
        if expectation.at != BORDER:
            continue
        try:
            if bad := next((text for text in _AMBIGUOUS if text in expectation.sql), ""):
                raise _Unsupported(f"it has {bad!r} in it")
            tree = parse_condition(expectation.sql)
            _check(tree, event_fields)
            verdicts.append((name, compile_condition(tree, event_fields)))
        except (_Unsupported, StatementError) as error:
            problem = error.problem if isinstance(error, StatementError) else str(error)
            key, line = f"sources.{source.name}.expectations.{name}", line_of(file, name) if file else None
            text = f"cannot be judged at the border: {problem}"
            raise ConfigError(text, key=key, remedy=_REMEDY, file=file, line=line) from None

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


class _EventFields:
    """The fields of an event, for the compiler of conditions."""

    def __init__(self, declared: Mapping[str, Field]) -> None:
        self._declared = declared

    def column(self, node: exp.Expr) -> tuple[str, Value]:
        """Kind of a field, and the reader of its value."""
        path, declared = self.find(node)
        kind = _KINDS.get(declared)
        if kind is None:
            raise _Unsupported(f"{_shown(node)} is {declared}")
        return kind, value_at(path, declared)

    def find(self, node: exp.Expr) -> tuple[list[str], str]:
        """Path of a field, and its declared type."""
        below, path, field = self._declared, list[str](), None
        if not all(isinstance(inner, exp.Column | exp.Dot | exp.Identifier) for inner in node.walk()):
            raise _Unsupported(_shown(node))
        for part in node.parts:  # type: ignore[attr-defined]
            names = [name for name in below if name.lower() == part.name.lower()]  # Spark ignores case
            if len(names) != 1:
                raise _Unsupported(f"the schema has no one field {_shown(node)}")
            path, field = [*path, names[0]], below[names[0]]
            below = field.fields
        return path, field.declared if field is not None else ""


def _check(node: exp.Expr, fields: _EventFields) -> None:
    """Refuse a condition whose meaning may differ between Spark and the closures."""
    match node:
        case exp.Paren():
            _check(node.this, fields)
        case exp.And() | exp.Or():
            _check(node.left, fields)
            _check(node.right, fields)
        case exp.Not():
            _check(node.this, fields)
        case exp.Column() | exp.Dot():
            if fields.column(node)[0] != BOOL:
                raise _Unsupported(f"{_shown(node)} is no condition")
        case exp.Is():
            _only(node, "this", "expression")
            kind = _kind_of_field(node.this, fields)
            boolean = isinstance(node.expression, exp.Boolean) and kind == BOOL
            if not kind or not (boolean or isinstance(node.expression, exp.Null)):
                raise _Unsupported(_shown(node))
        case exp.Between():
            _only(node, "this", "low", "high")
            for bound in ("low", "high"):
                _check_pair(node, node.this, node.args[bound], fields)
        case exp.In():
            _only(node, "this", "expressions")
            if _kind_of_field(node.this, fields) not in (INT, TEXT) or not node.expressions:
                raise _Unsupported(_shown(node))
            for item in node.expressions:
                if _kind_of_field(item, fields) or _kind_of_literal(item) != _kind_of_field(node.this, fields):
                    raise _Unsupported(f"{_shown(node)}: literals of its own kind are taken")
        case exp.EQ() | exp.NEQ() | exp.LT() | exp.LTE() | exp.GT() | exp.GTE():
            _only(node, "this", "expression")
            if _kind_of_field(node.this, fields):
                _check_pair(node, node.this, node.expression, fields)
            else:
                _check_pair(node, node.expression, node.this, fields)
        case _:
            raise _Unsupported(_shown(node))


def _check_pair(node: exp.Expr, field: exp.Expr, other: exp.Expr, fields: _EventFields) -> None:
    """A field compares with a field or a literal of its own kind, and with an integer that it holds exactly."""
    kind, second = _kind_of_field(field, fields), _kind_of_field(other, fields)
    literal = "" if second else _kind_of_literal(other)
    fits = kind == (second or literal)
    if kind == FLOAT and literal == INT:
        exact = 2**24 if fields.find(field.unnest())[1] in SINGLES else 2**53
        fits = int(other.find(exp.Literal).name) <= exact  # type: ignore[union-attr]
    if not kind or not fits:
        raise _Unsupported(f"{_shown(node)}: a field with a literal, or with a field, of its own kind is taken")
    if kind == BOOL and not isinstance(node, exp.EQ | exp.NEQ):
        raise _Unsupported(f"{_shown(node)}: booleans are equal or not")


def _kind_of_field(node: exp.Expr, fields: _EventFields) -> str:
    """Kind of a field, or of the length of one; empty for anything else."""
    node = node.unnest()
    if isinstance(node, exp.Length):
        _only(node, "this")
        return INT if _kind_of_field(node.this, fields) == TEXT else ""
    return fields.column(node)[0] if isinstance(node, exp.Column | exp.Dot) else ""


def _kind_of_literal(node: exp.Expr) -> str:
    node = node.unnest()
    if isinstance(node, exp.Boolean):
        return BOOL
    number = node.this.unnest() if isinstance(node, exp.Neg) else node
    if isinstance(number, exp.Literal):
        text = number.this
        if number.is_string and number is node:
            return TEXT
        if not number.is_string and _LITERAL.fullmatch(text):
            if text.isdigit() and int(text) < 2**63 + (number is not node):
                return INT
            if not text.isdigit() and math.isfinite(float(text)):
                return FLOAT
    raise _Unsupported(_shown(node))


def _only(node: exp.Expr, *known: str) -> None:
    """Refuse a node with arguments that are not looked at."""
    if any(value for name, value in node.args.items() if name not in known):
        raise _Unsupported(_shown(node))


def _shown(node: exp.Expr) -> str:
    text = str(node.sql(dialect="spark"))
    return text if len(text) <= 60 else f"{text[:60]} …"


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
    return _reader(path, _exactly(str if declared == "STRING" else bool))


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


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise Doubtful

    return read


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
