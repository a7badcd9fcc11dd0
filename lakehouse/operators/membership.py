"""Which items a window has seen: a Bloom filter. What it has not seen is certain; a "maybe" is confirmed elsewhere.

Spark hashes the items and leaves one row an item; the bits are set here (:mod:`lakehouse.sketches.bloom`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import WINDOW_END, WINDOW_START
from lakehouse.operators.grouped import Grouped, Row, lists_by
from lakehouse.operators.windows import windowed
from lakehouse.sketches.bloom import BloomFilter

_FIRST, _SECOND, _COUNT = "millrace_first", "millrace_second", "millrace_count"  # of the partial rows that Spark gives


@dataclass(slots=True)
class _Seen:
    filter: BloomFilter
    events: int = 0


class Membership(Grouped[_Seen]):
    """One row a window: distinct items as the filter estimates them (named as the product; null for a full filter),
    the share of false positives as full as it is, the events (named as the source), and the filter."""

    def __init__(self, product: Product) -> None:
        columns = [
            (product.name, pa.float64()),
            ("fpp", pa.float64()),
            (product.source, pa.int64()),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, ["sketch", product.source])

    def partial_sql(self) -> str:
        item = f"CAST(`{self._product.item}` AS STRING)"
        first, second = f"xxhash64({item})", f"xxhash64({item}, {item})"
        return windowed(
            self._product,
            f"{first} AS {_FIRST}, {second} AS {_SECOND}, count(*) AS {_COUNT}",
            group=[first, second],
        )

    def digested(self, partial: pa.Table) -> pa.Table:
        """Hashes into filters."""
        assert self.schema is not None
        group = [WINDOW_START, WINDOW_END, *self._product.by]
        rows = []
        for named, lists in lists_by(partial, group, {_FIRST: "list", _SECOND: "list", _COUNT: "sum"}):
            found = _Seen(BloomFilter.sized(self._product.items, self._product.fpp), lists[_COUNT].as_py())
            hashes = [lists[name].values.to_numpy().view("uint64") for name in (_FIRST, _SECOND)]
            found.filter.update_hashed(*hashes)
            rows += [{**named, **row} for row in self.rows(found)]
        return pa.Table.from_pylist(rows, schema=self.schema)

    def add(self, state: _Seen | None, row: Row) -> _Seen:
        found = BloomFilter.deserialize(row["sketch"])
        if state is None:
            state = _Seen(found)
        else:
            state.filter.merge(found)
        state.events += row[self._product.source]
        return state

    def rows(self, state: _Seen) -> list[Row]:
        estimate = state.filter.estimate
        return [
            {
                self._product.name: estimate if math.isfinite(estimate) else None,
                "fpp": state.filter.fpp,
                self._product.source: state.events,
                "sketch": state.filter.serialize(),
            }
        ]
