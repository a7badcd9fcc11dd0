"""Staging tables: copies of a part of a product, for slow readers.

A copy is made in one commit: a reader sees the old or the new one. It can be dropped at any time, because the product
has all of its rows. Spark is not needed: DuckDB folds and filters, delta-rs writes, a batch of rows at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import ConfigError, QueryRefused
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.pipeline.folder import Staging
from lakehouse.contract.rows import Fold
from lakehouse.contract.sql import quoted
from lakehouse.contract.sql.spark import parse_condition
from lakehouse.contract.storage import table_rows
from lakehouse.errors import StagingError
from lakehouse.lock import WriterLocks

log = logging.getLogger(__name__)

COMMIT_STAGED = "millrace.staged"  # TABLE_ID/VERSION of the product that the copy shows
_BATCH_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Staged:
    """The state of a staging table after a refresh; ``changed``: the refresh made a commit."""

    name: str
    product: str
    product_version: int
    version: int
    rows: int
    changed: bool


def refresh(lake: Lake, pipeline: Pipeline, staging: Staging, *, rebuild: bool = False) -> Staged:
    """Copy the product's newest version, unless the table shows it already.

    Args:
        rebuild: copy in any case: drop the rows and the schema, and make them again from the product, in one commit.

    Raises:
        StagingError: there is no product yet, or it lacks a column.
        ConfigError: the condition is invalid.
        TableBusy: another process makes the copy.
    """
    layer = (pipeline.products.get(staging.product) or pipeline.views[staging.product]).layer
    record, target = lake.table(layer, staging.product), lake.table("gold", staging.name)
    if not record.exists():
        raise StagingError(staging.name, f"there is no table {staging.product} yet; run the pipeline first")
    with WriterLocks(lake, [staging.name], patience_s=2.0):
        product = DeltaTable(str(record.path))
        shows = f"{product.metadata().id}/{product.version()}/{staging.columns}/{staging.where}"
        changed = rebuild or not target.exists() or DeltaLog(target.path).newest_info(COMMIT_STAGED) != shows
        if changed:
            _copy(product, record, target, staging, shows)
        made = DeltaTable(str(target.path))
        rows = made.to_pyarrow_dataset().count_rows()
        log.info("staging table %s: %d rows of %s version %d", staging.name, rows, record.name, product.version())
        return Staged(staging.name, staging.product, product.version(), made.version(), rows, changed)


def _copy(product: DeltaTable, record: TableRef, target: TableRef, staging: Staging, shows: str) -> None:
    """Write the copy in one commit."""
    configuration = product.metadata().configuration
    key = tuple(name for name in configuration.get(names.PROPERTY_KEY, "").split(",") if name)
    dataset = table_rows(product, record.path)
    columns = _columns(staging, key, dataset.schema)
    with duckdb.connect(
        config={"enable_external_access": "false", "python_enable_replacements": "false"}
    ) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute("SET preserve_insertion_order = false")
        connection.register("partials", dataset)
        fold = Fold.from_properties(configuration)
        source = fold.sql("partials", dataset.schema.names) if fold else "SELECT * FROM partials"
        where = f" WHERE {_condition(staging)}" if staging.where else ""
        picked = ", ".join(quoted(name) for name in columns)
        found = connection.sql(f"SELECT {picked} FROM ({source}){where}")  # noqa: S608 - names are quoted, the rest parsed
        schema = pa.schema([dataset.schema.field(name) for name in columns])
        batches = (batch.cast(schema) for batch in found.to_arrow_reader(_BATCH_ROWS))
        properties = {names.PROPERTY_KEY: ",".join(key), names.PROPERTY_STAGING: staging.product}
        target.create(schema, properties, f"A copy of a part of {staging.product}, made by `millrace staging`")
        made = DeltaTable(str(target.path))
        if not properties.items() <= made.metadata().configuration.items():
            made.alter.set_table_properties(properties, raise_if_not_exists=False)
        write_deltalake(
            str(target.path),
            pa.RecordBatchReader.from_batches(schema, batches),
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=CommitProperties(custom_metadata={COMMIT_STAGED: shows}),
        )


def _columns(staging: Staging, key: tuple[str, ...], schema: pa.Schema) -> list[str]:
    wanted = [*key, *(name for name in staging.columns if name not in key)] if staging.columns else schema.names
    if missing := [name for name in wanted if name not in schema.names]:
        raise StagingError(staging.name, f"{staging.product} has no column {missing[0]!r}")
    return list(wanted)


def _condition(staging: Staging) -> str:
    try:
        return str(parse_condition(staging.where).sql(dialect="duckdb"))
    except QueryRefused as error:
        raise ConfigError(error.problem, key=f"staging.{staging.name}.where", remedy=error.remedy) from None
