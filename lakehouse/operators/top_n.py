"""Heavy hitters of a window, with error bounds.

Apache DataSketches' frequent items sketch (Anderson et al., "A High-Performance Algorithm for Identifying Frequent
Items in Data Streams", IMC 2017): an item's count lies in ``[count - error, count]``, and no item whose true count is
above ``error`` is missing. Up to 3/4 of ``max_items`` distinct items a window, the counts are exact.
"""

from __future__ import annotations

from typing import Any

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.grouped import Grouped, Key, Row
from lakehouse.operators.windows import windowed

# Spark ends its sketches with the number of nulls it passed over, and takes none without; others read over it.
_NO_NULLS = bytes(8)
_Sketch = Any  # datasketches.frequent_strings_sketch; the library has no type hints


class TopN(Grouped[_Sketch]):
    """The ``n`` most frequent items of each window; the sketch stands in the row of rank 1."""

    def __init__(self, product: Product) -> None:
        columns = [
            ("rank", pa.int32()),
            ("item", pa.string()),
            ("count", pa.int64()),
            ("error", pa.int64()),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, ["sketch"], ranks="rank")

    def partial_sql(self) -> str:
        item = f"approx_top_k_accumulate(CAST(`{self._product.item}` AS STRING), {self._product.max_items})"
        return windowed(self._product, f"{item}.sketch AS sketch")

    def add(self, state: _Sketch | None, row: Row) -> _Sketch:
        sketch = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
        if state is None:
            return sketch
        state.merge(sketch)
        return state

    def rows(self, state: _Sketch) -> list[Row]:
        items = state.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        # By count, then by name: the same sketch gives the same ranks.
        best = sorted(items, key=lambda found: (-found[1], found[0]))[: self._product.n]
        return [
            {
                "rank": rank,
                "item": item,
                "count": estimate,
                "error": upper - lower,
                "sketch": state.serialize() + _NO_NULLS if rank == 1 else None,
            }
            for rank, (item, estimate, lower, upper) in enumerate(best, 1)
        ]

    def agrees(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether two results, one of them lossy, can both be true.

        In each window the count of an item that both name lies in both intervals ``[count - error, count]``, and an
        item that one of them leaves out is no more frequent for certain than the last one it names.
        """
        tables = [self._intervals(one), self._intervals(other)]
        if tables[0].keys() != tables[1].keys() or all(
            low == high for t in tables for w in t.values() for low, high in w.values()
        ):
            return False  # exact counts must be equal, and the digests have said that they are not
        for here, there in (tables, tables[::-1]):
            for window, items in here.items():
                least = min(high for _, high in there[window].values())
                for item, (low, high) in items.items():
                    found = there[window].get(item)
                    if low > (found[1] if found else least) or (found and high < found[0]):
                        return False
        return True

    def _intervals(self, rows: pa.Table) -> dict[Key, dict[str, tuple[int, int]]]:
        found: dict[Key, dict[str, tuple[int, int]]] = {}
        for key, row in zip(self._keys(rows), rows.select(["item", "count", "error"]).to_pylist(), strict=True):
            found.setdefault(key, {})[row["item"]] = (row["count"] - row["error"], row["count"])
        return found
