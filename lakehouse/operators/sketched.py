"""Products with one sketch for each window and group; :mod:`lakehouse.sketches.kinds` says what may be asked of it."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import datasketches
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import sketch_property
from lakehouse.errors import BadProduct
from lakehouse.operators.base import (
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
    Operator,
    check_names,
    plain_type,
    spread_and_merged,
    windowed,
)
from lakehouse.sketches.kinds import (
    SIGMAS,
    DistinctSketch,
    FrequencySketch,
    MembershipSketch,
    QuantileSketch,
    Sketch,
    TopSketch,
)

Held = TypeVar("Held", bound=Sketch)
Row = dict[str, Any]
Key = tuple[Any, ...]
AGREE = 2.0
"""Two builds agree where their ranks differ by no more than so many times the sum of their errors.

The error is 2.6 standard deviations of one sketch; so far apart are two honest ones once in 10^12 comparisons."""
_MOST = 20_000  # rows with sketches that are made at once
_NO_NULLS = bytes(8)
"""Spark ends its sketches with the number of nulls it passed over, and takes none without; others read over it."""
_ITEM, _COUNT = "millrace_item", "millrace_count"  # of the partial rows that Spark gives
_FIRST, _SECOND = "millrace_first", "millrace_second"


class Grouped(Operator, Generic[Held]):
    """Merges the sketches of a window and group, and makes result rows of each.

    Args:
        columns: of the result rows, behind the window's bounds and the groups.
        sums: those of ``columns`` that add up.
        ranks: column that tells the rows of one window and group apart, where there are several.
    """

    unit = (WINDOW_START,)
    kind: type[Held]

    def __init__(
        self, product: Product, columns: Sequence[tuple[str, pa.DataType]], sums: Sequence[str], ranks: str = ""
    ) -> None:
        self._product = product
        self._parameters = json.loads(sketch_property(product))
        self._columns = list(columns)
        self._sums = list(sums)
        self._held = [WINDOW_END, *self.kind(self._parameters).columns, *sums]
        self._group = [WINDOW_START, *product.by]
        self.key = (*self._group, *([ranks] if ranks else []))
        # Sliding windows hold an event several times, and a lateness leaves some out.
        whole = not product.slide and product.lateness_ms is None and product.source in sums
        self.counts = product.source if whole else None
        check_names(product, [WINDOW_START, WINDOW_END, *product.by, *(name for name, _ in columns)])
        if not product.by:
            self.describe(pa.schema([]))

    @abstractmethod
    def rows(self, sketch: Held) -> list[Row]:
        """Result rows of a sketch, without window, groups and sums."""

    def digested(self, partial: pa.Table) -> pa.Table:
        """Partial rows that hold sketches, of what Spark gave."""
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
        untouched = None
        if old is not None:
            touched = set(self._keys(partial))
            found = pa.array([key in touched for key in self._keys(old)], pa.bool_())
            untouched = old.filter(pc.invert(found))
            old = old.filter(found)
        states: dict[Key, tuple[Held, Row]] = {}
        for table in (old, partial):
            if table is None:
                continue
            for key, row in zip(self._keys(table), table.select(self._held).to_pylist(), strict=True):
                if row["sketch"] is None:
                    continue
                if key not in states:
                    exact = {WINDOW_END: row[WINDOW_END], **dict.fromkeys(self._sums, 0)}
                    states[key] = self.kind(self._parameters), {**dict(zip(self._group, key, strict=True)), **exact}
                sketch, exact = states[key]
                sketch.add(row)
                for name in self._sums:
                    exact[name] += row[name]
        rows = [{**exact, **row} for sketch, exact in states.values() for row in self.rows(sketch)]
        merged = pa.Table.from_pylist(rows, schema=self.schema)
        return merged if untouched is None else pa.concat_tables([untouched.cast(self.schema), merged])

    def _keys(self, table: pa.Table) -> Iterator[Key]:
        return zip(*(table[name].to_pylist() for name in self._group), strict=True)

    def _listed(self, partial: pa.Table, *columns: str) -> Iterator[tuple[Row, list[pa.Array]]]:
        """Each window and group of counted items, and its values of these columns."""
        group = [WINDOW_START, WINDOW_END, *self._product.by]
        listed = partial.group_by(group, use_threads=False).aggregate([(name, "list") for name in columns])
        for number in range(listed.num_rows):
            named = {name: listed[name][number].as_py() for name in group}
            yield named, [listed[f"{name}_list"][number].values for name in columns]


class TopN(Grouped[TopSketch]):
    """The ``n`` most frequent items of each window, with error bounds; the sketch stands in the row of rank 1.

    Apache DataSketches' frequent items sketch (Anderson et al., "A High-Performance Algorithm for Identifying Frequent
    Items in Data Streams", IMC 2017): an item's count lies in ``[count - error, count]``, and no item whose true count
    is above ``error`` is missing. Up to 3/4 of ``max_items`` distinct items a window, the counts are exact.

    A sketch whose counters were all purged at once is written as one that never saw anything, and merges as nothing.
    What was in it, at most, is therefore stored in a column of its own, and widens every item's interval.

    A window of which no item is known has one row, without an item: none occurred more than ``count`` times.
    """

    kind = TopSketch

    def __init__(self, product: Product) -> None:
        columns = [
            ("rank", pa.int32()),
            ("item", pa.string()),
            ("count", pa.int64()),
            ("error", pa.int64()),
            ("unseen", pa.int64()),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, [], ranks="rank")

    def partial_sql(self) -> str:
        item = f"CAST(`{self._product.item}` AS STRING)"
        sketch = f"approx_top_k_accumulate({item}, {self._product.max_items}).sketch AS sketch"
        return windowed(self._product, f"{sketch}, count({item}) AS seen")

    def digested(self, partial: pa.Table) -> pa.Table:
        rows = zip(partial["sketch"].to_pylist(), partial["seen"].to_pylist(), strict=True)
        unseen = [seen - datasketches.frequent_strings_sketch.deserialize(sketch).total_weight for sketch, seen in rows]
        return partial.drop_columns(["seen"]).append_column("unseen", pa.array(unseen, pa.int64()))

    def rows(self, sketch: TopSketch) -> list[Row]:
        unseen = sketch.unseen
        if sketch.items.is_empty():
            unseen += sketch.items.get_upper_bound("")  # of any item; not written with the sketch
        rows = [
            {"rank": rank, "item": item, "count": upper + unseen, "error": upper - lower + unseen}
            for rank, (item, _, lower, upper) in enumerate(sketch.best(self._product.n), 1)
        ] or [{"rank": 1, "item": None, "count": unseen, "error": unseen}]
        rows[0] |= {"unseen": unseen, "sketch": sketch.items.serialize() + _NO_NULLS}
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


class Distinct(Grouped[DistinctSketch]):
    """One row a window: the estimate (named as the product), its bounds, the events counted (named as the source).

    HyperLogLog. The relative standard error is 1.04 / sqrt(2^lg_k): 1.6 % for ``lg_k`` 12.
    """

    kind = DistinctSketch

    def __init__(self, product: Product) -> None:
        estimates = [(name, pa.float64()) for name in (product.name, "lower", "upper")]
        columns = [*estimates, (product.source, pa.int64()), ("sketch", pa.binary())]
        super().__init__(product, columns, [product.source])

    def partial_sql(self) -> str:
        return windowed(
            self._product,
            f"hll_sketch_agg(`{self._product.item}`, {self._product.lg_k}) AS sketch, "
            f"count(*) AS `{self._product.source}`",
        )

    def rows(self, sketch: DistinctSketch) -> list[Row]:
        found = sketch.result()
        bounds = {"lower": found.get_lower_bound(SIGMAS), "upper": found.get_upper_bound(SIGMAS)}
        return [{self._product.name: found.get_estimate(), **bounds, "sketch": found.serialize_compact()}]


class Frequency(Grouped[FrequencySketch]):
    """One row a window: items counted (named as the source) and a Count-Min sketch.

    Apache DataSketches' ``count_min_sketch`` in its own binary form (:mod:`lakehouse.sketches.kinds` says what may
    be asked, and within what bounds). Spark's own ``count_min_sketch`` has another form that nothing else reads. So
    Spark counts the distinct items of a batch, and the sketch is made of the counts here. It is linear: any order gives
    the same counters.

    With ``range_bits`` also ``sketch_1``, ``sketch_2``, …: of the items without their lowest bit, two bits, …; and
    ``outside``: items that are not integers from 0 to ``2^range_bits - 1``, which no sketch counts.
    """

    kind = FrequencySketch

    def __init__(self, product: Product) -> None:
        sums = [product.source, *(["outside"] if product.range_bits else [])]
        sketches = [f"sketch_{level}" for level in range(1, product.range_bits)]
        columns = [*((name, pa.int64()) for name in sums), *((name, pa.binary()) for name in ("sketch", *sketches))]
        super().__init__(product, columns, sums)

    def partial_sql(self) -> str:
        bits, item = self._product.range_bits, f"`{self._product.item}`"
        inside = f"CAST({item} AS BIGINT) BETWEEN 0 AND {2**bits - 1} AND CAST({item} AS BIGINT) = {item}"
        taken = f"CASE WHEN {inside} THEN CAST({item} AS BIGINT) END" if bits else f"CAST({item} AS STRING)"
        return windowed(self._product, f"{taken} AS {_ITEM}, count(*) AS {_COUNT}", group=[taken])

    def digested(self, partial: pa.Table) -> pa.Table:
        rows = []
        for named, (items, counts) in self._listed(partial, _ITEM, _COUNT):
            sketch = FrequencySketch(self._parameters)
            levels = sketch.start()
            events = outside = 0
            for item, count in zip(items.to_pylist(), counts.to_pylist(), strict=True):
                events += count
                if item is None:
                    outside += count
                    continue
                levels[0].update(item, count)
                for level in range(1, len(levels)):
                    levels[level].update(item >> level, count)
            rows.append({**named, self._product.source: events, "outside": outside, **sketch.serialize()})
        return pa.Table.from_pylist(rows, schema=self.schema)

    def rows(self, sketch: FrequencySketch) -> list[Row]:
        return [dict(sketch.serialize())]


class Membership(Grouped[MembershipSketch]):
    """One row a window: distinct items as the filter estimates them (named as the product; null for a full filter),
    the share of false positives as full as it is, the events (named as the source), and the Bloom filter.

    What a window has not seen is certain; a "maybe" is confirmed elsewhere. Spark hashes the items and leaves one row
    an item; the bits are set here (:class:`~lakehouse.sketches.kinds.BloomFilter`).
    """

    kind = MembershipSketch

    def __init__(self, product: Product) -> None:
        estimates = [(product.name, pa.float64()), ("fpp", pa.float64())]
        columns = [*estimates, (product.source, pa.int64()), ("sketch", pa.binary())]
        super().__init__(product, columns, [product.source])

    def partial_sql(self) -> str:
        item = f"CAST(`{self._product.item}` AS STRING)"
        first, second = f"xxhash64({item})", f"xxhash64({item}, {item})"
        return windowed(
            self._product,
            f"{first} AS {_FIRST}, {second} AS {_SECOND}, count(*) AS {_COUNT}",
            group=[first, second],
        )

    def digested(self, partial: pa.Table) -> pa.Table:
        rows = []
        for named, (first, second, counts) in self._listed(partial, _FIRST, _SECOND, _COUNT):
            sketch = MembershipSketch(self._parameters)
            sketch.filter.update_hashed(*(hashes.to_numpy().view("uint64") for hashes in (first, second)))
            rows += [{**named, self._product.source: pc.sum(counts).as_py(), **row} for row in self.rows(sketch)]
        return pa.Table.from_pylist(rows, schema=self.schema)

    def rows(self, sketch: MembershipSketch) -> list[Row]:
        estimate = sketch.filter.estimate
        share = {"fpp": sketch.filter.fpp, "sketch": sketch.filter.serialize()}
        return [{self._product.name: estimate if math.isfinite(estimate) else None, **share}]


class Quantiles(Grouped[QuantileSketch]):
    """One row a window: values counted (named as the source), the least and the greatest, and the declared quantiles.

    KLL (Karnin, Lang and Liberty, "Optimal Quantile Approximation in Streams", FOCS 2016): the rank of a value named is
    within 1.33 % of the rank asked for, with 99 % probability, for ``k`` 200. The sketch draws at random, so that two
    builds of the same events differ within that error; up to about ``k`` values a window it is exact.

    Args:
        value: SQL of the number.
        counted: column to the SQL that counts it, beside the values themselves.
        unit: put behind the names of columns that hold values.
    """

    kind = QuantileSketch

    def __init__(
        self, product: Product, value: str = "", counted: Sequence[tuple[str, str]] = (), unit: str = ""
    ) -> None:
        self._value = value or f"CAST(`{product.item}` AS DOUBLE)"
        self._counted = [(product.source, "count(*)"), *counted]
        self._min, self._max = f"min{unit}", f"max{unit}"
        self._quantiles = {f"{quantile_name(rank)}{unit}": rank for rank in product.quantiles}
        sums = [name for name, _ in self._counted]
        columns = [
            *((name, pa.int64()) for name in sums),
            *((name, pa.float64()) for name in (self._min, self._max, *self._quantiles)),
            ("sketch", pa.binary()),
        ]
        super().__init__(product, columns, sums)

    def partial_sql(self) -> str:
        counted = ", ".join(f"{sql} AS `{name}`" for name, sql in self._counted)
        return windowed(
            self._product,
            f"kll_sketch_agg_double({self._value}, {self._product.k}) AS sketch, {counted}",
            where=f"{self._value} IS NOT NULL AND NOT isnan({self._value})",
        )

    def rows(self, sketch: QuantileSketch) -> list[Row]:
        return [{**self._named(sketch.values), "sketch": sketch.values.serialize()}]

    def _named(self, sketch: datasketches.kll_doubles_sketch) -> Row:
        # The least value that at least this share of all does not exceed.
        values = sketch.get_quantiles(list(self._quantiles.values()), inclusive=True)
        return {
            self._min: sketch.get_min_value(),
            self._max: sketch.get_max_value(),
            **dict(zip(self._quantiles, values, strict=True)),
        }

    def agrees(self, one: pa.Table, other: pa.Table) -> bool:
        """Whether both have the same exact columns, and quantiles within :data:`AGREE` errors of each other."""
        here, there = (dict(zip(self._keys(table), table.to_pylist(), strict=True)) for table in (one, other))
        return here.keys() == there.keys() and all(
            self._close(row, there[key]) and self._close(there[key], row) for key, row in here.items()
        )

    def _close(self, row: Row, other: Row) -> bool:
        exact = [self._min, self._max, *(name for name, _ in self._counted)]
        if any(row[name] != other[name] for name in exact):
            return False
        here, there = (datasketches.kll_doubles_sketch.deserialize(found["sketch"]) for found in (row, other))
        if here.n != row[self._counted[0][0]] or any(row[name] != value for name, value in self._named(here).items()):
            return False  # its columns are not what its own sketch says
        errors = [sketch.normalized_rank_error(False) for sketch in (here, there) if sketch.is_estimation_mode()]
        margin = AGREE * sum(errors) + 1.5 / here.n
        return all(
            there.get_rank(row[name]) - margin <= rank <= there.get_rank(row[name], inclusive=True) + margin
            for name, rank in self._quantiles.items()
        )


def quantile_name(rank: float) -> str:
    """Name of the column of a quantile: 0.5 is ``p50``, 0.999 is ``p99_9``."""
    return f"p{format(round(rank * 100, 8), 'g').replace('.', '_')}"


_SKEW = "(unix_millis(received_at) - unix_millis(event_time))"


class Skew(Quantiles):
    """One row a window: events (named as the source), ``early``, ``late``, ``too_late``; the skew in milliseconds.

    The skew is how long after its event time an event arrived. An event is *early* if its time lies behind its arrival,
    *late* if the window of its own time (of the product's length) was over when it arrived, *too late* if it arrived
    longer after its time than the product's lateness. All of it is in the events themselves, so that a replay counts
    the same; too late events stay in bronze like any other.
    """

    def __init__(self, product: Product) -> None:
        window = product.window_ms
        over = f"floor(unix_millis(event_time) / {window}) * {window} + {window} <= unix_millis(received_at)"
        too_late = f"{_SKEW} > {product.lateness_ms}" if product.lateness_ms is not None else "false"
        counted = [
            ("early", f"count_if({_SKEW} < 0)"),
            ("late", f"count_if({over})"),
            ("too_late", f"count_if({too_late})"),
        ]
        super().__init__(product, f"CAST({_SKEW} AS DOUBLE)", counted, unit="_ms")
        if not product.slide:
            self.counts = product.source
