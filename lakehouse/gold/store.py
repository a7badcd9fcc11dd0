"""A product's Delta table: merge a batch's partial results into it, exactly once.

Each commit names the batch it holds as an app transaction (query id, batch number) in the same commit, so a repeated
batch is seen and skipped; and, as commit metadata, how far in Kafka and in bronze it reaches. The table is the state:
nothing else has to be kept, and nothing can disagree with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import SKETCHES, sketch_property
from lakehouse.gold.hot import HotRows
from lakehouse.operators import Operator, operator_of
from lakehouse.operators.base import TIMESTAMP, WINDOW_START, plain, prepared
from lakehouse.operators.latest import Latest


@dataclass(frozen=True, slots=True)
class BatchMark:
    """What a product commit says of the batch it holds.

    Attributes:
        query: the Delta application: ``bronze-TABLE_ID``; of a join, the id of its streaming query.
        batch: its transaction's number: the bronze version that the product holds; of a join, the micro-batch.
        bronze: that version as text; of a join, the offsets of both Delta sources (JSON).
        through: ``TOPIC/PARTITION`` to next offset: all events before it are in the product.
        events: events that count, in this batch.
        oldest: received_at of the oldest of them, ms since the epoch; None where there are none.
        newest: of the newest.
        clock: the newest event time in all of bronze so far, no later than its arrival, microseconds since the epoch:
            what sessions end and retention counts by, the same in a replay; None where nothing came yet.
    """

    query: str
    batch: int
    bronze: str
    through: Mapping[str, int] = field(default_factory=dict)
    events: int = 0
    oldest: int | None = None
    newest: int | None = None
    clock: int | None = None

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
        if self.clock is not None:
            found[names.COMMIT_CLOCK] = str(self.clock)
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
                clock=int(str(info[names.COMMIT_CLOCK])) if names.COMMIT_CLOCK in info else None,
            )
        except (KeyError, ValueError):
            return None


def later(one: int | None, other: int | None) -> int | None:
    """The later of two clocks."""
    return max((clock for clock in (one, other) if clock is not None), default=None)


class ProductStore:
    """The one writer of a product's table."""

    def __init__(self, product: Product, table: TableRef, pipeline: str, declaration: str = "") -> None:
        self.product = product
        self.table = table
        self.operator: Operator = operator_of(product)
        self._pipeline = pipeline
        self._declaration = declaration
        self._delta: DeltaTable | None = None
        self._hot = HotRows(WINDOW_START)
        self._batches: dict[str, int] = {}
        self._evicted: int | None = None

    @property
    def folded(self) -> bool:
        """Whether the table holds partial rows, to be folded on read."""
        return self.product.storage == "append"

    def outdated(self) -> str:
        """Why the table's rows are not what is declared now, so that it must be built again; empty where they are."""
        if not self._declaration or not self.table.exists():
            return ""
        found = self._open().metadata().configuration.get(names.PROPERTY_DECLARATION)
        if found == self._declaration:
            return ""
        return "its declaration, or its source's, has changed" if found else "it does not say what it was made by"

    def delta(self) -> DeltaTable:
        """The writer's own handle, for care of the table between two batches; the table must exist."""
        return self._open()

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
        partial = self.retained(prepared(self.operator, plain(partial)), mark.clock)
        if self.folded or not partial.num_rows:
            self._write(partial if self.folded else self._empty(), mark, predicate=None, mode="append")
        else:
            units = pc.unique(partial[WINDOW_START]).to_pylist() if self.operator.unit else []
            merged = self.operator.merge(self._current(units), partial)
            self._write(merged, mark, predicate=self._predicate(units), mode="overwrite")
            self._keep(units, merged)
        self._batches[mark.query] = mark.batch
        self._evict(mark.clock)
        return delta.version()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        """Put a batch build in place of all that the table holds, in one commit.

        Returns:
            The table's new version.
        """
        self._evolve(rows.schema)
        delta = self._ensure(rows.schema)
        partial = self.retained(prepared(self.operator, plain(rows)), mark.clock)
        full = partial if self.folded or not partial.num_rows else self.operator.merge(None, partial)
        if self.operator.schema is not None and not full.num_rows:
            full = self._empty()
        self._write(full, mark, predicate=None, mode="overwrite", evolve=True)
        self._hot.clear()
        self._batches[mark.query] = mark.batch
        configuration = self._configuration()  # last: a crash before this builds it once more
        if any(delta.metadata().configuration.get(key) != value for key, value in configuration.items()):
            delta.alter.set_table_properties(configuration, raise_if_not_exists=False)
        return delta.version()

    def horizon(self, clock: int | None) -> int | None:
        """What lies before this time may be gone: microseconds since the epoch; None: nothing is ever removed."""
        if clock is None or self.product.retention_ms is None:
            return None
        return clock - self.product.retention_ms * 1000

    def retained(self, rows: pa.Table, clock: int | None) -> pa.Table:
        """Rows of windows that began behind the horizon: no others are added to, and these were never removed."""
        horizon = self.horizon(clock)
        if horizon is None or WINDOW_START not in rows.schema.names:
            return rows
        return rows.filter(pc.greater(pc.cast(rows[WINDOW_START], pa.int64()), horizon))

    def _evict(self, clock: int | None) -> None:
        """Remove windows before the horizon, a twentieth of the retention at once, in a commit of their own."""
        horizon = self.horizon(clock)
        if horizon is None or self.product.retention_ms is None:
            return
        if self._evicted is not None and horizon - self._evicted < self.product.retention_ms * 50:
            return
        self._evicted = horizon
        old = pc.field(WINDOW_START) <= pa.scalar(horizon, TIMESTAMP)
        if self._open().to_pyarrow_dataset().count_rows(filter=old):
            place = f"{WINDOW_START} <= arrow_cast({horizon}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
            self._open().delete(place, commit_properties=CommitProperties(max_commit_retries=0))

    def _evolve(self, schema: pa.Schema) -> None:
        """Drop the table where its rows are keyed or folded otherwise now: subscribers must begin again then."""
        self.operator.describe(schema)
        if not self.table.exists():
            return
        found, wanted = self._open().metadata().configuration, self._configuration()
        if any(
            found.get(key) != wanted.get(key) for key in (names.PROPERTY_KEY, names.PROPERTY_FOLD, names.PROPERTY_ORDER)
        ):
            shutil.rmtree(self.table.path)
            self._delta = None
            self._hot.clear()
            self._batches.clear()

    def _configuration(self) -> dict[str, str]:
        """The table's properties."""
        kept = f"interval {self.product.positions_ms} milliseconds"
        configuration = {
            names.PROPERTY_KEY: ",".join(self.operator.key),
            names.PROPERTY_PIPELINE: self._pipeline,
            names.PROPERTY_POSITIONS: str(self.product.positions_ms),
            "delta.checkpointInterval": "1000000",
            "delta.logRetentionDuration": kept,
            "delta.deletedFileRetentionDuration": kept,
        }
        if self.product.operator in SKETCHES:
            configuration[names.PROPERTY_OPERATOR] = sketch_property(self.product)
        if self._declaration:
            configuration[names.PROPERTY_DECLARATION] = self._declaration
        if self.folded:
            configuration[names.PROPERTY_FOLD] = json.dumps(self.operator.fold)
            if isinstance(self.operator, Latest):
                configuration[names.PROPERTY_ORDER] = ",".join(self.operator.order)
        return configuration

    def _ensure(self, schema: pa.Schema) -> DeltaTable:
        self.operator.describe(schema)
        if not self.table.exists():
            configuration = self._configuration()
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

    def _current(self, units: list[object]) -> pa.Table | None:
        """The rows that the product holds of these units."""
        if not self.operator.unit:
            found = self._open().to_pyarrow_table()
            return found.cast(self.operator.schema) if found.num_rows else None
        held = self._hot.rows_of(units)
        absent = self._hot.absent(units)
        if not absent:
            return held
        read = self._open().to_pyarrow_table(filters=[(WINDOW_START, "in", absent)])
        read = read.cast(self.operator.schema)
        found = read if held is None else pa.concat_tables([held, read])
        return found if found.num_rows else None

    def _keep(self, units: list[object], merged: pa.Table) -> None:
        if self.operator.unit:
            self._hot.put(units, merged)

    def _predicate(self, units: list[object]) -> str | None:
        if not self.operator.unit:
            return None
        literals = [
            f"arrow_cast('{unit.isoformat()}', 'Timestamp(Microsecond, Some(\"UTC\"))')"
            for unit in units
            if isinstance(unit, datetime)
        ]
        among = [f"{WINDOW_START} IN ({', '.join(literals)})"] if literals else []
        return " OR ".join([*among, *([f"{WINDOW_START} IS NULL"] if None in units else [])])

    def _empty(self) -> pa.Table:
        assert self.operator.schema is not None
        return self.operator.schema.empty_table()

    def _write(
        self,
        rows: pa.Table,
        mark: BatchMark,
        *,
        predicate: str | None,
        mode: Literal["append", "overwrite"],
        evolve: bool = False,
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
            schema_mode="overwrite" if evolve and not self._fits() else None,
            commit_properties=properties,
        )

    def _fits(self) -> bool:
        """Whether the table has the columns that its rows have now."""
        assert self.operator.schema is not None
        return bool(self._open().schema() == Schema.from_arrow(self.operator.schema))
