"""Reading tables for the tail: the state at a version, the rows of a data file. Blocking: not for the event loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from lakehouse.contract.deltalog import AddedFile, Commit, DeltaLog, TableGone, TableUnreadable
from lakehouse.contract.lake import PROPERTY_FOLD, PROPERTY_KEY, PROPERTY_ORDER, CommitFacts
from lakehouse.contract.rows import Fold, Row, names_in
from serve.model import DEFAULT_RETENTION_MS, Change, TableInfo
from serve.rows import is_binary, rows_of
from serve.state import NeedsLoad, Step, TableState, carried, compare, step_of

_UNITS = {
    "microsecond": 0.001,
    "millisecond": 1.0,
    "second": 1_000.0,
    "minute": 60_000.0,
    "hour": 3_600_000.0,
    "day": 86_400_000.0,
    "week": 604_800_000.0,
}
_FACTS_BACK = 200  # commits looked back for the last `through`


@dataclass(frozen=True, slots=True)
class Described:
    """A table's description with the Arrow types that its files are read to.

    Attributes:
        info: as subscribers see it.
        schema: types of ``info.columns``.
        partitions: names of partition columns: their values stand in the log, not in the files.
    """

    info: TableInfo
    schema: pa.Schema
    partitions: frozenset[str]


def describe(name: str, metadata: Mapping[str, Any]) -> Described:
    """The description in a metaData action.

    Raises:
        TableUnreadable: no key, or a key or fold that does not fit the columns.
    """
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
    info = TableInfo(
        name,
        metadata["id"],
        tuple(schema.names),
        key,
        fold=fold.how if fold else {},
        types=tuple(schema.types),
        retention_ms=_retention_ms(configuration),
        order=fold.order if fold else (),
    )
    return Described(info, schema, frozenset(metadata.get("partitionColumns") or ()))


def metadata_of(table: DeltaTable) -> dict[str, Any]:
    """The metaData action of an open table."""
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


def _retention_ms(configuration: Mapping[str, str]) -> int:
    """How long a version can be read again: neither its log entries nor the files removed after it may be gone."""
    return min(
        _interval_ms(configuration.get("delta.logRetentionDuration", ""), 30 * 86_400_000),
        _interval_ms(configuration.get("delta.deletedFileRetentionDuration", ""), DEFAULT_RETENTION_MS),
    )


def _interval_ms(text: str, default: int) -> int:
    """Milliseconds of Delta's ``interval 6 hours``; the default where it says something that we do not read."""
    words = text.lower().removeprefix("interval").split()
    total = 0.0
    for number, unit in zip(words[::2], words[1::2], strict=False):
        if not number.replace(".", "", 1).isdecimal() or unit.rstrip("s") not in _UNITS:
            return default
        total += float(number) * _UNITS[unit.rstrip("s")]
    return int(total) if words and len(words) % 2 == 0 else default


class TableReader:
    """Reads one table's folder.

    Args:
        folder: the table's folder; its name is the table's name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._described: Described | None = None

    def load(self, version: int | None = None) -> TableState:
        """The state at a version, by default the newest.

        Raises:
            TableGone: no such table or version, or files of it have been cleaned up.
            TableUnreadable: it cannot be pushed.
        """
        name = self.folder.name
        try:
            table = DeltaTable(self.folder, version=version)
            adds = pa.table(table.get_add_actions())
            metadata = metadata_of(table)
        except (TableNotFoundError, FileNotFoundError) as error:
            raise TableGone(name, f"there is no table: {error}") from None
        except (DeltaError, OSError) as error:
            raise TableGone(name, f"version {version} cannot be loaded: {str(error).splitlines()[0]}") from error
        described = describe(name, metadata)
        self._described = described
        files = [
            AddedFile(add["path"], _texts(add.get("partition")), True)
            for add in adds.select([c for c in ("path", "partition") if c in adds.column_names]).to_pylist()
        ]
        state = TableState(described.info, table.version(), self._facts(table.version()), {})
        fold = described.info.folding
        for file in files:
            rows = self.rows(file)
            if described.info.folded:
                state.rows.update(fold.rows(described.info.columns, rows, state.rows))
            else:
                keyed = {described.info.key_of(row): row for row in rows}
                state.files[file.path] = frozenset(keyed)
                state.rows.update(keyed)
        return state

    def rows(self, file: AddedFile) -> list[Row]:
        """Rows of a data file in the described columns.

        Raises:
            TableGone: the file has been cleaned up.
        """
        described = self._described
        assert described is not None, "load() comes first"
        wanted = [column.name for column in described.schema if column.name not in described.partitions]
        try:
            with pq.ParquetFile(file.located(self.folder), memory_map=True) as parquet:
                present = set(parquet.schema_arrow.names)
                table = parquet.read(columns=[name for name in wanted if name in present], use_threads=False)
        except FileNotFoundError:
            raise TableGone(self.folder.name, f"data file {file.path} has been cleaned up") from None
        return rows_of(_shaped(table, described, file))

    def advance(self, state: TableState, commit: Commit) -> Change:
        """Apply the next commit to the state (see :func:`prepare` for doing it beside a state that others read)."""
        return state.apply(self.prepare(state, commit))

    def prepare(self, state: TableState, commit: Commit) -> Step:
        """The step that the commit is; the state is only read.

        Raises:
            TableGone: files have been cleaned up, or the table is another one now.
            TableUnreadable: it cannot be pushed any more.
        """
        if commit.metadata is not None:
            described = describe(self.folder.name, commit.metadata)
            if described.info.table_id != state.table.table_id or described.info.key != state.table.key:
                raise TableGone(self.folder.name, "the table was replaced")
            if described.info != state.table:
                return compare(state, self.load(commit.version), CommitFacts.of(self.folder.name, commit))
            self._described = described
        try:
            return step_of(state, commit, self.rows)
        except NeedsLoad:
            return compare(state, self.load(commit.version), CommitFacts.of(self.folder.name, commit))

    def _facts(self, version: int) -> CommitFacts:
        """Facts of a version, with what earlier commits said where it says nothing itself."""
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


def _shaped(table: pa.Table, described: Described, file: AddedFile) -> pa.Table:
    columns = []
    for column in described.schema:
        if column.name in described.partitions:
            text = file.partition.get(column.name) or None
            values = pa.array([text] * table.num_rows, pa.string())
            columns.append(pa.chunked_array([_cast_text(values, column.type)]))
        elif column.name in table.column_names:
            columns.append(table.column(column.name).cast(column.type, safe=False))
        else:  # the column came after the file
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, column.type)]))
    return pa.table(columns, names=described.schema.names)


def _cast_text(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):  # in UTC, whether it says so or not
        return pc.replace_substring_regex(values, r"(Z|\+00:00)$", "").cast(pa.timestamp("us")).cast(kind)
    return values.cast(kind)
