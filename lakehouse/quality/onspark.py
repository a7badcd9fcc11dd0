"""Predicates that only Spark can evaluate, on bronze rows, as the stream evaluates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from lakehouse.contract.pipeline import Source
from lakehouse.quality.frame import EVENT, Asked
from lakehouse.quality.subject import Subject
from lakehouse.silver.conform import conform, met

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


class OnSpark:
    """Evaluates the predicates that a source's rows are asked."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, source: Source, subject: Subject, asked: Sequence[Asked]) -> pd.DataFrame:
        """A column of verdicts for each of ``asked``: true, false, or null for a row that it does not judge."""
        judged = dataclasses.replace(source, expectations={})
        rows = conform(self._spark.read.parquet(*subject.files), judged)
        fits = F.col("reason").isNull()
        columns = [
            (F.when(fits, met(item.check.sql)) if item.kind == EVENT else met(item.check.sql)).alias(item.computed)
            for item in asked
        ]
        return rows.select(*columns).toArrow().to_pandas()
