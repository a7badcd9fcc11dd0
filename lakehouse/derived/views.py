"""Views: a small table that is what its SQL gives over the newest version of another product.

A view has no state of its own: it is computed anew and compared with the table, and what differs is committed, together
with the version of the base that it was computed from. So a repeated computation commits nothing, and one that a crash
cut off is done again; subscribers get only rows whose values changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing

import duckdb
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError
from sqlglot import exp

from lakehouse.contract import lake as names
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.errors import QueryRefused, crash_point
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.pipeline import Pipeline, View
from lakehouse.contract.sql import locked_connection
from lakehouse.contract.sql.spark import (
    VIEW_FUNCTIONS,
    check_functions,
    check_relations,
    grouped,
    outputs,
    parse_query,
    to_duckdb,
)
from lakehouse.contract.storage import remove_tree
from lakehouse.derived.follow import Follower
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


class ViewEngine:
    """SQL over a product's rows: DuckDB over Arrow, a few milliseconds where a Spark job would take a hundred.

    One connection, for one thread, with little memory and little time.
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
            QueryError: it fails, takes too long, or gives a type that no table has.
        """
        timer = threading.Timer(_LIMIT_S, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            self._connection.register(relation, rows)
            found = pa.table(self._connection.sql(to_duckdb(tree)).to_arrow_table())
        except duckdb.InterruptException:
            raise QueryError(name, f"it takes more than {_LIMIT_S:.0f} s", "Make it cheaper") from None
        except duckdb.Error as error:
            raise QueryError(name, str(error).strip().splitlines()[0]) from None
        finally:
            timer.cancel()
            self._connection.unregister(relation)
        return plain(name, found)


def plain(name: str, rows: pa.Table) -> pa.Table:
    """The same rows in types that a Delta table and a subscriber have. Raises QueryError: there is no such type."""
    schema = pa.schema([pa.field(field.name, _plain(name, field)) for field in rows.schema])
    try:
        return rows.cast(schema)
    except pa.ArrowInvalid as error:
        raise QueryError(name, f"a value does not fit its column: {error}") from None


def _plain(name: str, field: pa.Field) -> pa.DataType:
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
    """The one writer of a view's table.

    Args:
        max_rows, max_columns: more make it fail.

    Raises:
        QueryError: the SQL may not be a view's.
    """

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
        self._delta: DeltaTable | None = None
        self._rows: pa.Table | None = None
        self._through = ""

    def compute(self, base: Follower, engine: ViewEngine) -> pa.Table:
        """The view's rows over the base as it stands, in order of the key.

        Raises:
            QueryError: it fails, has too many rows, or two rows with one key.
        """
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
        """Bring the table to the base's version; False where nothing had to be committed.

        Raises:
            QueryError: see :meth:`compute`, or the table cannot be written.
        """
        rows = self.compute(base, engine)
        try:
            return self._commit(rows, base)
        except (DeltaError, OSError) as error:
            log.warning("view %s is written once more: %s", self.view.name, str(error).splitlines()[0])
        self._delta = self._rows = None  # what it knew of the table may be out of date
        try:
            return self._commit(rows, base)
        except (DeltaError, OSError) as error:
            self._delta = self._rows = None
            raise QueryError(self.view.name, f"its table cannot be written: {str(error).splitlines()[0]}") from None

    def sweep(self) -> None:
        """Delete files that no position needs; between two refreshes, by their own thread."""
        if self._delta is not None:
            sweep(self._delta)

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
        if self._delta is not None and self._rows is not None and self._rows.schema.equals(schema):
            return self._delta
        if self.table.exists():
            delta = DeltaTable(str(self.table.path))
            found = pa.schema(delta.schema().to_arrow())
            if delta.metadata().configuration.get(PROPERTY_VIEW) == self._declaration and _same(found, schema):
                self._rows = delta.to_pyarrow_table().cast(schema).sort_by([(c, "ascending") for c in self.key])
                self._through = str(DeltaLog(self.table.path).newest_info(names.COMMIT_THROUGH) or "")
                self._delta = delta
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
        self._delta = DeltaTable(str(self.table.path))
        self._rows = None
        return self._delta


def proofs(lake: Lake, pipeline: Pipeline) -> Iterator[tuple[str, int, int, pa.Table, pa.Table]]:
    """Each view's table and what its SQL gives over the base version that its newest commit names.

    Yields:
        name, version, base version, rows of the table, rows computed again: the base itself is proven by a replay.
    """
    engine = ViewEngine()
    try:
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
            with closing(Follower(base, max_rows=10**9)) as follower:
                follower.open(json.loads(found)[1])
                rows = keeper.compute(follower, engine)
            yield view.name, delta.version(), follower.version, delta.to_pyarrow_table(), rows
    finally:
        engine.close()


def sweep(delta: DeltaTable) -> None:
    """Vacuum a table by its own writer's handle, where there is something to remove."""
    if delta.vacuum(dry_run=True):
        delta.vacuum(dry_run=False)
        delta.update_incremental()


def _same(one: pa.Schema, other: pa.Schema) -> bool:
    """Whether columns are alike, nullability and the spelling of UTC apart."""
    return [(f.name, str(f.type).replace("large_", "")) for f in one] == [
        (f.name, str(f.type).replace("large_", "")) for f in other
    ]
