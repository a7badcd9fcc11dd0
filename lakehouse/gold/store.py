"""A product's Delta table: merge a batch's partial results into it, exactly once.

Each commit names its position in bronze as an app transaction, so a repeated batch is noticed and skipped. Its metadata
says how far in Kafka and in bronze it reaches (:mod:`lakehouse.gold.mark`). The table is the state: nothing else has to
be stored, and nothing can disagree with it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, write_deltalake

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import AddedFile, DeltaLog, TableGone
from lakehouse.contract.lake import TableRef
from lakehouse.contract.pipeline import Product
from lakehouse.contract.pipeline.product import SKETCHES, sketch_property
from lakehouse.contract.storage import parquet_file, remove_tree, write_parquet
from lakehouse.errors import TableBusy
from lakehouse.gold.files import DataFiles, stats_of
from lakehouse.gold.mark import BatchMark
from lakehouse.operators.base import TIMESTAMP, WINDOW_START, Operator, plain
from lakehouse.operators.registry import operator_of
from lakehouse.operators.rows import ARRIVED, EventRows, Latest

_SPARE = 1.25  # times the events to keep, before the oldest leave


class ProductStore:
    """The one writer of a product's table."""

    def __init__(self, product: Product, table: TableRef, pipeline: str, declaration: str = "") -> None:
        self.product = product
        self.table = table
        self.operator: Operator = operator_of(product)
        self._pipeline = pipeline
        self._declaration = declaration
        self._log = DeltaLog(table.path)
        self._delta: DeltaTable | None = None
        self._version = -1  # that _files is of
        self._files = DataFiles(self._rows_of)
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
        """The newest version by delta-rs, for care of the table between two batches; the table must exist."""
        delta = self._open()
        delta.update_incremental()
        return delta

    def mark(self) -> BatchMark | None:
        """The newest commit's mark; None if the table is absent or holds no batch yet."""
        if not self.table.exists():
            return None
        for _, info in islice(self._log.infos(newest_first=True), 50):
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
        self._ensure(partial.schema)
        if self.holds(mark.application, mark.transaction):
            return self._newest()
        self._look()
        partial = self._retained(self._prepared(partial), mark.clock)
        if self.folded or not partial.num_rows:
            self._commit([partial], [], mark)
        else:
            units = pc.unique(partial[WINDOW_START]) if self.operator.unit else None
            found = list(self._files.holding(units))
            held = pa.concat_tables([rows for _, rows, _ in found]) if found else None
            others = [rest for _, _, rest in found if rest.num_rows]
            merged = self.operator.merge(held, partial)
            # What does not change now is in a file of its own, which later batches leave alone.
            rest = [pa.concat_tables(others)] if others else []
            old = [file for file, _, _ in found]
            self._files.replace(old, self._commit([merged, *rest], old, mark))
        self._evict(mark.clock)
        return self._newest()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        """Put a batch build in place of all that the table holds, in one commit."""
        self._evolve(rows.schema)
        self._ensure(rows.schema)
        partial = self._retained(self._prepared(rows), mark.clock)
        full = partial if self.folded or not partial.num_rows else self.operator.merge(None, partial)
        self._overwrite(full if full.num_rows else self._empty(), mark)
        self._transactions[mark.application] = mark.transaction
        self._declare()
        return self._newest()

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

    def _declare(self) -> None:
        """Set the table's properties, as the last step of a build: a crash before this builds it once more."""
        configuration, delta = self._configuration(), self.delta()
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
        if self.delta().to_pyarrow_dataset().count_rows(filter=pc.field(WINDOW_START) <= pa.scalar(horizon, TIMESTAMP)):
            self._delete(f"{WINDOW_START} <=", horizon)

    def _delete(self, compared: str, time: int) -> None:
        """Remove the rows that compare so with a time (microseconds since the epoch), in a commit of its own."""
        place = f"{compared} arrow_cast({time}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
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
            self._delta, self._version = None, -1
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

    def _ensure(self, schema: pa.Schema) -> None:
        self.operator.describe(schema)
        if self._delta is None and not self.table.exists():
            self.table.create(self._empty().schema, self._configuration())

    def _open(self) -> DeltaTable:
        """The table by delta-rs, as it was when it was opened or delta-rs last committed to it."""
        if self._delta is None:
            self._delta = self._log.opened_to_append()
        return self._delta

    def _newest(self) -> int:
        return max(self._version, self._open().version())

    def _look(self) -> None:
        """Learn which files there are, if delta-rs has committed since the store's own last commit."""
        if (delta := self._open()).version() > self._version:
            self._load(delta)
            self._version = delta.version()

    def _load(self, delta: DeltaTable) -> None:
        self._files.load(delta)

    def _fits(self) -> bool:
        """Whether the table has the columns that the rows have now."""
        assert self.operator.schema is not None
        return bool(self._open().schema() == Schema.from_arrow(self.operator.schema))

    def _empty(self) -> pa.Table:
        assert self.operator.schema is not None
        return self.operator.schema.empty_table()

    def _rows_of(self, file: AddedFile) -> pa.Table:
        assert self.operator.schema is not None
        found = parquet_file(file.located(self.table.path)).read()
        return found.select(self.operator.schema.names).cast(self.operator.schema)

    def _added(self, rows: pa.Table) -> AddedFile:
        """A new data file with these rows."""
        name = f"part-{uuid.uuid4()}.zstd.parquet"
        size = write_parquet(self.table.path / name, rows, compression="zstd")
        return AddedFile(name, {}, True, size, stats_of(rows))

    def _commit(
        self, tables: Sequence[pa.Table], old: Sequence[AddedFile], mark: BatchMark
    ) -> list[tuple[AddedFile, pa.Table]]:
        """Commit a file for each of these tables that has rows, in place of other files; returns the files."""
        rows = [table.cast(self.operator.schema) for table in tables if table.num_rows]
        new = [(self._added(each), each) for each in rows]
        self._commit_files([file for file, _ in new], old, mark)
        return new

    def _commit_files(self, added: Sequence[AddedFile], removed: Sequence[AddedFile], mark: BatchMark) -> None:
        """Commit files as such.

        Raises:
            TableBusy: there is another writer, since a commit is there that this one does not know.
            TableGone: the table was dropped.
        """
        done = (mark.application, mark.transaction)
        info = mark.to_metadata()
        if not self._log.append(self._version + 1, added=added, removed=removed, info=info, transaction=done):
            if not self._log.has(self._version):
                raise TableGone(self.table.name, f"the log has no version {self._version}")
            raise TableBusy(self.table.name, self.table.path)
        self._version += 1
        self._transactions[mark.application] = mark.transaction

    def _overwrite(self, rows: pa.Table, mark: BatchMark) -> None:
        """Put rows in place of all that there are, in the columns that the operator has now."""
        delta = self.delta()
        write_deltalake(
            delta,
            rows.cast(self.operator.schema),
            mode="overwrite",
            schema_mode=None if self._fits() else "overwrite",
            commit_properties=mark.commit_properties(),
            # Checkpoints and cleaning are maintenance's, outside the batch.
            post_commithook_properties=PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False),
        )


class EventStore(ProductStore):
    """The one writer of a table of single events: each commit adds its events, and now and then the oldest leave."""

    operator: EventRows
    _rows = -1  # of the table; -1: not counted yet

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Add a batch's events and commit; see :meth:`ProductStore.apply`. Each event is in some version."""
        self._ensure(partial.schema)
        if self.holds(mark.application, mark.transaction):
            return self._newest()
        self._look()
        if self._rows < 0:
            self._rows = self._open().to_pyarrow_dataset().count_rows()
        self._commit([plain(partial)], [], mark)
        self._rows += partial.num_rows
        if self._rows > self.product.newest * _SPARE:
            self._leave()
        return self._newest()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        self._rows = -1
        return super().replace(rows, mark)

    def _leave(self) -> None:
        """Remove the oldest events, in a commit of its own."""
        delta = self.delta()
        arrived = delta.to_pyarrow_dataset().to_table(columns=[ARRIVED])[ARRIVED]
        oldest = self.operator.oldest(arrived).cast(TIMESTAMP).value
        self._delete(f"{ARRIVED} <", oldest)
        self._rows = delta.to_pyarrow_dataset().count_rows()
