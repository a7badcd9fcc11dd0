"""A product's Delta table: merge a batch's partial results into it, exactly once.

Each commit names its position in bronze as an app transaction, so a repeated batch is noticed and skipped. Its metadata
says how far in Kafka and in bronze it reaches (:mod:`lakehouse.gold.mark`). The table is the state: nothing else has to
be stored, and nothing can disagree with it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from itertools import islice
from typing import Any

import orjson
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
from lakehouse.gold.mark import BatchMark
from lakehouse.operators.base import TIMESTAMP, WINDOW_START, Operator, plain
from lakehouse.operators.registry import operator_of
from lakehouse.operators.rows import ARRIVED, EventRows, Latest

_SPARE = 1.25  # times the events to keep, before the oldest leave
_HOT_BYTES = 32 << 20  # of rows in memory; others are read from the table when they change
_STATS_TEXT = 64  # characters: bounds of longer texts are left out


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

    def holds(self, mark: BatchMark) -> bool:
        """Whether the table has the commit of this mark, or a later one of the application."""
        if mark.application not in self._transactions:
            version = self._open().transaction_version(mark.application) if self.table.exists() else None
            self._transactions[mark.application] = -1 if version is None else version
        return self._transactions[mark.application] >= mark.transaction

    def apply(self, partial: pa.Table, mark: BatchMark) -> int:
        """Merge a batch's partial rows and commit, unless the table has them; returns the newest version."""
        self._ensure(partial.schema)
        if not self.holds(mark):
            self._look()
            self._take(partial, mark)
        return self._newest()

    def _take(self, partial: pa.Table, mark: BatchMark) -> None:
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
    """The one writer of a table of single events: each commit adds its events, and now and then the oldest leave.

    Each event is in some version.
    """

    operator: EventRows
    _rows = -1  # of the table; -1: not counted yet

    def _take(self, partial: pa.Table, mark: BatchMark) -> None:
        if self._rows < 0:
            self._rows = self._open().to_pyarrow_dataset().count_rows()
        self._commit([plain(partial)], [], mark)
        self._rows += partial.num_rows
        if self._rows > self.product.newest * _SPARE:
            delta = self.delta()
            arrived = delta.to_pyarrow_dataset().to_table(columns=[ARRIVED])[ARRIVED]
            self._delete(f"{ARRIVED} <", self.operator.oldest(arrived).cast(TIMESTAMP).value)
            self._rows = delta.to_pyarrow_dataset().count_rows()

    def replace(self, rows: pa.Table, mark: BatchMark) -> int:
        self._rows = -1
        return super().replace(rows, mark)


class DataFiles:
    """The data files of a product's table, and the windows in them.

    The rows of those that were used last stay in memory, since the next batch mostly changes the same ones.

    Args:
        read: the rows of a file.
    """

    def __init__(self, read: Callable[[AddedFile], pa.Table]) -> None:
        self._read = read
        self._files: dict[str, _DataFile] = {}
        self._rows: dict[str, pa.Table] = {}  # the one that was used last at the end
        self._bytes = 0

    def load(self, delta: DeltaTable) -> None:
        """Take the files of a table's version in place of all that is known."""
        self.replace(self.all(), [])
        for add in pa.table(delta.get_add_actions(flatten=True)).to_pylist():
            first, last = (add.get(f"{side}.{WINDOW_START}") for side in ("min", "max"))
            if isinstance(last, datetime):
                last += timedelta(milliseconds=1)  # delta-rs cuts microseconds off
            known = add.get(f"null_count.{WINDOW_START}") == 0 and isinstance(first, date) and isinstance(last, date)
            file = AddedFile(add["path"], {}, True, int(add["size_bytes"]))
            self._files[file.path] = _DataFile(file, (first, last) if known else None)

    def all(self) -> list[AddedFile]:
        return [held.file for held in self._files.values()]

    def replace(self, old: Iterable[AddedFile], new: Iterable[tuple[AddedFile, pa.Table]]) -> None:
        """A commit's files and their rows in place of others."""
        for file in old:
            del self._files[file.path]
            self._forget(file.path)
        for file, rows in new:
            self._files[file.path] = _DataFile(file, _span(rows))
            self._remember(file.path, rows)

    def holding(self, units: pa.Array | None) -> Iterator[tuple[AddedFile, pa.Table, pa.Table]]:
        """Each file with rows of these units: its rows of them, and its others; None: of all units."""
        values = [] if units is None else units.to_pylist()
        for held in list(self._files.values()):
            if units is not None and held.span is not None and not any(_within(value, held.span) for value in values):
                continue
            rows = self._forget(held.file.path)
            rows = self._read(held.file) if rows is None else rows
            self._remember(held.file.path, rows)
            among = pa.repeat(True, rows.num_rows) if units is None else pc.is_in(rows[WINDOW_START], value_set=units)
            if pc.any(among).as_py():
                yield held.file, rows.filter(among), rows.filter(pc.invert(among))

    def _remember(self, path: str, rows: pa.Table) -> None:
        self._rows[path] = rows
        self._bytes += rows.nbytes
        while self._bytes > _HOT_BYTES:
            self._forget(next(iter(self._rows)))

    def _forget(self, path: str) -> pa.Table | None:
        rows = self._rows.pop(path, None)
        self._bytes -= 0 if rows is None else rows.nbytes
        return rows


@dataclass(frozen=True, slots=True)
class _DataFile:
    """A data file, and the first and the last window in it; None: not known, or not of times alone."""

    file: AddedFile
    span: tuple[Any, Any] | None


def _span(rows: pa.Table) -> tuple[Any, Any] | None:
    if WINDOW_START not in rows.schema.names or not pa.types.is_temporal(rows[WINDOW_START].type):
        return None
    found = pc.min_max(rows[WINDOW_START], skip_nulls=False).as_py()
    return None if found["min"] is None else (found["min"], found["max"])


def _within(value: Any, span: tuple[Any, Any]) -> bool:
    return value is not None and span[0] <= value <= span[1]


def stats_of(rows: pa.Table) -> str:
    """What the log says of a data file with these rows: bounds of times, dates, whole numbers and short texts."""
    least, most, nulls = {}, {}, {}
    for name in rows.schema.names:
        kind = rows[name].type
        bounded = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_integer, pa.types.is_string)
        if any(each(kind) for each in bounded):
            nulls[name] = rows[name].null_count
            with suppress(ValueError, OverflowError):  # years that Python does not have
                bounds = pc.min_max(rows[name]).as_py()
                if bounds["min"] is not None and not (pa.types.is_string(kind) and len(bounds["max"]) > _STATS_TEXT):
                    least[name], most[name] = _millis(bounds["min"], 0), _millis(bounds["max"], 999)
    found = {"numRecords": rows.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}
    return orjson.dumps(found).decode()


def _millis(value: object, more: int) -> object:
    """A time as readers of stats know it, in milliseconds; other values as they are."""
    if not isinstance(value, datetime):
        return value
    return f"{(value + timedelta(microseconds=more)).replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
