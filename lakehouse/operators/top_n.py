"""Heavy hitters of a window, with error bounds.

Apache DataSketches' frequent items sketch (Anderson et al., "A High-Performance Algorithm for Identifying Frequent
Items in Data Streams", IMC 2017): an item's count lies in ``[count - error, count]``, and no item whose true count is
above ``error`` is missing. Up to 3/4 of ``max_items`` distinct items a window, the counts are exact.
"""

from __future__ import annotations

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START, windowed


class TopN:
    """The ``n`` most frequent items of each window; the sketch stands in the row of rank 1."""

    key: tuple[str, ...] = (WINDOW_START, "rank")
    unit: tuple[str, ...] = (WINDOW_START,)
    fold: dict[str, str] = {}  # noqa: RUF012 - of the protocol, never written to
    counts: str | None = None
    schema: pa.Schema | None = pa.schema(
        [
            (WINDOW_START, TIMESTAMP),
            (WINDOW_END, TIMESTAMP),
            ("rank", pa.int32()),
            ("item", pa.string()),
            ("count", pa.int64()),
            ("error", pa.int64()),
            ("sketch", pa.binary()),
        ]
    )

    def __init__(self, product: Product) -> None:
        self._product = product

    def partial_sql(self) -> str:
        item = f"approx_top_k_accumulate(CAST(`{self._product.item}` AS STRING), {self._product.max_items})"
        return windowed(self._product, f"{item}.sketch AS sketch")

    def describe(self, partial: pa.Schema) -> None:
        pass

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        sketches: dict[object, datasketches.frequent_strings_sketch] = {}
        ends: dict[object, object] = {}
        for table in (old, partial):
            for row in [] if table is None else table.select([WINDOW_START, WINDOW_END, "sketch"]).to_pylist():
                if row["sketch"] is None:
                    continue
                sketch = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
                if row[WINDOW_START] in sketches:
                    sketches[row[WINDOW_START]].merge(sketch)
                else:
                    sketches[row[WINDOW_START]] = sketch
                ends[row[WINDOW_START]] = row[WINDOW_END]
        rows = [row for start, sketch in sketches.items() for row in self._rows(start, ends[start], sketch)]
        return pa.Table.from_pylist(rows, schema=self.schema)

    def _rows(
        self, start: object, end: object, sketch: datasketches.frequent_strings_sketch
    ) -> list[dict[str, object]]:
        items = sketch.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        # By count, then by name: the same sketch gives the same ranks.
        best = sorted(items, key=lambda found: (-found[1], found[0]))[: self._product.n]
        return [
            {
                WINDOW_START: start,
                WINDOW_END: end,
                "rank": rank,
                "item": item,
                "count": estimate,
                "error": upper - lower,
                "sketch": sketch.serialize() if rank == 1 else None,
            }
            for rank, (item, estimate, lower, upper) in enumerate(best, 1)
        ]
