"""The proof that products are derived from bronze: build them again beside the live ones and compare digests.

The canonical digest of a table is the SHA-256 of its rows, folded where the table holds partials, sorted, without the
binary sketch columns (equal sketches may differ in bytes; what is read from them is compared).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakehouse.batch import Build, build
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.errors import LakehouseError
from lakehouse.gold.store import ProductStore
from lakehouse.live import version_of

_DIGITS = 9  # of floating-point columns; estimates are sums whose last bits depend on the order of adding


@dataclass(frozen=True, slots=True)
class Comparison:
    """One table, live and replayed.

    Attributes:
        table: its name.
        version: of the live table that was compared.
        bronze: the bronze version it derives from.
        rows: result rows, live and replayed.
        live: canonical digest of the live table.
        replayed: canonical digest of the same built from bronze.
        within_bounds: of a lossy top-n, whose counts depend on the order of merging: whether they agree all the same.
    """

    table: str
    version: int
    bronze: int
    rows: tuple[int, int]
    live: str
    replayed: str

    within_bounds: bool = False

    @property
    def equal(self) -> bool:
        """Whether the digests are the same, or the estimates agree within the errors that they state."""
        return self.live == self.replayed or self.within_bounds


def verify(
    spark: SparkSession, settings: Settings, pipeline: Pipeline, *, step: Callable[[str], None] = lambda _: None
) -> Iterator[Comparison]:
    """Compare every product, and quarantine, with what bronze gives.

    Runs beside a running pipeline too: each product is compared at the version, and with the bronze version, that its
    newest commit names.

    Args:
        step: told what is being done, for a progress display.

    Raises:
        LakehouseError: a product's position lies inside a bronze version (it is catching up): try again later.
    """
    lake = Lake(settings.lake)
    for source in pipeline.sources.values():
        builds: dict[int, Build] = {}
        for product in pipeline.products_of(source.name):
            store = ProductStore(product, lake.table(product.layer, product.name), pipeline.name)
            if not store.table.exists():
                continue
            delta = DeltaTable(str(store.table.path))
            mark = store.mark()
            bronze = version_of(mark.bronze) if mark else None
            if bronze is None:
                raise LakehouseError(f"{product.name} is catching up with bronze; verify when it has")
            if bronze not in builds:
                step(f"reading {source.name} up to version {bronze}")
                builds[bronze] = _built(spark, lake, source, bronze)
            step(f"building {product.name}")
            partial = builds[bronze].partial(store.operator)
            store.operator.describe(partial.schema)
            live = _result(store, delta.to_pyarrow_table())
            again = _result(store, partial)
            yield compare(product.name, delta.version(), bronze, live, again)
        if builds and lake.quarantine().exists():
            oldest = min(builds)  # which quarantine has reached, whatever query keeps it
            yield _quarantine(lake, source, oldest, builds[oldest])
        for whole in builds.values():
            whole.events.unpersist()


def digest(rows: pa.Table) -> str:
    """The canonical digest of result rows."""
    plain = rows.select([f.name for f in rows.schema if not pa.types.is_binary(f.type)])
    names = sorted(plain.schema.names)
    lines = sorted(
        json.dumps([_canonical(row[name]) for name in names], ensure_ascii=False) for row in plain.to_pylist()
    )
    hashed = hashlib.sha256(json.dumps(names).encode())
    for line in lines:
        hashed.update(line.encode() + b"\n")
    return hashed.hexdigest()


def _canonical(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    return value if value is None or isinstance(value, (int, str, bool)) else str(value)


def _built(spark: SparkSession, lake: Lake, source: Source, version: int) -> Build:
    whole = build(spark, lake.bronze(source.name).path, source, version)
    whole.events.persist()
    return whole


def _result(store: ProductStore, rows: pa.Table) -> pa.Table:
    """Result rows of stored or partial rows: merged from nothing."""
    fields = [f.with_type(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(f.type) else f for f in rows.schema]
    rows = rows.cast(pa.schema(fields))
    assert store.operator.schema is not None
    return store.operator.merge(None, rows) if rows.num_rows else store.operator.schema.empty_table()


def compare(table: str, version: int, bronze: int, live: pa.Table, again: pa.Table) -> Comparison:
    """Compare two sets of result rows of a table."""
    rows, digests = (live.num_rows, again.num_rows), (digest(live), digest(again))
    return Comparison(table, version, bronze, rows, *digests, within_bounds=_agree(live, again))


def _agree(live: pa.Table, again: pa.Table) -> bool:
    """Whether two top-n tables, one of them lossy, can both be true.

    In each window the count of an item that both name lies in both intervals ``[count - error, count]``, and an item
    that one of them leaves out is no more frequent for certain than the last one it names.
    """
    if not {"item", "count", "error"} <= set(live.schema.names):
        return False
    tables = [_intervals(live), _intervals(again)]
    if tables[0].keys() != tables[1].keys() or all(
        low == high for t in tables for w in t.values() for low, high in w.values()
    ):
        return False  # exact counts must be equal, and the digests have said that they are not
    for one, other in (tables, tables[::-1]):
        for window, items in one.items():
            least = min(high for _, high in other[window].values())
            for item, (low, high) in items.items():
                found = other[window].get(item)
                if low > (found[1] if found else least) or (found and high < found[0]):
                    return False
    return True


def _intervals(rows: pa.Table) -> dict[object, dict[str, tuple[int, int]]]:
    found: dict[object, dict[str, tuple[int, int]]] = {}
    for row in rows.select(["window_start", "item", "count", "error"]).to_pylist():
        found.setdefault(row["window_start"], {})[row["item"]] = (row["count"] - row["error"], row["count"])
    return found


def _quarantine(lake: Lake, source: Source, bronze: int, whole: Build) -> Comparison:
    newest = whole.events.agg(F.max("bronze_at").alias("at")).toArrow()["at"][0]
    delta = DeltaTable(str(lake.quarantine().path))
    live = delta.to_pyarrow_table()
    live = live.filter(pc.equal(live["source"], source.name))
    if newest.is_valid:  # the live table may be ahead of the products
        live = live.filter(pc.less_equal(live["bronze_at"], newest.cast(live.schema.field("bronze_at").type)))
    return compare(lake.quarantine().name, delta.version(), bronze, live, whole.rejected().cast(live.schema))
