"""SQL text into a tree that holds only what filters and live aggregates may be made of."""

from __future__ import annotations

from collections.abc import Iterator

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from serve.core.model import TableInfo
from serve.errors import FilterError
from serve.views.functions import FUNCTIONS, Columns

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


MAX_ITEMS = 64
_HOW = (exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg)
_CLAUSES = {"expressions": "SELECT", "from_": "FROM", "from": "FROM", "where": "WHERE", "group": "GROUP BY"}


def parse_condition(sql: str, columns: Columns) -> exp.Expr | None:
    """The condition with columns spelled as in the table, without comments and redundant parentheses. None for no text.

    Filters are shared by ``.sql("duckdb")`` of the tree: texts that are alike there mean the same.

    Raises:
        FilterError: it is too long or deep, not SQL, or holds something that is not allowed.
    """
    if not sql.strip():
        return None
    tree = parsed(sql)
    check(tree)
    return normal(tree, columns)


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
        raise FilterError(f"not SQL: {told[0]['description'] if told else str(error).splitlines()[0]}") from None
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
            raise FilterError(f"{_named(node)} is not taken in a filter", "docs/protocol.md lists what is")
        if isinstance(node, exp.Column) and node.table:
            raise FilterError(f"{node.sql()} is qualified", f"Write {node.name}")
        known = _ARGUMENTS.get(type(node), _PLAIN)
        if extra := [name for name, value in node.args.items() if value and name not in known]:
            raise FilterError(f"{_named(node)} is not taken with {', '.join(extra)}", "docs/protocol.md lists what is")
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


def _levels(tree: exp.Expr) -> Iterator[tuple[int, exp.Expr]]:
    waiting: list[tuple[int, exp.Expr]] = [(1, tree)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        for child in node.iter_expressions():
            same = isinstance(node, exp.Connector) and type(child) is type(node)
            waiting.append((depth if same or isinstance(node, exp.Paren) else depth + 1, child))


def _named(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return f"the function {node.name}"
    if isinstance(node, exp.Query):
        return "a query"
    return node.key.upper()


def parse_select(sql: str, table: TableInfo) -> exp.Select:
    """The statement, normalized, without FROM. Raises FilterError for what is not kept up to date here."""
    tree = parsed(sql)
    if not isinstance(tree, exp.Select):
        raise FilterError("a live aggregate is one SELECT", "Write SELECT city, sum(n) AS n GROUP BY city")
    for name, value in tree.args.items():
        if value and name not in _CLAUSES:
            raise FilterError(
                f"{name.upper()} is not kept up to date here", "SELECT … WHERE … GROUP BY … is; or make it a product"
            )
    source = tree.args.get("from_") or tree.args.get("from")
    if source is not None:
        if not isinstance(source.this, exp.Table) or source.this.sql("duckdb").strip('"') != table.name:
            raise FilterError(f"FROM names this table, {table.name!r}, or nothing")
        source.pop()
    if len(tree.expressions) > MAX_ITEMS:
        raise FilterError(f"it has more than {MAX_ITEMS} columns")
    known = Columns.of(table)
    inner, grouped = tree.args.get("where"), tree.args.get("group")
    if inner is not None:
        check(inner.this)
    if grouped is not None:
        if any(value for name, value in grouped.args.items() if name != "expressions"):
            raise FilterError("GROUP BY takes columns only")
        if not all(isinstance(node, exp.Column) for node in grouped.expressions):
            raise FilterError("GROUP BY takes columns only")
    for node in [*tree.expressions, *(grouped.expressions if grouped else [])]:
        _check_item(node)
    normalised = normal(tree, known)
    assert isinstance(normalised, exp.Select)
    return normalised


def _check_item(node: exp.Expr) -> None:
    inner = node.this if isinstance(node, exp.Alias) else node
    if isinstance(inner, exp.Column):
        check(inner)
        return
    if not isinstance(inner, _HOW):
        raise FilterError(
            f"{inner.sql('duckdb')} is not kept up to date here",
            "count, count(DISTINCT …), sum, min, max and avg are, beside the columns grouped by",
        )
    extra = [name for name, value in inner.args.items() if value and name not in ("this", "big_int")]
    if extra:
        raise FilterError(f"{inner.sql('duckdb')} is not kept up to date here")
    argument = inner.this
    if isinstance(argument, exp.Distinct):
        if not isinstance(inner, exp.Count) or len(argument.expressions) != 1 or argument.args.get("on"):
            raise FilterError("DISTINCT is taken in count(DISTINCT column) only")
        argument = argument.expressions[0]
    if not (isinstance(argument, exp.Star) and isinstance(inner, exp.Count)):
        if argument is None:
            raise FilterError(f"{inner.sql('duckdb')} lacks its argument")
        check(argument)
