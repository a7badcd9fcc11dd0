"""What the SQL of a product may be: each of its rows must come from one event, whatever the batch it arrived in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.contract.sql.spark import WINDOW, line_of, spark_text
from lakehouse.errors import BadProduct

_SEES_OTHER_ROWS = (exp.Join, exp.Window, exp.Except, exp.Intersect)
_CLAUSES = ("distinct", "group", "having", "limit", "order")


def parse(product: Product) -> exp.Expr:
    """The product's SQL as a tree. Raises BadProduct: it does not parse."""
    try:
        return tree_of(product.sql)
    except sqlglot.errors.ParseError as error:
        raise BadProduct(product.name, f"its SQL does not parse: {str(error).splitlines()[0]}") from None


def tree_of(sql: str) -> exp.Expr:
    """A query in Spark's dialect as a tree."""
    return sqlglot.parse_one(spark_text(sql), dialect="spark")


@dataclass(frozen=True, slots=True)
class NamesRead:
    """Names in SQL, in lower case: of columns, their fields, functions' arguments, aliases and tables alike.

    Attributes:
        every: all of them.
        whole: those that stand somewhere without a field named behind them, so that any field may be read.
    """

    every: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, trees: Iterable[exp.Expr]) -> NamesRead | None:
        """The names in queries or expressions; None where a ``*`` leaves open which columns one reads."""
        every, whole = set(), set()
        for tree in trees:
            if any(not isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star)):
                return None
            for identifier in tree.find_all(exp.Identifier):
                every.add(identifier.name.lower())
                if not _has_field_behind(identifier):
                    whole.add(identifier.name.lower())
        return cls(frozenset(every), frozenset(whole))

    def with_paths(self, paths: Iterable[str]) -> NamesRead:
        """With dotted paths of fields, and whatever is behind them."""
        steps = [path.lower().split(".") for path in paths]
        return NamesRead(self.every.union(*steps), self.whole | {path[-1] for path in steps})


def _has_field_behind(identifier: exp.Identifier) -> bool:
    """Whether a field of what it names is named right behind it, as it is for ``a`` and ``b`` in ``a.b.c``."""
    node = identifier.parent
    if isinstance(node, exp.Column) and node.this is not identifier:
        return True
    return isinstance(node, (exp.Column, exp.Dot)) and isinstance(node.parent, exp.Dot) and node.parent.this is node


def check_rows(tree: exp.Expr, product: Product, *, aggregated: exp.Select | None = None) -> None:
    """Refuse what looks at several events at once, other than the aggregation ``aggregated``.

    Raises:
        BadProduct: a batch's result would depend on which events share the batch.
    """
    found = [*tree.find_all(*_SEES_OTHER_ROWS)]
    found += [union for union in tree.find_all(exp.Union) if union.args.get("distinct")]
    for select in tree.find_all(exp.Select):
        several = any(select.args.get(clause) for clause in _CLAUSES) or select.find(exp.AggFunc)
        if several and select is not aggregated:
            found.append(select)
    if found:
        bad = found[0]
        text = bad.sql(dialect="spark").replace(WINDOW, "window")
        raise BadProduct(
            product.name,
            f"it looks at several events at once ({text if len(text) < 60 else text[:60] + ' …'})",
            "Select from the source row by row; joins, DISTINCT, nested aggregates and window functions do not merge",
            line=line_of(bad),
        )
