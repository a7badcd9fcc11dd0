"""Products with one sketch for each window and group: heavy hitters, distinct counts, frequencies, membership."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import datasketches
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.errors import BadProduct
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START, Operator, check_names, plain_type
from lakehouse.operators.windows import spread_and_merged, windowed
from lakehouse.sketches.bloom import BloomFilter
from lakehouse.sketches.kinds import SIGMAS, canonical_hll

State = TypeVar("State")
Row = dict[str, Any]
Key = tuple[Any, ...]
_MOST = 20_000  # rows with sketches that are made at once


class Grouped(Operator, Generic[State]):
    """Merges the states of a window and group, and makes result rows of each.

    Args:
        columns: of the result rows, behind the window's bounds and the groups.
        held: those of ``columns`` that a state is read from; the first is null in rows that hold none.
        ranks: column that tells the rows of one window and group apart, where there are several.
    """

    unit = (WINDOW_START,)

    def __init__(
        self, product: Product, columns: Sequence[tuple[str, pa.DataType]], held: Sequence[str], ranks: str = ""
    ) -> None:
        self._product = product
        self._columns = list(columns)
        self._held = list(held)
        self._group = [WINDOW_START, *product.by]
        self.key = (*self._group, *([ranks] if ranks else []))
        # Sliding windows hold an event several times, and a lateness leaves some out.
        whole = not product.slide and product.lateness_ms is None and product.source in dict(columns)
        self.counts = product.source if whole else None
        check_names(product, [WINDOW_START, WINDOW_END, *product.by, *(name for name, _ in columns)])
        if not product.by:
            self.describe(pa.schema([]))

    @abstractmethod
    def add(self, state: State | None, row: Row) -> State:
        """The state with that of a row taken in; the state given may be changed."""

    @abstractmethod
    def rows(self, state: State) -> list[Row]:
        """Result rows of a state, without window and groups."""

    def digested(self, partial: pa.Table) -> pa.Table:
        """Partial rows that hold states, of what Spark gave."""
        return partial

    def describe(self, partial: pa.Schema) -> None:
        by = [(name, plain_type(partial.field(name).type)) for name in self._product.by]
        for name, kind in by:
            if pa.types.is_nested(kind) or pa.types.is_floating(kind):
                raise BadProduct(self._product.name, f"it groups by {name}, {kind}", "Group by texts, integers, dates")
        self.schema = pa.schema([(WINDOW_START, TIMESTAMP), (WINDOW_END, TIMESTAMP), *by, *self._columns])

    def prepare(self, partial: pa.Table) -> pa.Table:
        rows = self.digested(partial)
        if not self._product.slide:
            return rows
        return spread_and_merged(rows, self._product.window_ms, self._product.slide_ms, self.merge, most=_MOST)

    def merge(self, old: pa.Table | None, partial: pa.Table) -> pa.Table:
        assert self.schema is not None, "describe() comes first"
        states: dict[Key, State] = {}
        ends: dict[Key, Any] = {}
        untouched = None
        if old is not None:
            touched = set(self._keys(partial))
            found = pa.array([key in touched for key in self._keys(old)], pa.bool_())
            untouched = old.filter(pc.invert(found))
            old = old.filter(found)
        for table in (old, partial):
            for key, row in [] if table is None else self._read(table):
                if row[self._held[0]] is not None:
                    states[key] = self.add(states.get(key), row)
                    ends[key] = row[WINDOW_END]
        rows = []
        for key, state in states.items():
            named = {WINDOW_END: ends[key], **dict(zip(self._group, key, strict=True))}
            rows += [{**named, **row} for row in self.rows(state)]
        merged = pa.Table.from_pylist(rows, schema=self.schema)
        return merged if untouched is None else pa.concat_tables([untouched.cast(self.schema), merged])

    def _keys(self, table: pa.Table) -> Iterator[Key]:
        return zip(*(table[name].to_pylist() for name in self._group), strict=True)

    def _read(self, table: pa.Table) -> Iterator[tuple[Key, Row]]:
        rows = table.select([WINDOW_END, *self._held]).to_pylist()
        return zip(self._keys(table), rows, strict=True)


def lists_by(table: pa.Table, group: Sequence[str], lists: Mapping[str, str]) -> Iterator[tuple[Row, Row]]:
    """Rows of equal ``group`` columns as lists.

    Args:
        lists: column to what is made of it, e.g. ``list`` or ``sum``.

    Returns:
        Values of the group columns, and those of ``lists``, by column.
    """
    grouped = table.group_by(list(group), use_threads=False).aggregate(list(lists.items()))
    named = [*group, *(f"{name}_{how}" for name, how in lists.items())]
    for number in range(grouped.num_rows):
        values = {name: grouped[name][number] for name in named}
        yield (
            {name: values[name].as_py() for name in group},
            {name: values[f"{name}_{how}"] for name, how in lists.items()},
        )


# Spark ends its sketches with the number of nulls it passed over, and takes none without; others read over it.
_NO_NULLS = bytes(8)


@dataclass(slots=True)
class _HeavyHitters:
    """What was counted of a window.

    Attributes:
        sketch: a ``datasketches.frequent_strings_sketch``; the library has no type hints.
        unseen: how often, at most, an item occurred that the sketch knows nothing of.
    """

    sketch: Any
    unseen: int


class TopN(Grouped[_HeavyHitters]):
    """The ``n`` most frequent items of each window, with error bounds; the sketch stands in the row of rank 1.

    Apache DataSketches' frequent items sketch (Anderson et al., "A High-Performance Algorithm for Identifying Frequent
    Items in Data Streams", IMC 2017): an item's count lies in ``[count - error, count]``, and no item whose true count
    is above ``error`` is missing. Up to 3/4 of ``max_items`` distinct items a window, the counts are exact.

    A sketch whose counters were all purged at once is written as one that never saw anything, and merges as nothing.
    What was in it, at most, is therefore stored in a column of its own, and widens every item's interval.

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

    def add(self, state: _HeavyHitters | None, row: Row) -> _HeavyHitters:
        sketch = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
        if state is None:
            return _HeavyHitters(sketch, row["unseen"])
        state.sketch.merge(sketch)
        state.unseen += row["unseen"]
        return state

    def rows(self, state: _HeavyHitters) -> list[Row]:
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


@dataclass(slots=True)
class _DistinctItems:
    union: datasketches.hll_union
    events: int = 0


class Distinct(Grouped[_DistinctItems]):
    """One row a window: the estimate (named as the product), its bounds, the events counted (named as the source).

    HyperLogLog. The relative standard error is 1.04 / sqrt(2^lg_k): 1.6 % for ``lg_k`` 12.
    """

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

    def add(self, state: _DistinctItems | None, row: Row) -> _DistinctItems:
        state = state or _DistinctItems(datasketches.hll_union(self._product.lg_k))
        state.union.update(datasketches.hll_sketch.deserialize(row["sketch"]))
        state.events += row[self._product.source]
        return state

    def rows(self, state: _DistinctItems) -> list[Row]:
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


_ITEM, _COUNT = "millrace_item", "millrace_count"  # of the partial rows that Spark gives
_FIRST, _SECOND = "millrace_first", "millrace_second"


@dataclass(slots=True)
class _Frequencies:
    levels: list[datasketches.count_min_sketch]
    events: int = 0
    outside: int = 0


class Frequency(Grouped[_Frequencies]):
    """One row a window: items counted (named as the source) and a Count-Min sketch.

    Apache DataSketches' ``count_min_sketch`` in its own binary form (:mod:`lakehouse.sketches.kinds` says what may
    be asked, and within what bounds). Spark's own ``count_min_sketch`` has another form that nothing else reads. So
    Spark counts the distinct items of a batch, and the sketch is made of the counts here. It is linear: any order gives
    the same counters.

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
        assert self.schema is not None
        group = [WINDOW_START, WINDOW_END, *self._product.by]
        rows = []
        for named, lists in lists_by(partial, group, {_ITEM: "list", _COUNT: "list"}):
            found = _Frequencies([self._sketch() for _ in self._sketches])
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

    def add(self, state: _Frequencies | None, row: Row) -> _Frequencies:
        levels = [datasketches.count_min_sketch.deserialize(row[name]) for name in self._sketches]
        if state is None:
            state = _Frequencies(levels)
        else:
            for mine, other in zip(state.levels, levels, strict=True):
                mine.merge(other)
        state.events += row[self._product.source]
        state.outside += row.get("outside", 0)
        return state

    def rows(self, state: _Frequencies) -> list[Row]:
        sketches = {name: sketch.serialize() for name, sketch in zip(self._sketches, state.levels, strict=True)}
        return [{self._product.source: state.events, "outside": state.outside, **sketches}]

    def _sketch(self) -> datasketches.count_min_sketch:
        return datasketches.count_min_sketch(self._product.depth, self._product.width)


def sketch_columns(range_bits: int) -> list[str]:
    """Names of the columns that hold sketches, by level."""
    return ["sketch", *(f"sketch_{level}" for level in range(1, range_bits))]


@dataclass(slots=True)
class _Members:
    filter: BloomFilter
    events: int = 0


class Membership(Grouped[_Members]):
    """One row a window: distinct items as the filter estimates them (named as the product; null for a full filter),
    the share of false positives as full as it is, the events (named as the source), and the Bloom filter.

    What a window has not seen is certain; a "maybe" is confirmed elsewhere. Spark hashes the items and leaves one row
    an item; the bits are set here (:mod:`lakehouse.sketches.bloom`).
    """

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
        assert self.schema is not None
        group = [WINDOW_START, WINDOW_END, *self._product.by]
        rows = []
        for named, lists in lists_by(partial, group, {_FIRST: "list", _SECOND: "list", _COUNT: "sum"}):
            found = _Members(BloomFilter.sized(self._product.items, self._product.fpp), lists[_COUNT].as_py())
            hashes = [lists[name].values.to_numpy().view("uint64") for name in (_FIRST, _SECOND)]
            found.filter.update_hashed(*hashes)
            rows += [{**named, **row} for row in self.rows(found)]
        return pa.Table.from_pylist(rows, schema=self.schema)

    def add(self, state: _Members | None, row: Row) -> _Members:
        found = BloomFilter.deserialize(row["sketch"])
        if state is None:
            state = _Members(found)
        else:
            state.filter.merge(found)
        state.events += row[self._product.source]
        return state

    def rows(self, state: _Members) -> list[Row]:
        estimate = state.filter.estimate
        return [
            {
                self._product.name: estimate if math.isfinite(estimate) else None,
                "fpp": state.filter.fpp,
                self._product.source: state.events,
                "sketch": state.filter.serialize(),
            }
        ]
