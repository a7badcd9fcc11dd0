"""Quantiles of a window, and of the skew between event time and arrival.

KLL (Karnin, Lang and Liberty, "Optimal Quantile Approximation in Streams", FOCS 2016) in the form of Apache
DataSketches: the rank of a value named is within 1.33 % of the rank asked for, with 99 % probability, for ``k`` 200.
The sketch draws at random, so that two builds of the same events differ within that error; up to about ``k`` values a
window it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import datasketches
import pyarrow as pa

from lakehouse.contract.pipeline import Product
from lakehouse.operators.sketched import Grouped, Key, Row
from lakehouse.operators.windows import windowed

AGREE = 2.0
"""Two builds agree where their ranks differ by no more than so many times the sum of their errors.

The error is 2.6 standard deviations of one sketch; so far apart are two honest ones once in 10^12 comparisons."""


def quantile_name(rank: float) -> str:
    """Name of the column of a quantile: 0.5 is ``p50``, 0.999 is ``p99_9``."""
    return f"p{format(round(rank * 100, 8), 'g').replace('.', '_')}"


@dataclass(slots=True)
class _Values:
    """The values of a window and group.

    Attributes:
        sums: by column, what is counted exactly.
    """

    sketch: datasketches.kll_doubles_sketch
    sums: dict[str, int] = field(default_factory=dict)


class Quantiles(Grouped[_Values]):
    """One row a window: values counted (named as the source), the least and the greatest, and the declared quantiles.

    Args:
        value: SQL of the number.
        counted: column to the SQL that counts it, beside the values themselves.
        unit: put behind the names of columns that hold values.
    """

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
        super().__init__(product, columns, ["sketch", *sums])

    def partial_sql(self) -> str:
        counted = ", ".join(f"{sql} AS `{name}`" for name, sql in self._counted)
        return windowed(
            self._product,
            f"kll_sketch_agg_double({self._value}, {self._product.k}) AS sketch, {counted}",
            where=f"{self._value} IS NOT NULL AND NOT isnan({self._value})",
        )

    def add(self, state: _Values | None, row: Row) -> _Values:
        sketch = datasketches.kll_doubles_sketch.deserialize(row["sketch"])
        if state is None:
            state = _Values(sketch)
        else:
            state.sketch.merge(sketch)
        for name, _ in self._counted:
            state.sums[name] = state.sums.get(name, 0) + row[name]
        return state

    def rows(self, state: _Values) -> list[Row]:
        return [{**state.sums, **self._named(state.sketch), "sketch": state.sketch.serialize()}]

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
        found = [dict(self._results(table)) for table in (one, other)]
        return found[0].keys() == found[1].keys() and all(
            self._close(row, found[1][key]) and self._close(found[1][key], row) for key, row in found[0].items()
        )

    def _results(self, table: pa.Table) -> Iterator[tuple[Key, Row]]:
        return zip(self._keys(table), table.to_pylist(), strict=True)

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
