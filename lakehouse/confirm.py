"""The confirmation of a "maybe": whether bronze itself holds an item, by the product's own SQL. Starts Spark."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.operators.windows import in_time, input_sql
from lakehouse.silver.conform import conform


def is_in_bronze(
    spark: SparkSession,
    lake: Lake,
    pipeline: Pipeline,
    product: Product,
    item: str,
    start: datetime,
    end: datetime,
    groups: Mapping[str, str] | None = None,
) -> bool:
    """Whether an event with this item counts in the product's windows from ``start`` to ``end``.

    Args:
        groups: column of the product's ``by`` to the value that it must have, as text.
    """
    source = pipeline.sources[product.source]
    rows = spark.read.format("delta").load(str(lake.bronze(source.name).path))
    if product.time == "received_at":  # bronze has it, and skips what lies outside
        rows = rows.where(F.col("received_at").between(F.lit(start), F.lit(end)))
    conform(rows, source).where(F.col("reason").isNull()).createOrReplaceTempView(source.name)
    query = in_time(product, f"SELECT * FROM {input_sql(product)}")  # noqa: S608 - a checked pipeline
    found = spark.sql(query).where(F.col(product.item).cast("string") == F.lit(item))
    found = found.where((F.col(product.time) >= F.lit(start)) & (F.col(product.time) < F.lit(end)))
    for column, value in (groups or {}).items():
        found = found.where(F.col(column).cast("string") == F.lit(value))
    return bool(found.limit(1).count())
