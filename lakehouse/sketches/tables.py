"""Sketch columns of Delta tables, merged across windows and groups, and the confirmation of a "maybe"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from lakehouse.contract import lake as names
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Product, Source
from lakehouse.contract.storage import spark_uri
from lakehouse.contract.tomlfile import duration_ms
from lakehouse.errors import BadSketch
from lakehouse.operators.base import TIMESTAMP, WINDOW_END, WINDOW_START, in_time, input_sql
from lakehouse.sketches.kinds import Sketch, sketch_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST = 1_000  # rows of sketches in memory at once


@dataclass(frozen=True, slots=True)
class Span:
    """Sketches of some windows, merged."""

    sketch: Sketch
    start: datetime  # of the first window
    end: datetime
    windows: int  # their number
    rows: int  # merged rows: one a window and group
    groups: Mapping[str, str] = field(default_factory=dict)  # column of `by` to the value that it must have, as text


class SketchTable:
    """A table whose rows carry sketches. Raises BadSketch: it carries none."""

    def __init__(self, ref: TableRef) -> None:
        self.ref = ref
        self._delta = DeltaTable(str(ref.path))
        self.property = self._delta.metadata().configuration.get(names.PROPERTY_OPERATOR, "")
        if not self.property:
            raise BadSketch(f"table {ref.name} holds no sketches")
        self.parameters: Mapping[str, Any] = json.loads(self.property)

    @property
    def operator(self) -> str:
        return str(self.parameters["operator"])

    def newest(self) -> datetime:
        """Start of the newest window. Raises BadSketch: the table is empty."""
        starts = self._delta.to_pyarrow_dataset().to_table(columns=[WINDOW_START])[WINDOW_START]
        newest: datetime | None = pc.max(starts).as_py()
        if newest is None:
            raise BadSketch(f"table {self.ref.name} has no windows yet")
        return newest

    def span(self, start: datetime | None, end: datetime | None, groups: Mapping[str, str] | None = None) -> Span:
        """The windows that start from ``start`` on and before ``end``, merged; of sliding ones those side by side.

        Args:
            groups: column of ``by`` to the value that it must have, as text.

        Raises:
            BadSketch: there are none, there is no such column, or sliding windows cannot be laid side by side.
        """
        sketch = sketch_of(self.property)
        rows = self._rows(sketch.columns, start, end, groups or {})
        starts: set[datetime] = set()
        ends: set[datetime] = set()
        count = 0
        for batch in rows.to_batches(max_chunksize=_MOST):
            for row in batch.to_pylist():
                if row["sketch"] is None:  # a lower rank of top_n
                    continue
                sketch.add(row)
                starts.add(row[WINDOW_START])
                ends.add(row[WINDOW_END])
                count += 1
        if not count:
            raise BadSketch(f"table {self.ref.name} has no such windows")
        return Span(sketch, min(starts), max(ends), len(starts), count, groups or {})

    def _rows(
        self, held: Sequence[str], start: datetime | None, end: datetime | None, groups: Mapping[str, str]
    ) -> pa.Table:
        condition = ds.field(WINDOW_START).is_valid()
        if start is not None:
            condition &= ds.field(WINDOW_START) >= pa.scalar(start, TIMESTAMP)
        if end is not None:
            condition &= ds.field(WINDOW_START) < pa.scalar(end, TIMESTAMP)
        by = self.parameters.get("by", [])
        for column, value in groups.items():
            if column not in by:
                raise BadSketch(f"table {self.ref.name} has no groups by {column!r}; it has: {', '.join(by) or 'none'}")
            condition &= ds.field(column).cast(pa.string()) == value
        rows = self._delta.to_pyarrow_dataset().to_table(columns=[WINDOW_START, WINDOW_END, *held], filter=condition)
        return self._side_by_side(rows, start) if self.parameters.get("slide") and rows.num_rows else rows

    def _side_by_side(self, rows: pa.Table, start: datetime | None) -> pa.Table:
        """Of overlapping windows those that hold every event once."""
        window, slide = (duration_ms(self.parameters[key]) for key in ("window", "slide"))
        if window % slide:
            raise BadSketch(f"windows of {window} ms every {slide} ms cannot be laid side by side")
        first = pc.min(rows[WINDOW_START]).as_py()
        if start is not None:  # the first that starts no earlier
            late = (start - datetime(1970, 1, 1, tzinfo=UTC)) % timedelta(milliseconds=slide)
            first = start if not late else start - late + timedelta(milliseconds=slide)
        since = pc.cast(pc.subtract(rows[WINDOW_START], pa.scalar(first, rows[WINDOW_START].type)), pa.int64())
        tiles = pc.divide(since, window * 1_000)
        return rows.filter(pc.equal(pc.multiply(tiles, window * 1_000), since))


def is_held(lake: Lake, place: str, item: str, span: Span) -> bool:
    """Whether a table holds an item: the confirmation of a "maybe".

    Args:
        place: ``TABLE.COLUMN``. Only rows of the span's windows and groups count, if the table has their columns.

    Raises:
        BadSketch: the table has no such column.
        UnknownTable: there is no such table.
    """
    table, _, column = place.partition(".")
    data = DeltaTable(str(lake.find(table).path)).to_pyarrow_dataset()
    if column not in data.schema.names:
        raise BadSketch(f"table {table} has no column {column!r}")
    condition = ds.field(column).cast(pa.string()) == item
    for name, value in span.groups.items():
        if name in data.schema.names:
            condition &= ds.field(name).cast(pa.string()) == value
    if WINDOW_START in data.schema.names:
        condition &= ds.field(WINDOW_START) >= pa.scalar(span.start, TIMESTAMP)
        condition &= ds.field(WINDOW_START) < pa.scalar(span.end, TIMESTAMP)
    return bool(data.head(1, columns=[column], filter=condition).num_rows)


def is_in_bronze(spark: SparkSession, lake: Lake, source: Source, product: Product, item: str, span: Span) -> bool:
    """Whether an event of the product's source with this item counts in the span, by the product's own SQL in Spark."""
    from pyspark.sql import functions as F

    from lakehouse.silver.conform import conform

    rows = spark.read.format("delta").load(spark_uri(lake.bronze(source.name).path))
    if product.time == "received_at":  # bronze has it, and skips files outside
        rows = rows.where(F.col("received_at").between(F.lit(span.start), F.lit(span.end)))
    conform(rows, source).where(F.col("reason").isNull()).createOrReplaceTempView(source.name)
    query = in_time(product, f"SELECT * FROM ({input_sql(product)})")  # noqa: S608 - a checked pipeline
    found = spark.sql(query).where(F.col(product.item).cast("string") == F.lit(item))
    found = found.where((F.col(product.time) >= F.lit(span.start)) & (F.col(product.time) < F.lit(span.end)))
    for column, value in span.groups.items():
        found = found.where(F.col(column).cast("string") == F.lit(value))
    return bool(found.limit(1).count())
