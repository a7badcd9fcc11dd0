"""A table's current rows in memory: read from its files, and brought forward commit by commit.

There are two kinds of table. In one, each key occurs once and a commit replaces files: keys of removed files that no
added file holds are gone. In the other (``millrace.fold``) rows are partials of a key, and a commit adds partials to be
folded. Some changes cannot be told from the commit alone: files removed from a table of partials, unknown files,
another schema. Then the state is loaded again and compared.
"""

from __future__ import annotations

import errno
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from lakehouse.contract.deltalog import AddedFile, Commit, DeltaLog, TableGone, TableUnreadable, kept_ms
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, CommitFacts
from lakehouse.contract.rows import Fold, Key, Row, names_in
from lakehouse.contract.storage import LakePath, is_away, parquet_file
from serve.core.messages import is_binary, rows_of
from serve.core.model import TableChange, TableInfo, in_order
from serve.core.position import WHOLE, Position
from serve.errors import PositionExpired, SqlError

_FACTS_BACK = 200  # commits searched backwards for the last `through`
_VERSION = re.compile(r"\d{1,18}")
_SAME_SUM = 1e-12  # float sums in another order may differ by this much


@dataclass(slots=True)
class TableState:
    """The rows at one version."""

    table: TableInfo
    version: int
    facts: CommitFacts  # of the last commit; `through` and `newest_at` are the last ones known
    rows: dict[Key, Row]
    files: dict[str, frozenset[Key]] = field(default_factory=dict)  # keys of each live file; none of partials

    def position(self, view: bytes = WHOLE) -> Position:
        """Position of a subscriber that has everything of a view."""
        return Position(self.table.table_id, self.version, 0, view)

    def apply(self, step: StateStep) -> TableChange:
        """Move to the step's version; returns what changed."""
        was = None if step.table.columns == self.table.columns else self.table
        self.table, self.version = step.table, step.version
        self.facts = carried(self.facts, step.facts)
        before = {key: self.rows[key] for key in step.upserts if key in self.rows}
        for key in step.deletes:
            before[key] = self.rows.pop(key)
        self.rows.update(step.upserts)
        for path in step.files_removed:
            self.files.pop(path, None)
        self.files.update(step.files_added)
        keys = tuple(sorted(step.upserts, key=in_order))
        return TableChange(
            step.table,
            step.version,
            tuple([step.upserts[key] for key in keys]),
            tuple(sorted(step.deletes, key=in_order)),
            replace(step.facts, through=self.facts.through),
            before,
            was,
            keys=keys,
        )


@dataclass(frozen=True, slots=True)
class StateStep:
    """The effect of one commit on a state: prepared beside it, applied at once."""

    table: TableInfo
    version: int
    facts: CommitFacts
    upserts: Mapping[Key, Row] = field(default_factory=dict)
    deletes: tuple[Key, ...] = ()
    files_added: Mapping[str, frozenset[Key]] = field(default_factory=dict)
    files_removed: tuple[str, ...] = ()


def carried(before: CommitFacts, after: CommitFacts) -> CommitFacts:
    """``after``, with gaps filled from ``before``: maintenance commits say nothing of events."""
    return replace(
        after,
        through=before.through if after.through is None else after.through,
        newest_at=before.newest_at if after.newest_at is None else after.newest_at,
    )


def step_of(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep | None:
    """What the next commit changes; None if it alone does not tell the rows: load its version and :func:`compare`.

    Args:
        state: before the commit; only read.
        read: returns rows of a data file in the table's columns.
    """
    if state.table.fold:
        return _fold_step(state, commit, read)
    return _upsert_step(state, commit, read)


def compare(state: TableState, loaded: TableState, facts: CommitFacts) -> StateStep:
    """The step from ``state`` to ``loaded``, the state at a later version."""
    table = loaded.table
    if table.columns != state.table.columns:
        changed = dict(loaded.rows)
    else:
        changed = {
            key: row
            for key, row in loaded.rows.items()
            if key not in state.rows or not _same(table, state.rows[key], row)
        }
    return StateStep(
        table=table,
        version=loaded.version,
        facts=facts,
        upserts=changed,
        deletes=tuple(key for key in state.rows if key not in loaded.rows),
        files_added=loaded.files,
        files_removed=tuple(path for path in state.files if path not in loaded.files),
    )


def _fold_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep | None:
    if any(file.data_change for file in commit.removed):
        return None
    partials = [row for file in commit.added if file.data_change for row in read(file)]
    table = state.table
    totals = table.folding.rows(table.columns, partials, state.rows)
    changed = {key: row for key, row in totals.items() if state.rows.get(key) != row}
    return StateStep(table, commit.version, CommitFacts.of(table.name, commit), changed)


def _upsert_step(state: TableState, commit: Commit, read: Callable[[AddedFile], list[Row]]) -> StateStep | None:
    if any(file.path not in state.files for file in commit.removed):
        return None
    table = state.table
    new: dict[Key, Row] = {}
    files_added: dict[str, frozenset[Key]] = {}
    moved = [state.files[file.path] for file in commit.removed if not file.data_change]
    for file in commit.added:
        if not file.data_change and sum(not other.data_change for other in commit.added) == 1:
            files_added[file.path] = frozenset().union(*moved)
            continue
        rows = {table.key_of(row): row for row in read(file)}
        files_added[file.path] = frozenset(rows)
        if file.data_change:
            new.update(rows)
    gone = [state.files[file.path] for file in commit.removed if file.data_change]
    deletes = frozenset().union(*gone) - new.keys() if gone else frozenset()
    removed = tuple(file.path for file in commit.removed)
    if deletes and any(deletes & keys for path, keys in state.files.items() if path not in removed):
        return None  # a key in two files breaks the contract; the answer must be right all the same
    changed = {key: row for key, row in new.items() if state.rows.get(key) != row}
    facts = CommitFacts.of(table.name, commit)
    return StateStep(table, commit.version, facts, changed, tuple(deletes), files_added, removed)


def _same(table: TableInfo, old: Row, new: Row) -> bool:
    if old == new:
        return True
    for name, a, b in zip(table.columns, old, new, strict=True):
        sums = table.fold.get(name) == "sum" and isinstance(a, float) and isinstance(b, float)
        if a != b and not (sums and math.isclose(a, b, rel_tol=_SAME_SUM)):
            return False
    return True


def describe(name: str, metadata: Mapping[str, Any]) -> TableInfo:
    """The description in a metaData action. Raises TableUnreadable: no key, or a key or fold that does not fit."""
    configuration: Mapping[str, str] = metadata.get("configuration") or {}
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        raise TableUnreadable(name, "it maps column names", "Set delta.columnMapping.mode=none")
    schema = pa.schema(Schema.from_json(metadata["schemaString"]).to_arrow())
    schema = pa.schema([column for column in schema if not is_binary(column.type)])
    key = names_in(configuration.get(PROPERTY_KEY))
    if not key:
        raise TableUnreadable(name, f"its metadata has no {PROPERTY_KEY}", "Only tables with a key have channels")
    if missing := [column for column in key if column not in schema.names]:
        raise TableUnreadable(name, f"{PROPERTY_KEY} names columns that it lacks: {', '.join(missing)}")
    fold = _fold_of(name, configuration, schema)
    return TableInfo(
        name,
        metadata["id"],
        tuple(schema.names),
        key,
        fold=fold.how if fold else {},
        types=tuple(schema.types),
        retention_ms=retention_ms(configuration),
        order=fold.order if fold else (),
    )


def metadata_of(table: DeltaTable) -> dict[str, Any]:
    metadata = table.metadata()
    return {
        "id": str(metadata.id),
        "schemaString": table.schema().to_json(),
        "configuration": metadata.configuration,
        "partitionColumns": metadata.partition_columns,
    }


def _fold_of(name: str, configuration: Mapping[str, str], schema: pa.Schema) -> Fold | None:
    try:
        fold = Fold.from_properties(configuration)
    except ValueError as error:
        raise TableUnreadable(name, str(error)) from None
    if fold is None:
        return None
    if bare := [column for column in schema.names if column not in fold.how and column not in fold.key]:
        raise TableUnreadable(name, f"{PROPERTY_FOLD} says nothing of: {', '.join(bare)}")
    if missing := [column for column in fold.order if column not in schema.names]:
        raise TableUnreadable(name, f"{PROPERTY_ORDER} names columns that it lacks: {', '.join(missing)}")
    how = {column: how for column, how in fold.how.items() if column in schema.names and column not in fold.key}
    return Fold(fold.key, how, fold.order)


def retention_ms(configuration: Mapping[str, str]) -> int:
    """For how long a version can be read: its log entries and data files must exist."""
    return min(kept_ms(configuration, "logRetentionDuration"), kept_ms(configuration, "deletedFileRetentionDuration"))


class TableReader:
    """Reads the table in ``folder``; the folder's name is the table's."""

    def __init__(self, folder: LakePath) -> None:
        self.folder = folder
        self._described: TableInfo | None = None
        self._partitions: frozenset[str] = frozenset()  # columns whose values are in the log, not in the files

    def info(self) -> TableInfo:
        """The table's newest description. Raises TableGone and TableUnreadable."""
        return describe(self.folder.name, self.metadata())

    def metadata(self) -> dict[str, Any]:
        """The newest metaData action. Raises TableGone."""
        try:
            return metadata_of(DeltaTable(str(self.folder)))
        except (DeltaError, OSError) as error:
            raise TableGone(self.folder.name, f"there is no table: {str(error).splitlines()[0]}") from None

    def load(self, version: int | None = None) -> TableState:
        """The state at a version, by default the newest.

        Raises TableGone: no such table or version, or files of it were cleaned up. TableUnreadable: it has no channel.
        """
        name = self.folder.name
        try:
            table = DeltaTable(str(self.folder), version=version)
            adds = pa.table(table.get_add_actions())
            metadata = metadata_of(table)
        except (TableNotFoundError, FileNotFoundError) as error:
            raise TableGone(name, f"there is no table: {error}") from None
        except (DeltaError, OSError) as error:
            if is_away(error):  # the table is as it was
                raise OSError(errno.EIO, str(error).splitlines()[0]) from error
            raise TableGone(name, f"version {version} cannot be loaded: {str(error).splitlines()[0]}") from error
        info = self._described = describe(name, metadata)
        self._partitions = frozenset(metadata["partitionColumns"])
        state = TableState(info, table.version(), self._facts(table.version()), {})
        fold = info.folding
        for add in adds.select([c for c in ("path", "partition") if c in adds.column_names]).to_pylist():
            file = AddedFile(add["path"], _texts(add.get("partition")), True)
            rows = self.rows(file)
            if info.fold:
                state.rows.update(fold.rows(info.columns, rows, state.rows))
            else:
                keyed = {info.key_of(row): row for row in rows}
                state.files[file.path] = frozenset(keyed)
                state.rows.update(keyed)
        return state

    def rows(self, file: AddedFile) -> list[Row]:
        """Rows of a data file in the described columns. Raises TableGone if it has been cleaned up."""
        described = self._described
        assert described is not None, "load() comes first"
        wanted = [name for name in described.columns if name not in self._partitions]
        try:
            with parquet_file(file.located(self.folder)) as parquet:
                present = set(parquet.schema_arrow.names)
                table = parquet.read(columns=[name for name in wanted if name in present], use_threads=False)
        except FileNotFoundError:
            raise TableGone(self.folder.name, f"data file {file.path} has been cleaned up") from None
        return rows_of(self._shaped(table, described, file))

    def advance(self, state: TableState, commit: Commit) -> TableChange:
        """Apply the next commit. Use :func:`prepare` to do so beside a state that others read."""
        return state.apply(self.prepare(state, commit))

    def prepare(self, state: TableState, commit: Commit) -> StateStep:
        """The step of a commit; the state is only read.

        Raises TableGone: files were cleaned up, or the table was replaced. TableUnreadable: it has no channel any more.
        """
        if commit.metadata is not None:
            info = describe(self.folder.name, commit.metadata)
            if info.table_id != state.table.table_id or info.key != state.table.key:
                raise TableGone(self.folder.name, "the table was replaced")
            if info != state.table:
                return self._compared(state, commit)
            self._partitions = frozenset(commit.metadata.get("partitionColumns") or ())
        return step_of(state, commit, self.rows) or self._compared(state, commit)

    def _compared(self, state: TableState, commit: Commit) -> StateStep:
        return compare(state, self.load(commit.version), CommitFacts.of(self.folder.name, commit))

    def _shaped(self, table: pa.Table, described: TableInfo, file: AddedFile) -> pa.Table:
        """A data file's columns as the table is described."""
        columns = []
        for name, kind in zip(described.columns, described.types, strict=True):
            if name in self._partitions:
                text = file.partition.get(name) or None
                values = pa.array([text] * table.num_rows, pa.string())
                columns.append(pa.chunked_array([_cast_text(values, kind)]))
            elif name in table.column_names:
                columns.append(table.column(name).cast(kind, safe=False))
            else:  # the column was added after the file
                columns.append(pa.chunked_array([pa.nulls(table.num_rows, kind)]))
        return pa.table(columns, names=described.columns)

    def _facts(self, version: int) -> CommitFacts:
        """Facts of a version; what it does not say comes from earlier commits."""
        facts, log = CommitFacts(0), DeltaLog(self.folder)
        for back in range(version, max(-1, version - _FACTS_BACK), -1):
            try:
                earlier = CommitFacts.of(self.folder.name, log.read(back))
            except TableGone:  # the log has been cleaned up to here
                break
            facts = earlier if back == version else carried(earlier, facts)
            if facts.through is not None:
                break
        return facts


def _texts(partition: Mapping[str, Any] | None) -> dict[str, str | None]:
    return {name: None if value is None else str(value) for name, value in (partition or {}).items()}


def _cast_text(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):  # in UTC, with or without a zone
        return pc.replace_substring_regex(values, r"(Z|\+00:00)$", "").cast(pa.timestamp("us")).cast(kind)
    return values.cast(kind)


@dataclass(frozen=True, slots=True)
class AsOf:
    """A version or a time."""

    text: str  # as a part of a name: digits
    version: int | None = None  # None: the newest at `at`
    at: int = 0  # ms since the epoch


def parse_as_of(text: str) -> AsOf:
    """Parse ``as_of``: digits are a version, anything else a time in ISO 8601, by default in UTC. Raises SqlError."""
    if _VERSION.fullmatch(text):
        return AsOf(f"v{int(text)}", int(text))
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SqlError(f"{text[:80]!r} is neither a version nor a time", "Write 7 or 2026-01-31T12:00:00Z") from None
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    at = int(moment.timestamp() * 1000)
    return AsOf(f"t{at}", None, at)


def version_at(folder: LakePath, moment: AsOf) -> int:
    """The version at a moment. It blocks. Raises PositionExpired if the log does not have it."""
    if moment.version is not None:
        return moment.version
    log = DeltaLog(folder)
    known = log.versions()
    at = bisect_right(known, moment.at, key=lambda version: int(log.info(version).get("timestamp") or 0))
    if not at:
        raise PositionExpired(folder.name, known[0] if known else 0, "the log does not reach back to that time")
    return known[at - 1]
