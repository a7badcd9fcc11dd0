"""Distinct items of a window by HyperLogLog.

The relative standard error is 1.04 / sqrt(2^lg_k): 1.6 % for ``lg_k`` 12.
"""

from __future__ import annotations

from dataclasses import dataclass

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.grouped import Grouped, Row
from lakehouse.operators.windows import windowed
from lakehouse.sketches.kinds import SIGMAS, canonical_hll


@dataclass(slots=True)
class _Set:
    union: datasketches.hll_union
    events: int = 0


class Distinct(Grouped[_Set]):
    """One row a window: the estimate (named as the product), its bounds, the events counted (named as the source)."""

    def __init__(self, product: Product) -> None:
        columns = [
            (product.name, pa.float64()),
            ("lower", pa.float64()),
            ("upper", pa.float64()),
            (product.source, pa.int64()),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, ["sketch", product.source])

    def partial_sql(self) -> str:
        return windowed(
            self._product,
            f"hll_sketch_agg(`{self._product.item}`, {self._product.lg_k}) AS sketch, "
            f"count(*) AS `{self._product.source}`",
        )

    def add(self, state: _Set | None, row: Row) -> _Set:
        state = state or _Set(datasketches.hll_union(self._product.lg_k))
        state.union.update(datasketches.hll_sketch.deserialize(row["sketch"]))
        state.events += row[self._product.source]
        return state

    def rows(self, state: _Set) -> list[Row]:
        sketch = canonical_hll(state.union)
        return [
            {
                self._product.name: sketch.get_estimate(),
                "lower": sketch.get_lower_bound(SIGMAS),
                "upper": sketch.get_upper_bound(SIGMAS),
                self._product.source: state.events,
                "sketch": sketch.serialize_compact(),
            }
        ]
