"""Heavy hitters of a window, with error bounds.

Apache DataSketches' frequent items sketch (Anderson et al., "A High-Performance Algorithm for Identifying Frequent
Items in Data Streams", IMC 2017): an item's count lies in ``[count - error, count]``, and no item whose true count is
above ``error`` is missing. Up to 3/4 of ``max_items`` distinct items a window, the counts are exact.

A sketch whose counters were all purged at once is written as one that never saw anything, and merges as nothing. What
was in it, at most, is therefore kept beside it, and widens every item's interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.grouped import Grouped, Key, Row
from lakehouse.operators.windows import windowed

# Spark ends its sketches with the number of nulls it passed over, and takes none without; others read over it.
_NO_NULLS = bytes(8)


@dataclass(slots=True)
class _Counted:
    """What was counted of a window.

    Attributes:
        sketch: a ``datasketches.frequent_strings_sketch``; the library has no type hints.
        unseen: how often, at most, an item occurred that the sketch knows nothing of.
    """

    sketch: Any
    unseen: int


class TopN(Grouped[_Counted]):
    """The ``n`` most frequent items of each window; the sketch stands in the row of rank 1.

    A window of which no item is known has one row, without an item: none occurred more than ``count`` times.
    """

    def __init__(self, product: Product) -> None:
        columns = [
            ("rank", pa.int32()),
            ("item", pa.string()),
            ("count", pa.int64()),
            ("error", pa.int64()),
            ("unseen", pa.int64()),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, ["sketch", "unseen"], ranks="rank")

    def partial_sql(self) -> str:
        item = f"CAST(`{self._product.item}` AS STRING)"
        sketch = f"approx_top_k_accumulate({item}, {self._product.max_items}).sketch AS sketch"
        return windowed(self._product, f"{sketch}, count({item}) AS seen")

    def digested(self, partial: pa.Table) -> pa.Table:
        rows = zip(partial["sketch"].to_pylist(), partial["seen"].to_pylist(), strict=True)
        unseen = [seen - datasketches.frequent_strings_sketch.deserialize(sketch).total_weight for sketch, seen in rows]
        return partial.drop_columns(["seen"]).append_column("unseen", pa.array(unseen, pa.int64()))

    def add(self, state: _Counted | None, row: Row) -> _Counted:
        sketch = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
        if state is None:
            return _Counted(sketch, row["unseen"])
        state.sketch.merge(sketch)
        state.unseen += row["unseen"]
        return state

    def rows(self, state: _Counted) -> list[Row]:
        sketch, unseen = state.sketch, state.unseen
        if sketch.is_empty():
            unseen += sketch.get_upper_bound("")  # of any item; not written with the sketch
        items = sketch.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        # By count, then by name: the same sketch gives the same ranks.
        best = sorted(items, key=lambda found: (-found[1], found[0]))[: self._product.n]
        rows = [
            {"rank": rank, "item": item, "count": upper + unseen, "error": upper - lower + unseen}
            for rank, (item, _, lower, upper) in enumerate(best, 1)
        ] or [{"rank": 1, "item": None, "count": unseen, "error": unseen}]
        rows[0] |= {"unseen": unseen, "sketch": sketch.serialize() + _NO_NULLS}
        return rows

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
