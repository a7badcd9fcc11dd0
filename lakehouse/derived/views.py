"""Views: a small table that is what its SQL gives over the newest version of another product.

A view has no state of its own. It is computed anew and compared with the table, and what differs is committed with the
version of its base. So a repeated computation commits nothing, one that a crash cut off is done again, and subscribers
get only rows whose values changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from urllib.parse import unquote

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import DeltaError
from sqlglot import exp

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import Commit, DeltaLog, LogFollower, TableGone, TableUnreadable
from lakehouse.contract.errors import QueryRefused, crash_point
from lakehouse.contract.lake import CommitFacts, Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, View
from lakehouse.contract.rows import Fold, names_in
from lakehouse.contract.sql import locked_connection
from lakehouse.contract.sql.spark import (
    VIEW_FUNCTIONS,
    check_functions,
    check_relations,
    grouped,
    outputs,
    parse_query,
)
from lakehouse.contract.storage import parquet_file, remove_tree
from lakehouse.errors import QueryError

log = logging.getLogger(__name__)

COMMIT_BASE = "millrace.base"  # JSON [table id, version] of the base, in a view's commitInfo
PROPERTY_VIEW = "millrace.view"  # of which declaration the table is
KEPT = {
    names.PROPERTY_POSITIONS: "21600000",
    "delta.checkpointInterval": "1000000",
    "delta.logRetentionDuration": "interval 6 hours",
    "delta.deletedFileRetentionDuration": "interval 6 hours",
}
"""Properties of tables that are derived here: how long a subscriber's position lives."""
_MAX_SQL = 1_000_000  # bytes; of a pipeline's file, which is trusted. Queries of the run time were checked when added.
_MEMORY_MB = 512
_LIMIT_S = 10.0


class Follower:
    """A product's rows, one version after the other, from its log: only the files that a commit adds are read.

    Attributes:
        version: at which it stands, as all of these; -1 before :meth:`open`.
        table_id: of the Delta metadata: another one is another table.
        schema: of the rows as stored.
        facts: what commits since the last :meth:`take_facts` say of their events; ``newest_at`` never goes back.
    """

    def __init__(self, table: TableRef, max_rows: int) -> None:
        self.table = table
        self.version = -1
        self.table_id = ""
        self.key: tuple[str, ...] = ()
        self.schema: pa.Schema = pa.schema([])
        self.facts = CommitFacts(0)
        self._max_rows = max_rows
        self._follower = LogFollower(table.path)
        self._fold: Fold | None = None
        self._files: dict[str, pa.Table] = {}
        self._count = 0
        self._result: pa.Table | None = None

    def open(self, version: int | None = None) -> None:
        """Stand at a version, the newest by default. Raises QueryError: it cannot be read, or has too many rows."""
        try:
            self._follower.open()  # first: a table that replaces this one from now on is noticed
            delta = DeltaTable(str(self.table.path), version=version)
            metadata = delta.metadata()
            if metadata.partition_columns:
                raise QueryError(self.table.name, "a partitioned table cannot be looked at")
            self.table_id, self.version = str(metadata.id), delta.version()
            self.key = names_in(metadata.configuration.get(names.PROPERTY_KEY))
            self._fold = Fold.from_properties(metadata.configuration)
            self.schema = pa.schema(delta.schema().to_arrow())
            self._files, self._count = {}, 0
            self._result = None
            for path in pa.table(delta.get_add_actions(flatten=True))["path"].to_pylist():
                self._read(path)
            for info in reversed(delta.history(limit=50)):
                if int(info.get("version", 0)) <= self.version:
                    self.facts = CommitFacts.of(self.table.name, Commit(self.version, (), (), info)).after(self.facts)
            self.take_facts()
        except (DeltaError, OSError, ValueError, TableUnreadable) as error:
            raise QueryError(self.table.name, f"it cannot be read: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        self._follower.close()

    def replaced(self) -> bool:
        """Whether the table was dropped, or built again under its name."""
        try:
            self._follower.check()
        except TableGone:
            return True
        return False

    def lost(self) -> bool:
        """Whether the next version's commit is gone although there is a later one."""
        try:
            self._follower.check_gap(self.version + 1)
        except TableGone:
            return True
        return False

    def step(self) -> bool:
        """Go to the next version; False if there is none yet. Raises QueryError.

        If files of that version were removed meanwhile, go to the newest.
        """
        try:
            if (commit := self._follower.look(self.version + 1)) is None:
                return False
            facts = CommitFacts.of(self.table.name, commit)
        except (TableGone, ValueError):  # replaced, which the next turn finds; or not written to its end
            return False
        except TableUnreadable as error:
            raise QueryError(self.table.name, error.problem, error.remedy) from None
        removed = [file.path for file in commit.removed]
        if commit.metadata or (removed and (self._fold or not self._files.keys() >= set(removed))):
            self._open_at(self.version + 1)
            return True
        for path in removed:
            self._count -= self._files.pop(path).num_rows
        try:
            for file in commit.added:
                self._read(file.path)
        except FileNotFoundError:  # vacuumed meanwhile
            self._open_at(None)
            return True
        self.facts = facts.after(self.facts)
        if commit.added or removed:
            self._result = None
        self.version += 1
        return True

    def rows(self) -> pa.Table:
        """The rows at this version, partials folded."""
        if self._result is None:
            tables = [table for table in self._files.values() if table.num_rows]
            found = pa.concat_tables(tables) if tables else self.schema.empty_table()
            if self._fold is not None:
                found = self._fold.arrow(found)
                self._files = dict.fromkeys(self._files, self.schema.empty_table())
                self._files[""] = found  # what they fold to, so that the next version folds only what it adds
                self._count = found.num_rows
            self._result = found
        return self._result

    def take_facts(self) -> dict[str, str]:
        """The facts as keys of a derived table's commit; events are counted anew."""
        found, self.facts = self.facts.keys(), replace(self.facts, events=0, oldest_at=None)
        return found

    def _open_at(self, version: int | None) -> None:
        before = self.facts
        self.open(version)
        self.facts = self.facts.after(replace(before, events=0, oldest_at=None))

    def _read(self, path: str) -> None:
        rows = parquet_file(self.table.path / unquote(path)).read()
        columns = [
            rows[field.name].cast(field.type) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
            for field in self.schema
        ]
        self._files[path] = pa.table(columns, schema=self.schema)
        self._count += rows.num_rows
        if self._count > self._max_rows:
            raise QueryError(
                self.table.name,
                f"it has more than {self._max_rows:,} rows, too many to be looked at again and again",
                "Derive a smaller product, or raise queries.max_base_rows",
            )


class ViewEngine:
    """SQL over a product's rows: DuckDB over Arrow, a few milliseconds where a Spark job would take a hundred.

    It is of one thread, and has little memory and little time.
    """

    def __init__(self) -> None:
        self._connection = locked_connection(memory_mb=_MEMORY_MB)

    def close(self) -> None:
        self._connection.close()

    def query(self, name: str, tree: exp.Expr, relation: str, rows: pa.Table) -> pa.Table:
        """The result of a checked query over ``rows``, which it calls ``relation``.

        Returns:
            Plain columns: integers and decimals of whole numbers as int64, times in microseconds UTC.

        Raises:
            QueryError: it fails, takes too long, or gives a value or a type that no table has.
        """
        timer = threading.Timer(_LIMIT_S, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            self._connection.register(relation, rows)
            found = pa.table(self._connection.sql(tree.sql(dialect="duckdb")).to_arrow_table())
        except duckdb.InterruptException:
            raise QueryError(name, f"it takes more than {_LIMIT_S:.0f} s", "Make it cheaper") from None
        except duckdb.Error as error:
            raise QueryError(name, str(error).strip().splitlines()[0]) from None
        finally:
            timer.cancel()
            self._connection.unregister(relation)
        try:
            return found.cast(pa.schema([(field.name, _plain(name, field)) for field in found.schema]))
        except pa.ArrowInvalid as error:
            raise QueryError(name, f"a value does not fit its column: {error}") from None


def _plain(name: str, field: pa.Field) -> pa.DataType:
    """The type that a Delta table and a subscriber have. Raises QueryError: there is none."""
    kind = field.type
    if pa.types.is_decimal(kind) and kind.scale == 0:  # the sum of integers
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    if pa.types.is_unsigned_integer(kind) or pa.types.is_integer(kind):
        return kind if pa.types.is_signed_integer(kind) else pa.int64()
    if pa.types.is_large_string(kind) or pa.types.is_dictionary(kind) or pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_time(kind) or pa.types.is_duration(kind) or pa.types.is_interval(kind):
        raise QueryError(name, f"column {field.name!r} is an interval or a time of day", "Give a timestamp or a number")
    return kind


class ViewKeeper:
    """The one writer of a view's table. Raises QueryError: the SQL may not be a view's, or has too many columns."""

    def __init__(self, view: View, table: TableRef, owner: str, *, max_rows: int, max_columns: int) -> None:
        self.view = view
        self.table = table
        self._owner = owner
        self._max_rows = max_rows
        try:
            self._tree = parse_query(view.sql, max_bytes=_MAX_SQL)
            check_relations(self._tree, [view.base])
            check_functions(self._tree, VIEW_FUNCTIONS)
            outputs(self._tree, limit=max_columns)
        except QueryRefused as refused:
            raise QueryError(view.name, refused.problem, refused.remedy) from None
        self.key = view.key or grouped(self._tree)
        if not self.key:
            raise QueryError(view.name, "which columns name one row?", 'Add key = ["…"]')
        declared = json.dumps([view.base, view.sql, self.key])
        self._declaration = hashlib.blake2b(declared.encode(), digest_size=16).hexdigest()
        self.delta: DeltaTable | None = None  # as it was last written
        self._rows: pa.Table | None = None
        self._through = ""

    def compute(self, base: Follower, engine: ViewEngine) -> pa.Table:
        """The view's rows over the base as it stands, in order of the key. Raises QueryError."""
        rows = engine.query(self.view.name, self._tree, self.view.base, base.rows())
        if rows.num_rows > self._max_rows:
            raise QueryError(
                self.view.name,
                f"it has {rows.num_rows:,} rows, and a view may have {self._max_rows:,}",
                "Aggregate or filter more, make it a product of the source, or raise queries.max_view_rows",
            )
        missing = [column for column in self.key if column not in rows.schema.names]
        if missing:
            raise QueryError(
                self.view.name, f"it gives no column {missing[0]!r}", f"Columns: {', '.join(rows.schema.names)}"
            )
        if len(rows.schema.names) != len(set(rows.schema.names)):
            raise QueryError(self.view.name, "two of its columns have one name", "Give one another name")
        if rows.num_rows != rows.group_by(list(self.key)).aggregate([]).num_rows:
            raise QueryError(self.view.name, f"several rows have one {', '.join(self.key)}", "Add a column to the key")
        return rows.sort_by([(column, "ascending") for column in self.key])

    def refresh(self, base: Follower, engine: ViewEngine) -> bool:
        """Bring the table to the base's version; False where nothing had to be committed. Raises QueryError."""
        rows = self.compute(base, engine)
        try:
            return self._commit(rows, base)
        except (DeltaError, OSError) as error:
            log.warning("view %s is written once more: %s", self.view.name, str(error).splitlines()[0])
        self.delta = self._rows = None  # what it knew of the table may be out of date
        try:
            return self._commit(rows, base)
        except (DeltaError, OSError) as error:
            self.delta = self._rows = None
            raise QueryError(self.view.name, f"its table cannot be written: {str(error).splitlines()[0]}") from None

    def _commit(self, rows: pa.Table, base: Follower) -> bool:
        facts = base.facts.keys().get(names.COMMIT_THROUGH, "")
        delta = self._ensure(rows.schema)
        same = self._rows is not None and rows.equals(self._rows)
        if same and facts == self._through:
            return False
        properties = CommitProperties(
            custom_metadata={**base.take_facts(), COMMIT_BASE: json.dumps([base.table_id, base.version])},
            app_transactions=[Transaction(f"view-{base.table_id}", base.version)],
            max_commit_retries=0,
        )
        crash_point("view.before_commit")
        if same:  # only the word goes out that the events so far change nothing
            write_deltalake(delta, rows.schema.empty_table(), mode="append", commit_properties=properties)
        else:
            write_deltalake(delta, rows, mode="overwrite", commit_properties=properties)
        self._rows, self._through = rows, facts
        return True

    def _ensure(self, schema: pa.Schema) -> DeltaTable:
        """The table, made anew where it is another view's, with what it holds read once."""
        if self.delta is not None and self._rows is not None and self._rows.schema.equals(schema):
            return self.delta
        if self.table.exists():
            delta = DeltaTable(str(self.table.path))
            declared = delta.metadata().configuration.get(PROPERTY_VIEW)
            if declared == self._declaration and delta.schema() == Schema.from_arrow(schema):
                self._rows = delta.to_pyarrow_table().cast(schema).sort_by([(c, "ascending") for c in self.key])
                self._through = str(DeltaLog(self.table.path).newest_info(names.COMMIT_THROUGH) or "")
                self.delta = delta
                return delta
            log.info("view %s is declared otherwise than its table: it is made anew", self.view.name)
            remove_tree(self.table.path)
        self.table.create(
            schema,
            {
                names.PROPERTY_KEY: ",".join(self.key),
                names.PROPERTY_PIPELINE: self._owner,
                PROPERTY_VIEW: self._declaration,
                **KEPT,
            },
        )
        self.delta = DeltaTable(str(self.table.path))
        self._rows = None
        return self.delta


def proofs(lake: Lake, pipeline: Pipeline) -> Iterator[tuple[str, int, int, pa.Table, pa.Table]]:
    """Each view's table and what its SQL gives over the base version that its newest commit names.

    Yields:
        name, version, base version, rows of the table, rows computed again: the base itself is proven by a replay.
    """
    for view in pipeline.views.values():
        table = lake.table(view.layer, view.name)
        base = next((t for t in lake.tables() if t.name == view.base), None)
        if not table.exists() or base is None:
            continue
        delta = DeltaTable(str(table.path))
        found = DeltaLog(table.path).newest_info(COMMIT_BASE)
        if found is None:
            continue
        keeper = ViewKeeper(view, table, pipeline.name, max_rows=10**9, max_columns=10**4)
        with closing(Follower(base, max_rows=10**9)) as follower, closing(ViewEngine()) as engine:
            follower.open(json.loads(found)[1])
            rows = keeper.compute(follower, engine)
        yield view.name, delta.version(), follower.version, delta.to_pyarrow_table(), rows
