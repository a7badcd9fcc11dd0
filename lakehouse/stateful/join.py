"""Joins of two sources by columns and a bound of time, and what is aggregated over the pairs.

The SQL reads from ``joined``, whose two columns are named as the sources are and hold one event each, payload and
envelope; the right one is null where a left event stands alone. A pair counts when both events have come, in
whatever order and however late: there is no watermark, so nothing is dropped (docs/decisions/0006-joins.md).

Pairs that are lost again (a left event alone, until its right one comes) are subtracted. So only sums and counts can be
kept of an outer join or of ``match = "first"``, beside a ``count(*)`` that tells when nothing is left of a row.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.aggregate import Aggregate
from lakehouse.operators.sql import parse

VIEW = "joined"


class Join(Aggregate):
    """Rows of a ``GROUP BY`` over pairs; its SQL reads the view :data:`VIEW`."""

    def __init__(self, product: Product) -> None:
        super().__init__(product)
        self.retracts = product.kind == "left_outer" or product.match == "first"
        if product.lateness_ms is not None:
            remedy = "Leave it out: late events find their pairs"
            raise BadProduct(product.name, "a join has no lateness", remedy, key="lateness")
        if self.retracts:
            self._check_retracts()

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        """See :class:`~lakehouse.operators.base.Operator`; rows of which nothing is left are left out."""
        merged = super().merge(old, partial)
        if not self.retracts:
            return merged
        for name in self.fold:  # what was added and taken off again is 0: so the sum over nothing is 0 throughout
            index = merged.schema.get_field_index(name)
            merged = merged.set_column(index, merged.schema.field(name), pc.fill_null(merged[name], 0))
        return merged.filter(pc.not_equal(merged[self.counts], 0))

    def signed(self, gained: pa.Table, lost: pa.Table) -> pa.Table:
        """Partial rows of a step: those of the pairs it brought, less those of the pairs it ended."""
        if not lost.num_rows:
            return gained
        for name in self.fold:
            index = lost.schema.get_field_index(name)
            lost = lost.set_column(index, lost.schema.field(name), pc.negate(lost[name]))
        return pa.concat_tables([gained, lost])

    def columns(self, source: str) -> set[str] | None:
        """Columns of one side that the SQL reads; None: all, or it is not known."""
        tree = parse(self._product)
        if tree.find(exp.Star) and any(not isinstance(star.parent, exp.Count) for star in tree.find_all(exp.Star)):
            return None
        found: set[str] = set()
        for column in tree.find_all(exp.Column):
            path = [part.name for part in column.parts]
            if path[0].lower() == VIEW:
                path = path[1:]
            if path and path[0].lower() == source.lower():
                if len(path) == 1:
                    return None
                found.add(path[1])
        return found

    def _check_retracts(self) -> None:
        name = self._product.name
        if self._product.storage == "append":
            problem = "pairs of this join are taken back, so it keeps no partial rows"
            raise BadProduct(name, problem, "Leave out storage", key="storage")
        if self.counts is None:
            raise BadProduct(name, "pairs of this join are taken back", "Add count(*) AS … to its SELECT")
        if any(fold != "sum" for fold in self.fold.values()):
            raise BadProduct(
                name,
                "pairs of this join are taken back, and a minimum or maximum cannot be",
                "Keep sums and counts, or use kind = 'inner' with match = 'all'",
            )
