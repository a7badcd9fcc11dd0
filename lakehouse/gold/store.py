"""A product's Delta table: merge a batch's partial results into it, exactly once.

Each commit names its position in bronze as an app transaction, so a repeated batch is noticed and skipped. Its metadata
says how far in Kafka and in bronze it reaches (:mod:`lakehouse.gold.mark`). The table is the state: nothing else has to
be stored, and nothing can disagree with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import SKETCHES, sketch_property
from lakehouse.contract.storage import remove_tree
from lakehouse.gold.mark import BatchMark
from lakehouse.operators.base import TIMESTAMP, WINDOW_START, Operator, plain
from lakehouse.operators.registry import operator_of
from lakehouse.operators.rows import ARRIVED, EventRows, Latest

UNITS = 64
"""Units in memory beside those of the last batch; the rows of others are read from the table when they change."""
_HOT_BYTES = 32 << 20
_SPARE = 1.25  # times the events to keep, before the oldest leave


class HotRows:
    """Rows of the units that changed last, in memory: the next batch mostly changes the same ones.

    Bounded in units and in bytes.

    Args:
        column: whose values are the units.
    """

    def __init__(self, column: str) -> None:
        self._column = column
        self._rows: pa.Table | None = None
        self._units: dict[object, None] = {}  # the one that changed last at the end

    def clear(self) -> None:
        self._rows = None
        self._units.clear()

    def absent(self, units: Sequence[object]) -> list[object]:
        """Units whose rows are not in memory."""
        return [unit for unit in units if unit not in self._units]

    def rows_of(self, units: Sequence[object]) -> pa.Table | None:
        """The rows of these units that are in memory; None for no rows."""
        if self._rows is None:
            return None
        found = self._rows.filter(self._among(units))
        return found if found.num_rows else None

    def put(self, units: Sequence[object], rows: pa.Table) -> None:
        """Replace the rows of these units."""
        others = self._rows.filter(pc.invert(self._among(units))) if self._rows is not None else rows.slice(0, 0)
        self._rows = pa.concat_tables([others, rows]).combine_chunks()
        for unit in units:
            self._units.pop(unit, None)
            self._units[unit] = None
        self._forget(len(self._units) - UNITS - len(units))
        while self._rows.nbytes > _HOT_BYTES and len(self._units) > len(units):
            self._forget(min(1 + len(self._units) // 2, len(self._units) - len(units)))

    def _forget(self, count: int) -> None:
        """Forget the units that did not change for longest."""
        if count > 0 and self._rows is not None:
            oldest = list(self._units)[:count]
            self._rows = self._rows.filter(pc.invert(self._among(oldest))).combine_chunks()
            for unit in oldest:
                del self._units[unit]

    def _among(self, units: Sequence[object]) -> pa.ChunkedArray:
        assert self._rows is not None
        column = self._rows[self._column]
        return pc.is_in(column, value_set=pa.array(units, column.type))


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
        self._transactions: dict[str, int] = {}
        self._evicted: int | None = None

    @property
    def folded(self) -> bool:
        """Whether the table holds partial rows, to be folded on read."""
        return self.product.storage == "append"

    def outdated(self) -> str:
        """Why the table must be built again: its rows are not what is declared now. Empty if they are."""
        if not self._declaration or not self.table.exists():
            return ""
        found = self._open().metadata().configuration.get(names.PROPERTY_DECLARATION)
        return "" if found == self._declaration else "its declaration, or its source's, has changed"

    def delta(self) -> DeltaTable:
        """The writer's own handle, for care of the table between two batches; the table must exist."""
        return self._open()

    def mark(self) -> BatchMark | None:
        """The newest commit's mark; None if the table is absent or holds no batch yet."""
        if not self.table.exists():
            return None
        for info in self._open().history(limit=50):
            found = BatchMark.from_metadata(info)
            if found is not None:
                return found
        return None

    def holds(self, application: str, transaction: int) -> bool:
        """Whether the table has this transaction of the application, or a later one."""
        if application not in self._transactions:
            version = self._open().transaction_version(application) if self.table.exists() else None
            self._transactions[application] = -1 if version is None else version
        return self._transactions[application] >= transaction

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Merge one batch's partial rows and commit."""
        delta = self._ensure(partial.schema)
        if self.holds(mark.application, mark.transaction):
            return delta.version()
        partial = self._retained(self._prepared(partial), mark.clock)
        if self.folded or not partial.num_rows:
            self._write(partial if self.folded else self._empty(), mark, predicate=None, mode="append")
        else:
            units = pc.unique(partial[WINDOW_START]).to_pylist() if self.operator.unit else []
            merged = self.operator.merge(self._current(units), partial)
            self._write(merged, mark, predicate=self._predicate(units), mode="overwrite")
            if self.operator.unit:
                self._hot.put(units, merged)
        self._transactions[mark.application] = mark.transaction
        self._evict(mark.clock)
        return delta.version()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        """Put a batch build in place of all that the table holds, in one commit."""
        self._evolve(rows.schema)
        delta = self._ensure(rows.schema)
        partial = self._retained(self._prepared(rows), mark.clock)
        full = partial if self.folded or not partial.num_rows else self.operator.merge(None, partial)
        self._write(full if full.num_rows else self._empty(), mark, predicate=None, mode="overwrite", evolve=True)
        self._hot.clear()
        self._transactions[mark.application] = mark.transaction
        self._declare(delta)
        return delta.version()

    def results(self, rows: pa.Table, partial: pa.Table, clock: int | None) -> tuple[pa.Table, pa.Table]:
        """Result rows of the table, and those that a batch build gives at ``clock``, as far as both are certain.

        Args:
            rows: all rows of the table.
            partial: what the operator's SQL gave for all of bronze.
        """
        self.operator.describe(partial.schema)
        both = (self._retained(found, clock) for found in (plain(rows), self._prepared(partial)))
        live, again = (self.operator.merge(None, found) if found.num_rows else self._empty() for found in both)
        return live, again

    def _declare(self, delta: DeltaTable) -> None:
        """Set the table's properties, as the last step of a build: a crash before this builds it once more."""
        configuration = self._configuration()
        if any(delta.metadata().configuration.get(key) != value for key, value in configuration.items()):
            delta.alter.set_table_properties(configuration, raise_if_not_exists=False)

    def _prepared(self, partial: pa.Table) -> pa.Table:
        """What the operator merges, of what Spark gave."""
        rows = plain(partial)
        return self.operator.prepare(rows) if rows.num_rows else rows

    def horizon(self, clock: int | None) -> int | None:
        """What lies before this time may be gone: microseconds since the epoch; None: nothing is ever removed."""
        if clock is None or self.product.retention_ms is None:
            return None
        return clock - self.product.retention_ms * 1000

    def _retained(self, rows: pa.Table, clock: int | None) -> pa.Table:
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
        """Drop the table if its rows have another key or fold now: subscribers must begin again then."""
        self.operator.describe(schema)
        if not self.table.exists():
            return
        found, wanted = self._open().metadata().configuration, self._configuration()
        if any(
            found.get(key) != wanted.get(key) for key in (names.PROPERTY_KEY, names.PROPERTY_FOLD, names.PROPERTY_ORDER)
        ):
            remove_tree(self.table.path)
            self._delta = None
            self._hot.clear()
            self._transactions.clear()

    def _configuration(self) -> dict[str, str]:
        retention = f"interval {self.product.positions_ms} milliseconds"
        configuration = {
            names.PROPERTY_KEY: ",".join(self.operator.key),
            names.PROPERTY_PIPELINE: self._pipeline,
            names.PROPERTY_POSITIONS: str(self.product.positions_ms),
            "delta.checkpointInterval": "1000000",
            "delta.logRetentionDuration": retention,
            "delta.deletedFileRetentionDuration": retention,
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
        if self._delta is None and not self.table.exists():
            self.table.create(self._empty().schema, self._configuration())
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
        write_deltalake(
            self._open(),
            rows.cast(self.operator.schema),
            mode=mode,  # type: ignore[arg-type]
            predicate=predicate,
            schema_mode="overwrite" if evolve and not self._fits() else None,
            commit_properties=mark.commit_properties(),
            # Checkpoints and cleaning are maintenance's, outside the batch.
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
        )

    def _fits(self) -> bool:
        """Whether the table has the columns that the rows have now."""
        assert self.operator.schema is not None
        return bool(self._open().schema() == Schema.from_arrow(self.operator.schema))


class EventStore(ProductStore):
    """The one writer of a table of single events: each commit adds its events, and now and then the oldest leave."""

    operator: EventRows
    _rows = -1  # of the table; -1: not counted yet

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Add a batch's events and commit; see :meth:`ProductStore.apply`. Each event is in some version."""
        delta = self._ensure(partial.schema)
        if self.holds(mark.application, mark.transaction):
            return delta.version()
        self._write(plain(partial), mark, predicate=None, mode="append")
        self._transactions[mark.application] = mark.transaction
        self._rows = delta.to_pyarrow_dataset().count_rows() if self._rows < 0 else self._rows + partial.num_rows
        if self._rows > self.product.newest * _SPARE:
            self._leave(delta)
        return delta.version()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        self._rows = -1
        return super().replace(rows, mark)

    def _leave(self, delta: DeltaTable) -> None:
        """Remove the oldest events, in a commit of its own."""
        arrived = delta.to_pyarrow_dataset().to_table(columns=[ARRIVED])[ARRIVED]
        oldest = self.operator.oldest(arrived).cast(TIMESTAMP).value
        place = f"{ARRIVED} < arrow_cast({oldest}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
        delta.delete(place, commit_properties=CommitProperties(max_commit_retries=0))
        self._rows = delta.to_pyarrow_dataset().count_rows()
