"""Distinct items of a window by HyperLogLog.

Flajolet et al., "HyperLogLog: the analysis of a near-optimal cardinality estimation algorithm", AofA 2007, in the form
of Apache DataSketches. The relative standard error is 1.04 / sqrt(2^lg_k): 1.6 % for ``lg_k`` 12.
"""

from __future__ import annotations

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START, windowed

_SIGMAS = 3  # lower and upper are this many standard deviations away


class Distinct:
    """One row a window: the estimate (named as the product), its bounds, the events counted (named as the source)."""

    key: tuple[str, ...] = (WINDOW_START,)
    unit: tuple[str, ...] = (WINDOW_START,)
    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to

    def __init__(self, product: Product) -> None:
        self._product = product
        self.counts: str | None = product.source
        self.schema: pa.Schema | None = pa.schema(
            [
                (WINDOW_START, TIMESTAMP),
                (WINDOW_END, TIMESTAMP),
                (product.name, pa.float64()),
                ("lower", pa.float64()),
                ("upper", pa.float64()),
                (product.source, pa.int64()),
                ("sketch", pa.binary()),
            ]
        )

    def partial_sql(self) -> str:
        return windowed(
            self._product,
            f"hll_sketch_agg(`{self._product.item}`, {self._product.lg_k}) AS sketch, "
            f"count(*) AS `{self._product.source}`",
        )

    def describe(self, partial: pa.Schema) -> None:
        pass

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        source = self._product.source
        unions: dict[object, datasketches.hll_union] = {}
        sums: dict[object, int] = {}
        ends: dict[object, object] = {}
        for table in (old, partial):
            for row in [] if table is None else table.select([WINDOW_START, WINDOW_END, source, "sketch"]).to_pylist():
                start = row[WINDOW_START]
                union = unions.setdefault(start, datasketches.hll_union(self._product.lg_k))
                union.update(datasketches.hll_sketch.deserialize(row["sketch"]))
                sums[start] = sums.get(start, 0) + row[source]
                ends[start] = row[WINDOW_END]
        rows = []
        for start, union in unions.items():
            sketch = self._of_the_set_alone(union.get_result(datasketches.tgt_hll_type.HLL_8))
            rows.append(
                {
                    WINDOW_START: start,
                    WINDOW_END: ends[start],
                    self._product.name: sketch.get_estimate(),
                    "lower": sketch.get_lower_bound(_SIGMAS),
                    "upper": sketch.get_upper_bound(_SIGMAS),
                    source: sums[start],
                    "sketch": sketch.serialize_compact(),
                }
            )
        return pa.Table.from_pylist(rows, schema=self.schema)

    def _of_the_set_alone(self, sketch: datasketches.hll_sketch) -> datasketches.hll_sketch:
        """The same sketch, with an estimate that depends on the set of items and not on the order they came in.

        A sketch that saw its items one by one, or got them from small sketches, estimates by its history (HIP); one
        that was merged with a full one does not. So it is merged with itself.
        """
        union = datasketches.hll_union(self._product.lg_k)
        union.update(sketch)
        union.update(sketch)
        return union.get_result(datasketches.tgt_hll_type.HLL_8)
