"""Conditions of subscribers and keys, in DuckDB's dialect: text into a tree that holds only what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from lakehouse.contract.errors import FilterError
from lakehouse.contract.sql.closures import FUNCTIONS, Columns

MAX_LENGTH = 4_096  # characters
MAX_DEPTH = 32  # levels; a chain of ANDs or ORs counts as one
MAX_NODES = 1_024
# These need no parentheses. exp.Func would not do: for sqlglot, AND and OR are functions too.
_CHAINS = (exp.And, exp.Or)
_CLOSED: tuple[type[exp.Expr], ...] = (
    exp.Paren,
    exp.Column,
    exp.Literal,
    exp.Boolean,
    exp.Null,
    exp.Extract,
    *FUNCTIONS,
)

ALLOWED: frozenset[type[exp.Expr]] = frozenset(
    {
        exp.Column, exp.Identifier, exp.Literal, exp.Boolean, exp.Null, exp.Paren,
        exp.And, exp.Or, exp.Not,
        exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ, exp.Is,
        exp.In, exp.Between, exp.Like, exp.ILike, exp.Escape,
        exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg,
        exp.Cast, exp.DataType, exp.Extract, exp.Var,
        *FUNCTIONS,
    }
)  # fmt: skip
"""Kinds of nodes that a condition may have; casts are checked further: of a literal, to a time or a day."""


_PLAIN = frozenset({"this", "expression"})
_ARGUMENTS: dict[type[exp.Expr], frozenset[str]] = {
    exp.Literal: frozenset({"this", "is_string"}),
    exp.Identifier: frozenset({"this", "quoted"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Between: frozenset({"this", "low", "high"}),
    exp.Like: _PLAIN | {"negate"},
    exp.ILike: _PLAIN | {"negate"},
    exp.Div: _PLAIN | {"typed", "safe"},
    exp.Mod: _PLAIN | {"safe"},
    exp.Cast: frozenset({"this", "to"}),
    exp.DataType: frozenset({"this", "nested"}),
    exp.Coalesce: frozenset({"this", "expressions", "is_nvl"}),
}
"""What a node may carry: an argument that nobody here reads would be a condition that nobody checks."""


def parse_condition(sql: str, columns: Columns) -> exp.Expr | None:
    """The condition with columns spelled as in the table, without comments and redundant parentheses. None for no text.

    Filters are shared by ``.sql("duckdb")`` of the tree: texts that are alike there mean the same.
    """
    if not sql.strip():
        return None
    return normal(checked(sql), columns)


def checked(sql: str) -> exp.Expr:
    """A condition that may be taken, whatever columns there are. Raises FilterError."""
    tree = parsed(sql)
    check(tree)
    return tree


def parsed(sql: str) -> exp.Expr:
    """One expression or statement. Raises FilterError if it is too long or not SQL."""
    if len(sql) > MAX_LENGTH:
        raise FilterError(f"it has {len(sql)} characters, {MAX_LENGTH} are taken")
    if "\0" in sql:
        raise FilterError("it holds a NUL character")
    try:
        tree = sqlglot.parse_one(sql, dialect="duckdb")
    except SqlglotError as error:
        told = getattr(error, "errors", None)
        raise FilterError(_not_sql(told[0]["description"] if told else str(error).splitlines()[0])) from None
    except RecursionError:
        raise FilterError(f"it is nested too deeply, {MAX_DEPTH} levels are taken") from None
    if not isinstance(tree, exp.Expr):
        raise FilterError("it is no condition")
    return tree


def check(tree: exp.Expr) -> None:
    """Raises FilterError for the first node that is not allowed, or if there are too many."""
    for count, node in enumerate(tree.walk(), 1):
        if count > MAX_NODES:
            raise FilterError(f"it has more than {MAX_NODES} parts")
        if type(node) not in ALLOWED:
            raise FilterError(f"{_named(node)} is not taken in a filter", "docs/reference/protocol.md lists what is")
        if problems := node.error_messages():  # of a unary operator without a value, for one
            raise FilterError(_not_sql(problems[0]))
        if isinstance(node, exp.Column) and node.table:
            dotted = ".".join(part.name for part in node.parts)
            remedy = f'Write {node.name}, or with quotes "{dotted}" for a field of a reference'
            raise FilterError(f"{node.sql()} is qualified", remedy)
        known = _ARGUMENTS.get(type(node), _PLAIN)
        if extra := [name for name, value in node.args.items() if value and name not in known]:
            raise FilterError(
                f"{_named(node)} is not taken with {', '.join(extra)}", "docs/reference/protocol.md lists what is"
            )
    for depth, _ in _levels(tree):
        if depth > MAX_DEPTH:
            raise FilterError(f"it is nested too deeply, {MAX_DEPTH} levels are taken")


def normal(tree: exp.Expr, columns: Columns) -> exp.Expr:
    """The same tree with columns quoted and spelled as in the table, without comments and redundant parentheses."""

    def one(node: exp.Expr) -> exp.Expr:
        node.comments = None
        if isinstance(node, exp.Column):
            return exp.Column(this=exp.to_identifier(columns.resolve(node.name), quoted=True))
        return node

    tree = exp.Paren(this=tree.transform(one))
    for paren in reversed(list(tree.find_all(exp.Paren))):  # the innermost first
        inner, outer = paren.this, paren.parent
        if outer is None:
            continue
        plain = isinstance(inner, exp.Predicate) or type(inner) is type(outer)
        if isinstance(outer, exp.Paren) or isinstance(inner, _CLOSED) or (plain and isinstance(outer, _CHAINS)):
            paren.replace(inner)
    root: exp.Expr = tree.this
    return root.pop()


def conjunction(*conditions: exp.Expr | None) -> exp.Expr | None:
    """AND of those that are not None; None if all are."""
    present = [condition for condition in conditions if condition is not None]
    return exp.and_(*present, copy=True) if present else None


def _levels(tree: exp.Expr) -> Iterator[tuple[int, exp.Expr]]:
    waiting: list[tuple[int, exp.Expr]] = [(1, tree)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        for child in node.iter_expressions():
            same = isinstance(node, exp.Connector) and type(child) is type(node)
            waiting.append((depth if same or isinstance(node, exp.Paren) else depth + 1, child))


def _not_sql(problem: str) -> str:
    """What the parser says, without the names of its classes."""
    lacks = re.match(r"Required keyword: '\w+' missing for <class '[\w.]*?(\w+)'>", problem)
    return f"not SQL: {lacks[1].upper()} lacks a value" if lacks else f"not SQL: {problem}"


def _named(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return f"the function {node.name}"
    if isinstance(node, exp.Query):
        return "a query"
    return node.key.upper()
