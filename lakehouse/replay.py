"""The proof that products are derived from bronze: build them again and compare digests with the live ones.

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
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakehouse.batch import build, rejected_rows, run_partial
from lakehouse.contract.lake import QUARANTINE, WARNINGS, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.pipeline.added import added_products
from lakehouse.contract.pipeline.expectations import WARN
from lakehouse.contract.settings import Settings
from lakehouse.derived.views import proofs
from lakehouse.errors import LakehouseError
from lakehouse.gold.mark import BatchMark
from lakehouse.gold.state_store import store_of
from lakehouse.gold.store import ProductStore
from lakehouse.operators.base import Operator
from lakehouse.quality.watch import warned_columns
from lakehouse.stateful.live_join import JoinedSources

_DIGITS = 9  # of floating-point columns; estimates are sums whose last bits depend on the order of adding


@dataclass(frozen=True, slots=True)
class Comparison:
    """One table, live and replayed.

    Attributes:
        version: of the live table that was compared.
        bronze: the bronze version it derives from.
        rows: result rows, live and replayed.
        within_bounds: the digests differ because the order of merging or a random draw shows in the estimates (a lossy
            top-n, quantiles): whether they agree within the errors that they state.
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

    A pipeline may run meanwhile: each product is compared at the version, and with the bronze version, that its
    newest commit names.

    Args:
        step: called with what is being done, for a progress display.

    Raises:
        LakehouseError: a product holds nothing of bronze yet: try again later.
    """
    lake = Lake.of(settings)
    for source in pipeline.sources.values():
        builds: dict[int, DataFrame] = {}
        own = [(product, 0) for product in pipeline.products_of(source.name)]
        for product, since in own + added_products(lake, source.name):
            store = store_of(product, lake.table(product.layer, product.name), pipeline.name)
            if not store.table.exists():
                continue
            delta, mark = DeltaTable(str(store.table.path)), _mark_of(store)
            (bronze,) = mark.versions
            if bronze not in builds:
                step(f"reading {source.name} up to version {bronze}")
                builds[bronze] = build(spark, lake.bronze(source.name).path, source, bronze).persist()
            step(f"building {product.name}")
            valid = builds[bronze].where(F.col("reason").isNull())
            if since:
                valid = valid.where(F.unix_micros("bronze_at") > since)
            partial = run_partial(valid, source.name, store.operator)
            results = store.results(delta.to_pyarrow_table(), partial, mark.clock)
            yield compare(product.name, delta.version(), bronze, *results, store.operator)
        if builds and lake.quarantine().exists():
            oldest = min(builds)  # which quarantine has reached, whatever query keeps it
            yield _noted(lake, source, oldest, builds[oldest], lake.quarantine())
            warnings = lake.table("silver", WARNINGS)
            if source.expected(WARN) and warnings.exists():
                yield _noted(lake, source, oldest, builds[oldest], warnings)
        for whole in builds.values():
            whole.unpersist()
    for product in pipeline.joins:
        if lake.table(product.layer, product.name).exists():
            step(f"building {product.name}")
            yield _join(spark, lake, pipeline, product)
    for name, version, base, shown, computed in proofs(lake, pipeline):
        yield compare(name, version, base, shown, computed)


def _join(spark: SparkSession, lake: Lake, pipeline: Pipeline, product: Product) -> Comparison:
    """A join against the same by Spark's own join of both bronze tables."""
    store = ProductStore(product, lake.table(product.layer, product.name), pipeline.name)
    delta, mark = DeltaTable(str(store.table.path)), _mark_of(store)
    tables = [lake.bronze(name).path for name in (product.source, product.right)]
    partial, _ = JoinedSources(spark, pipeline, product).build(tables, mark.versions)
    results = store.results(delta.to_pyarrow_table(), partial, mark.clock)
    return compare(product.name, delta.version(), mark.versions[0], *results)


def _mark_of(store: ProductStore) -> BatchMark:
    if (mark := store.mark()) is None:
        raise LakehouseError(f"{store.product.name} holds nothing of bronze yet; verify when it does")
    return mark


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


def compare(
    table: str, version: int, bronze: int, live: pa.Table, again: pa.Table, operator: Operator | None = None
) -> Comparison:
    """Compare two sets of result rows of a table.

    Args:
        operator: states the errors within which they may differ; None: none.
    """
    rows, digests = (live.num_rows, again.num_rows), (digest(live), digest(again))
    agree = digests[0] != digests[1] and operator is not None and operator.agrees(live, again)
    return Comparison(table, version, bronze, rows, *digests, within_bounds=agree)


def _noted(lake: Lake, source: Source, bronze: int, whole: DataFrame, table: TableRef) -> Comparison:
    """Quarantine, or warnings."""
    newest = whole.agg(F.max("bronze_at").alias("at")).toArrow()["at"][0]
    delta = DeltaTable(str(table.path))
    live = delta.to_pyarrow_table()
    live = live.filter(pc.equal(live["source"], source.name))
    if newest.is_valid:  # the live table may be ahead of the products
        live = live.filter(pc.less_equal(live["bronze_at"], newest.cast(live.schema.field("bronze_at").type)))
    again = rejected_rows(whole, source) if table.name == QUARANTINE else warned_columns(whole).toArrow()
    return compare(table.name, delta.version(), bronze, live, again.cast(live.schema))
