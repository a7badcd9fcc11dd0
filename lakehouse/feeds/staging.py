"""Staging tables: a part of a product's result, copied for readers that take their time.

A copy is made in one commit: who reads it sees the old or the new one. It can be dropped at any time; the record has
everything. Neither needs Spark: DuckDB folds and filters, delta-rs writes, a batch of rows at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.rows import Fold
from lakehouse.contract.sqlcheck import QueryRefused, parse_condition
from lakehouse.contract.staging import Staging
from lakehouse.errors import LakehouseError
from lakehouse.lock import WriterLocks

log = logging.getLogger(__name__)

COMMIT_STAGED = "millrace.staged"  # TABLE_ID/VERSION of the product that the copy shows
_BATCH_ROWS = 100_000


class StagingError(LakehouseError):
    """A staging table that cannot be made.

    Attributes:
        name: of the table.
        problem: why.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"staging table {self.name}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Staged:
    """What became of a staging table.

    Attributes:
        name: of the table.
        product: that it is a copy of.
        product_version: version of the product that it shows.
        version: the staging table's own version.
        rows: in it.
        changed: whether a commit was made.
    """

    name: str
    product: str
    product_version: int
    version: int
    rows: int
    changed: bool


def refresh(lake: Lake, pipeline: Pipeline, staging: Staging) -> Staged:
    """Bring the copy up to the product's newest version; one that shows it already is left alone.

    Raises:
        StagingError: there is no product yet, or it lacks a column.
        ConfigError: the condition is not one.
        TableBusy: somebody else is making the copy.
    """
    return _make(lake, pipeline, staging, anew=False)


def rebuild(lake: Lake, pipeline: Pipeline, staging: Staging) -> Staged:
    """Drop the copy's rows and schema, and make it anew from the record, in one commit.

    Raises:
        As :func:`refresh`.
    """
    return _make(lake, pipeline, staging, anew=True)


def _make(lake: Lake, pipeline: Pipeline, staging: Staging, *, anew: bool) -> Staged:
    layer = (pipeline.products.get(staging.product) or pipeline.views[staging.product]).layer
    record, target = lake.table(layer, staging.product), lake.table("gold", staging.name)
    if not record.exists():
        raise StagingError(staging.name, f"there is no table {staging.product} yet; run the pipeline first")
    with WriterLocks(lake, [staging.name], patience_s=2.0):
        product = DeltaTable(str(record.path))
        shows = f"{product.metadata().id}/{product.version()}/{staging.columns}/{staging.where}"
        if target.exists() and not anew and _shown(target) == shows:
            rows, changed = _count(target), False
        else:
            rows, changed = _copy(product, target, staging, shows), True
            log.info("staging table %s: %d rows of %s version %d", staging.name, rows, record.name, product.version())
        version = DeltaTable(str(target.path)).version()
        return Staged(staging.name, staging.product, product.version(), version, rows, changed)


def _copy(product: DeltaTable, target: TableRef, staging: Staging, shows: str) -> int:
    """Write the copy in one commit; returns its rows."""
    configuration = product.metadata().configuration
    key = tuple(name for name in configuration.get(names.PROPERTY_KEY, "").split(",") if name)
    dataset = product.to_pyarrow_dataset()
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
        picked = ", ".join(_quoted(name) for name in columns)
        found = connection.sql(f"SELECT {picked} FROM ({source}){where}")  # noqa: S608 - names are quoted, the rest parsed
        schema = pa.schema([dataset.schema.field(name) for name in columns])
        counted = _Counted(found.to_arrow_reader(_BATCH_ROWS), schema)
        _ready(target, schema, {names.PROPERTY_KEY: ",".join(key), names.PROPERTY_STAGING: staging.product})
        write_deltalake(
            str(target.path),
            pa.RecordBatchReader.from_batches(schema, counted),
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=CommitProperties(custom_metadata={COMMIT_STAGED: shows}),
        )
    return counted.rows


def _ready(target: TableRef, schema: pa.Schema, properties: dict[str, str]) -> None:
    """Make the table where it is absent, and see to what it says of itself."""
    if not target.exists():
        target.path.mkdir(parents=True, exist_ok=True)
        description = f"A part of {properties[names.PROPERTY_STAGING]}, made by `millrace staging`"
        DeltaTable.create(
            str(target.path),
            schema,
            mode="ignore",
            name=target.name,
            description=description,
            configuration=properties,
            raise_if_key_not_exists=False,
        )
        return
    delta = DeltaTable(str(target.path))
    found = delta.metadata().configuration
    if any(found.get(name) != value for name, value in properties.items()):
        delta.alter.set_table_properties(properties, raise_if_not_exists=False)


class _Counted:
    """Batches in the table's types, counted as they go by."""

    def __init__(self, reader: pa.RecordBatchReader, schema: pa.Schema) -> None:
        self._reader = reader
        self._schema = schema
        self.rows = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._reader.read_next_batch()
        self.rows += batch.num_rows
        return batch.cast(self._schema)


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


def _shown(target: TableRef) -> str:
    return str(DeltaLog(target.path).newest_info(COMMIT_STAGED) or "")


def _count(target: TableRef) -> int:
    return int(DeltaTable(str(target.path)).to_pyarrow_dataset().count_rows())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
