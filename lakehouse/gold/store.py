"""A product's Delta table: merge a batch's partial results into it, exactly once.

Each commit names the batch it holds as an app transaction (query id, batch number) in the same commit, so a repeated
batch is seen and skipped; and, as commit metadata, how far in Kafka and in bronze it reaches. The table is the state:
nothing else has to be kept, and nothing can disagree with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.operators import Operator, operator_of
from lakehouse.operators.base import WINDOW_START

HOT_UNITS = 64  # windows whose rows are kept in memory; older ones are read from the table when they change


@dataclass(frozen=True, slots=True)
class BatchMark:
    """What a product commit says of the batch it holds.

    Attributes:
        query: id of the streaming query (of its checkpoint).
        batch: number of the micro-batch.
        bronze: how far in bronze the batch reaches, as the Delta source's offset (JSON).
        through: ``TOPIC/PARTITION`` to next offset: all events before it are in the product.
        events: events that count, in this batch.
        oldest: received_at of the oldest of them, ms since the epoch; None where there are none.
        newest: of the newest.
    """

    query: str
    batch: int
    bronze: str
    through: Mapping[str, int] = field(default_factory=dict)
    events: int = 0
    oldest: int | None = None
    newest: int | None = None

    def to_metadata(self) -> dict[str, str]:
        """commitInfo keys (lakehouse.contract.lake)."""
        found = {
            names.COMMIT_THROUGH: json.dumps(dict(self.through), separators=(",", ":")),
            names.COMMIT_EVENTS: str(self.events),
            names.COMMIT_BATCH: f"{self.query}/{self.batch}",
            names.COMMIT_BRONZE: self.bronze,
        }
        if self.oldest is not None and self.newest is not None:
            found |= {names.COMMIT_OLDEST: str(self.oldest), names.COMMIT_NEWEST: str(self.newest)}
        return found

    @classmethod
    def from_metadata(cls, info: Mapping[str, object]) -> BatchMark | None:
        """The mark in a commitInfo, or None where there is none."""
        try:
            query, _, batch = str(info[names.COMMIT_BATCH]).rpartition("/")
            return cls(
                query,
                int(batch),
                str(info[names.COMMIT_BRONZE]),
                json.loads(str(info[names.COMMIT_THROUGH])),
                int(str(info[names.COMMIT_EVENTS])),
            )
        except (KeyError, ValueError):
            return None


class ProductStore:
    """The one writer of a product's table."""

    def __init__(self, product: Product, table: TableRef, pipeline: str) -> None:
        self.product = product
        self.table = table
        self.operator: Operator = operator_of(product)
        self._pipeline = pipeline
        self._delta: DeltaTable | None = None
        self._hot: dict[object, pa.Table] = {}
        self._batches: dict[str, int] = {}

    @property
    def folded(self) -> bool:
        """Whether the table holds partial rows, to be folded on read."""
        return self.product.storage == "append"

    def mark(self) -> BatchMark | None:
        """The newest commit's mark, or None where the table is absent or holds no batch yet."""
        if not self.table.exists():
            return None
        for info in self._open().history(limit=50):
            found = BatchMark.from_metadata(info)
            if found is not None:
                return found
        return None

    def holds(self, query: str, batch: int) -> bool:
        """Whether this batch of this query is in the table already."""
        if query not in self._batches:
            version = self._open().transaction_version(query) if self.table.exists() else None
            self._batches[query] = -1 if version is None else version
        return self._batches[query] >= batch

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Merge one batch's partial rows and commit.

        Returns:
            The table's version that holds the batch.
        """
        delta = self._ensure(partial.schema)
        if self.holds(mark.query, mark.batch):
            return delta.version()
        partial = self._conformed(partial)
        if self.folded or not partial.num_rows:
            self._write(partial if self.folded else self._empty(), mark, predicate=None, mode="append")
        else:
            units = pc.unique(partial[WINDOW_START]).to_pylist() if self.operator.unit else []
            merged = self.operator.merge(self._current(units), partial)
            self._write(merged, mark, predicate=self._predicate(units), mode="overwrite")
            self._keep(units, merged)
        self._batches[mark.query] = mark.batch
        return delta.version()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        """Put a batch build in place of all that the table holds, in one commit.

        Returns:
            The table's new version.
        """
        delta = self._ensure(rows.schema)
        partial = self._conformed(rows)
        full = partial if self.folded or not partial.num_rows else self.operator.merge(None, partial)
        if self.operator.schema is not None and not full.num_rows:
            full = self._empty()
        self._write(full, mark, predicate=None, mode="overwrite")
        self._hot.clear()
        self._batches[mark.query] = mark.batch
        return delta.version()

    def _ensure(self, schema: pa.Schema) -> DeltaTable:
        self.operator.describe(schema)
        if not self.table.exists():
            configuration = {
                names.PROPERTY_KEY: ",".join(self.operator.key),
                names.PROPERTY_PIPELINE: self._pipeline,
                "delta.checkpointInterval": "1000000",
                "delta.logRetentionDuration": "interval 6 hours",
            }
            if self.folded:
                configuration[names.PROPERTY_FOLD] = json.dumps(self.operator.fold)
            self.table.path.mkdir(parents=True, exist_ok=True)
            DeltaTable.create(
                str(self.table.path),
                schema=self._empty().schema,
                mode="ignore",
                name=self.product.name,
                configuration=configuration,
                raise_if_key_not_exists=False,
            )
        return self._open()

    def _open(self) -> DeltaTable:
        if self._delta is None:
            self._delta = DeltaTable(str(self.table.path))
        return self._delta

    def _conformed(self, partial: pa.Table) -> pa.Table:
        """Timestamps as the table has them; Spark says them in the session's zone."""
        fields = [
            field.with_type(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(field.type) else field
            for field in partial.schema
        ]
        return partial.cast(pa.schema(fields))

    def _current(self, units: list[object]) -> pa.Table | None:
        """The rows that the product holds of these units."""
        if not self.operator.unit:
            found = self._open().to_pyarrow_table()
            return found.cast(self.operator.schema) if found.num_rows else None
        absent = [unit for unit in units if unit not in self._hot]
        if absent:
            read = self._open().to_pyarrow_table(filters=[(WINDOW_START, "in", absent)]).cast(self.operator.schema)
            for unit in absent:
                self._hot[unit] = read.filter(pc.equal(read[WINDOW_START], pa.scalar(unit, read[WINDOW_START].type)))
        tables = [self._hot[unit] for unit in units if self._hot[unit].num_rows]
        return pa.concat_tables(tables) if tables else None

    def _keep(self, units: list[object], merged: pa.Table) -> None:
        if not self.operator.unit:
            return
        for unit in units:
            self._hot.pop(unit, None)
            self._hot[unit] = merged.filter(pc.equal(merged[WINDOW_START], pa.scalar(unit, merged[WINDOW_START].type)))
        for unit in list(self._hot)[: max(0, len(self._hot) - HOT_UNITS)]:
            del self._hot[unit]

    def _predicate(self, units: list[object]) -> str | None:
        if not self.operator.unit:
            return None
        literals = [
            f"arrow_cast('{unit.isoformat()}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
            for unit in units
            if isinstance(unit, datetime)
        ]
        return f"{WINDOW_START} IN ({', '.join(literals)})"

    def _empty(self) -> pa.Table:
        assert self.operator.schema is not None
        return self.operator.schema.empty_table()

    def _write(
        self, rows: pa.Table, mark: BatchMark, *, predicate: str | None, mode: Literal["append", "overwrite"]
    ) -> None:
        properties = CommitProperties(
            custom_metadata=mark.to_metadata(),
            app_transactions=[Transaction(mark.query, mark.batch)],
            max_commit_retries=0,  # one writer: a conflict means that there is another, and must be heard
        )
        write_deltalake(
            self._open(),
            rows.cast(self.operator.schema),
            mode=mode,  # type: ignore[arg-type]
            predicate=predicate,
            commit_properties=properties,
        )
