"""Bronze to products in one go: for a new product, a lost checkpoint, and the proof of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from lakehouse.contract.pipeline import Source
from lakehouse.operators import Operator
from lakehouse.silver.conform import MISFIT, conform, misfits, payload_schema
from lakehouse.silver.quarantine import COLUMNS as QUARANTINE_COLUMNS


@dataclass(frozen=True, slots=True)
class Build:
    """All events of a bronze version, each once.

    Attributes:
        events: as :func:`lakehouse.silver.conform.conform` gives them, first copies only.
        source: whose they are.
    """

    events: DataFrame
    source: Source

    def partial(self, operator: Operator) -> pa.Table:
        """The product's partial rows over all valid events."""
        return run_partial(self.events.where(F.col("reason").isNull()), self.source.name, operator)

    def since(self, bronze_at: int) -> Build:
        """Those of bronze commits after a time (microseconds since the epoch); 0: all."""
        if not bronze_at:
            return self
        return Build(self.events.where(F.unix_micros("bronze_at") > bronze_at), self.source)

    def rejected(self) -> pa.Table:
        """Quarantine rows."""
        return rejected_rows(self.events, self.source)


def build(spark: SparkSession, bronze: Path, source: Source, version: int) -> Build:
    """Every event of the bronze table at ``version``, exactly once: of several copies the first in bronze."""
    rows = spark.read.format("delta").option("versionAsOf", version).load(str(bronze))
    events = conform(rows, source)
    order = Window.partitionBy("dedupe_key").orderBy("bronze_at", "topic", "partition", "offset")
    if source.dedupe_horizon_ms:
        since = F.unix_micros("bronze_at") - F.lag(F.unix_micros("bronze_at")).over(order)
        counts = F.coalesce(since > source.dedupe_horizon_ms * 1000, F.lit(True))
        first = events.withColumn("counts", counts).where("counts").drop("counts")
    else:
        first = events.withColumn("copy", F.row_number().over(order)).where("copy = 1").drop("copy")
    return Build(first, source)


def clock_of(valid: DataFrame) -> int | None:
    """The clock's value by these events (:class:`~lakehouse.gold.store.BatchMark`), or None where there are none."""
    newest = valid.agg(F.max(F.unix_micros(F.least("event_time", "received_at")))).collect()[0][0]
    return None if newest is None else int(newest)


def run_partial(valid: DataFrame, view: str, operator: Operator) -> pa.Table:
    """The operator's SQL over valid events, which it sees under the name ``view``."""
    valid.createOrReplaceTempView(view)
    return valid.sparkSession.sql(operator.partial_sql()).toArrow()


def rejected_columns(events: DataFrame, source: Source) -> DataFrame:
    """The rejected among conformed events with all their columns, as :func:`told_rejects` takes them."""
    misfit = F.col("reason") == MISFIT
    return (
        events.where(F.col("reason").isNotNull())
        .withColumn("taken", F.when(misfit, F.to_json(F.struct(*payload_schema(source).fieldNames()))))
        .withColumn("payload", F.expr("make_valid_utf8(payload)"))  # with U+FFFD where it is not; bronze has the bytes
        .select(*QUARANTINE_COLUMNS.names, "taken")
    )


def told_rejects(rows: pa.Table, source: Source) -> pa.Table:
    """Quarantine's rows: the reason names the fields that do not fit the schema."""
    # Here and not in Spark: so many expressions take long to plan, and few rows need them.
    schema = payload_schema(source)
    columns = (rows[name].to_pylist() for name in ("reason", "payload", "taken"))
    reasons = [
        f"{reason}: {misfits(payload, taken, schema)}" if taken else reason
        for reason, payload, taken in zip(*columns, strict=True)
    ]
    index = rows.schema.get_field_index("reason")
    return rows.set_column(index, "reason", pa.array(reasons, pa.string())).drop_columns("taken")


def rejected_rows(events: DataFrame, source: Source) -> pa.Table:
    """The rejected among conformed events, as quarantine keeps them."""
    return told_rejects(rejected_columns(events, source).toArrow(), source)
