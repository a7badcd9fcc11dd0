"""A live aggregate's SELECT into a tree that holds only what is kept up to date."""

from __future__ import annotations

from sqlglot import exp

from serve.errors import FilterError
from serve.filters.kinds import Columns
from serve.filters.parse import check, normal, parsed
from serve.model import TableInfo

MAX_ITEMS = 64
_HOW = (exp.Count, exp.Sum, exp.Min, exp.Max, exp.Avg)
_CLAUSES = {"expressions": "SELECT", "from_": "FROM", "from": "FROM", "where": "WHERE", "group": "GROUP BY"}


def parse_select(sql: str, table: TableInfo) -> exp.Select:
    """The statement, normalised; without FROM.

    Raises:
        FilterError: something in it is not kept up to date here.
    """
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
