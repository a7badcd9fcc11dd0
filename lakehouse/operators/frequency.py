"""Frequencies of any item of a window, of ranges of integers, and inner products: Count-Min.

Apache DataSketches' ``count_min_sketch`` in its own binary form (:mod:`lakehouse.sketches.kinds` says what may be
asked, and within what bounds). Spark's own ``count_min_sketch`` has another form that nothing else reads; so Spark
counts the distinct items of a batch, and the sketch is made of the counts here. It is linear: any order gives the same
counters.
"""

from __future__ import annotations

from dataclasses import dataclass

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import WINDOW_END, WINDOW_START
from lakehouse.operators.grouped import Grouped, Row, lists_by
from lakehouse.operators.windows import windowed

_ITEM, _COUNT = "millrace_item", "millrace_count"  # of the partial rows that Spark gives


@dataclass(slots=True)
class _Counts:
    levels: list[datasketches.count_min_sketch]
    events: int = 0
    outside: int = 0


class Frequency(Grouped[_Counts]):
    """One row a window: items counted (named as the source) and the sketch.

    With ``range_bits`` also ``sketch_1``, ``sketch_2``, …: of the items without their lowest bit, two bits, …; and
    ``outside``: items that are not integers from 0 to ``2^range_bits - 1``, which no sketch counts.
    """

    def __init__(self, product: Product) -> None:
        self._sketches = sketch_columns(product.range_bits)
        sums = [product.source, *(["outside"] if product.range_bits else [])]
        columns = [*((name, pa.int64()) for name in sums), *((name, pa.binary()) for name in self._sketches)]
        super().__init__(product, columns, [*self._sketches, *sums])

    def partial_sql(self) -> str:
        bits, item = self._product.range_bits, f"`{self._product.item}`"
        inside = f"CAST({item} AS BIGINT) BETWEEN 0 AND {2**bits - 1} AND CAST({item} AS BIGINT) = {item}"
        taken = f"CASE WHEN {inside} THEN CAST({item} AS BIGINT) END" if bits else f"CAST({item} AS STRING)"
        return windowed(self._product, f"{taken} AS {_ITEM}, count(*) AS {_COUNT}", group=[taken])

    def digested(self, partial: pa.Table) -> pa.Table:
        """Counts by item into sketches."""
        assert self.schema is not None
        group = [WINDOW_START, WINDOW_END, *self._product.by]
        rows = []
        for named, lists in lists_by(partial, group, {_ITEM: "list", _COUNT: "list"}):
            found = _Counts([self._sketch() for _ in self._sketches])
            for item, count in zip(lists[_ITEM].as_py(), lists[_COUNT].as_py(), strict=True):
                found.events += count
                if item is None:
                    found.outside += count
                    continue
                found.levels[0].update(item, count)
                for level in range(1, len(found.levels)):
                    found.levels[level].update(item >> level, count)
            rows += [{**named, **row} for row in self.rows(found)]
        return pa.Table.from_pylist(rows, schema=self.schema)

    def add(self, state: _Counts | None, row: Row) -> _Counts:
        levels = [datasketches.count_min_sketch.deserialize(row[name]) for name in self._sketches]
        if state is None:
            state = _Counts(levels)
        else:
            for mine, other in zip(state.levels, levels, strict=True):
                mine.merge(other)
        state.events += row[self._product.source]
        state.outside += row.get("outside", 0)
        return state

    def rows(self, state: _Counts) -> list[Row]:
        sketches = {name: sketch.serialize() for name, sketch in zip(self._sketches, state.levels, strict=True)}
        return [{self._product.source: state.events, "outside": state.outside, **sketches}]

    def _sketch(self) -> datasketches.count_min_sketch:
        return datasketches.count_min_sketch(self._product.depth, self._product.width)


def sketch_columns(range_bits: int) -> list[str]:
    """Names of the columns that hold sketches, by level."""
    return ["sketch", *(f"sketch_{level}" for level in range(1, range_bits))]
