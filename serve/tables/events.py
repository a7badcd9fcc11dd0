"""The newest events of a bronze table in memory, as rows: the envelope, the payload's declared fields, and the rows of
references that the events carry.

At a version there are the events of its commit and the :data:`KEPT` newest before it. So memory is bounded, and the
rows depend on the log alone: any process tells a subscriber the same. Bronze is the record: what the products refuse is
here too, and a copy of an event is told again, under the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa

from lakehouse.contract.avro import decode, parsed_schema, schema_file
from lakehouse.contract.deltalog import AddedFile, Commit, DeltaLog, TableGone, TableUnreadable
from lakehouse.contract.lake import CommitFacts
from lakehouse.contract.pipeline import Source
from lakehouse.contract.pipeline.source import column_of
from lakehouse.contract.rows import Key, Row
from lakehouse.contract.sql.closures import as_date, as_timestamp
from lakehouse.contract.sql.ddl import Field, parse_ddl
from lakehouse.contract.storage import LakePath, lake_path, parquet_file
from serve.core.messages import rows_of
from serve.core.model import TableChange, TableInfo
from serve.errors import FilterError
from serve.tables.state import StateStep, TableReader, TableState, retention_ms

KEPT = 1_000
MOST_AT_ONCE = 20_000  # events of a commit that are told one by one
_BACK = 1_000  # commits searched backwards for the newest events
_ENVELOPE = {
    "event_id": pa.string(),
    "tenant": pa.string(),
    "received_at": pa.timestamp("us", "UTC"),
    "bronze_at": pa.timestamp("us", "UTC"),
    "origin": pa.string(),
    "reject": pa.string(),
}
_KEY = ("event_id", "tenant")
_KINDS: Mapping[str, pa.DataType] = {
    **dict.fromkeys(("TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG"), pa.int64()),
    **dict.fromkeys(("FLOAT", "REAL", "DOUBLE"), pa.float64()),
    **dict.fromkeys(("DECIMAL", "DEC", "NUMERIC"), pa.decimal128(38, 18)),
    **dict.fromkeys(("TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ"), pa.timestamp("us")),
    **dict.fromkeys(("STRING", "CHAR", "CHARACTER", "VARCHAR"), pa.string()),
    "BOOLEAN": pa.bool_(),
    "DATE": pa.date32(),
}
_NESTED = pa.list_(pa.null())  # of a kind that no filter takes; sent as the payload has it


class BronzeState(TableState):
    """Events in the order in which they, or their last copies, came."""

    def apply(self, step: StateStep) -> TableChange:
        change = TableState.apply(self, step)
        _append(self.rows, step.upserts.values())
        return change


def _append(rows: dict[Key, Row], newest: Iterable[Row]) -> None:
    """Put rows at the end, also those whose key is there."""
    for row in newest:
        rows.pop(row[:2], None)
        rows[row[:2]] = row


class EventReader(TableReader):
    """Reads the bronze table of a source. ``schemas`` is the folder of the schemas that payloads in Avro name."""

    def __init__(self, folder: LakePath, source: Source, schemas: LakePath) -> None:
        super().__init__(folder)
        self._log = DeltaLog(folder)
        self._unwrap = source.unwrap_path
        self._schemas = schemas if source.format == "avro" else None
        self._fields = parse_ddl(source.schema)
        self._read = {name: _reader(field) for name, field in self._fields.items()}
        self._references = {name: spec for name, spec in source.enrich.items() if name not in self._fields}
        self._carried = {**_ENVELOPE, "payload": pa.binary()}
        if self._references:
            self._carried["headers"] = pa.map_(pa.string(), pa.binary())

    def info(self) -> TableInfo:
        """Raises TableGone."""
        metadata = self.metadata()
        columns = {("reason" if name == "reject" else name): kind for name, kind in _ENVELOPE.items()}
        columns |= {column_of(name): _KINDS.get(field.declared, _NESTED) for name, field in self._fields.items()}
        for name, spec in self._references.items():
            columns |= {name: pa.bool_(), **{f"{name}.{field}": pa.string() for field in spec.fields}}
        return TableInfo(
            self.folder.name,
            metadata["id"],
            tuple(columns),
            _KEY,
            types=tuple(columns.values()),
            retention_ms=retention_ms(metadata["configuration"]),
            references=self._references,
        )

    def load(self, version: int | None = None) -> TableState:
        """The newest events at a version, by default the newest. Raises TableGone."""
        info = self.info()
        version = self._log.newest() if version is None else version
        commit = self._log.read(version)
        last = self._events(commit)
        older: dict[Key, Row] = {}  # the newest first
        for rows in self._before(version):
            for row in reversed(rows):
                older.setdefault(row[:2], row)
            if len(older) >= KEPT:
                break
        state = BronzeState(info, version, self._facts_of(commit, last), {})
        state.rows.update(reversed(list(islice(older.items(), KEPT))))
        _append(state.rows, last)
        return state

    def prepare(self, state: TableState, commit: Commit) -> StateStep:
        """The step of a commit: its events come, and the oldest that there were leave. Raises TableGone: the table was
        replaced, files have been cleaned up, or too many events came at once.
        """
        if commit.metadata is not None and commit.metadata["id"] != state.table.table_id:
            raise TableGone(self.folder.name, "the table was replaced")
        rows = self._events(commit, or_fail=True)
        new: dict[Key, Row] = {}
        _append(new, rows)
        left = tuple(key for key in islice(state.rows, max(0, len(state.rows) - KEPT)) if key not in new)
        return StateStep(state.table, commit.version, self._facts_of(commit, rows), new, left)

    def _before(self, version: int) -> Iterator[list[Row]]:
        """Events of earlier commits, the newest commit first, as far as the log and the data files reach."""
        for earlier in range(version - 1, max(-1, version - 1 - _BACK), -1):
            try:
                yield self._events(self._log.read(earlier))
            except TableGone:
                return

    def _events(self, commit: Commit, *, or_fail: bool = False) -> list[Row]:
        """The last :data:`MOST_AT_ONCE` events of a commit; with ``or_fail`` TableGone is raised if there are more."""
        try:
            tables = [self._table(file) for file in commit.added if file.data_change]
        except FileNotFoundError:
            raise TableGone(self.folder.name, f"a data file of version {commit.version} was cleaned up") from None
        count = sum(table.num_rows for table in tables)
        if or_fail and count > MOST_AT_ONCE:
            told = f"{MOST_AT_ONCE} of one commit are told one by one"
            raise TableGone(self.folder.name, f"version {commit.version} has {count} events, and {told}")
        return self._typed(pa.concat_tables(tables).slice(max(0, count - MOST_AT_ONCE))) if tables else []

    def _table(self, file: AddedFile) -> pa.Table:
        with parquet_file(file.located(self.folder)) as parquet:
            present = set(parquet.schema_arrow.names)
            names = [name for name in self._carried if name in present]
            table = parquet.read(columns=names, use_threads=False)
        columns = [
            table[name].cast(kind) if name in present else pa.chunked_array([pa.nulls(table.num_rows, kind)])
            for name, kind in self._carried.items()
        ]
        return pa.table(columns, list(self._carried))

    def _typed(self, table: pa.Table) -> list[Row]:
        found = []
        last = len(_ENVELOPE)
        for row in rows_of(table):
            fields = self._payload(row[last])
            values = [read(fields.get(name)) for name, read in self._read.items()]
            if self._references:
                values += self._joined(dict(row[last + 1] or ()))
            found.append((*row[:last], *values))
        return found

    def _payload(self, payload: bytes | None) -> Mapping[str, Any]:
        """The payload's object that holds the fields; empty if it is none. Raises TableUnreadable."""
        text: bytes | str | None = payload
        if self._schemas is not None:
            text = (decode(payload, self._schema) or {}).get("text")
        found: Any = _fields(text)
        for step in self._unwrap:
            found = found.get(step) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def _schema(self, number: int) -> Any:
        try:
            return _kept_schema(number, str(self._schemas))
        except FileNotFoundError:
            detail = f"an event has Avro schema {number}, which the lake does not have"
            remedy = "Run a driver: it fetches the schema when it reads the event"
            raise TableUnreadable(self.folder.name, detail, remedy) from None

    def _joined(self, headers: Mapping[str, bytes]) -> Iterator[Any]:
        """Values of the references' columns."""
        for name, spec in self._references.items():
            row = _fields(headers.get(name))
            yield True if name in headers else None
            yield from (_text_of(row.get(field)) for field in spec.fields)

    def _facts_of(self, commit: Commit, rows: list[Row]) -> CommitFacts:
        facts = CommitFacts.of(self.folder.name, commit)
        at = list(_ENVELOPE).index("received_at")
        times = [int(row[at].replace(tzinfo=UTC).timestamp() * 1000) for row in rows if row[at] is not None]
        return replace(facts, events=len(rows), oldest_at=min(times, default=None), newest_at=max(times, default=None))


@lru_cache(maxsize=1_024)
def _kept_schema(number: int, folder: str) -> Any:
    """A parsed schema that the lake keeps; one that is not there is looked for again. Raises FileNotFoundError."""
    return parsed_schema(number, orjson.loads(schema_file(lake_path(folder), number).read_bytes()))


def _fields(payload: bytes | str | None) -> Mapping[str, Any]:
    """The payload's object; empty if it is none."""
    try:
        found = orjson.loads(payload or b"null")
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _text_of(value: Any) -> str | None:
    """A value as the products see it: the row of a reference is a map of texts there."""
    return value if value is None or isinstance(value, str) else orjson.dumps(value).decode()


def _reader(field: Field) -> Callable[[Any], Any]:
    """Turns a JSON value into a column's value; None if it does not fit."""
    kind = _KINDS.get(field.declared, _NESTED)

    def read(value: Any) -> Any:
        try:
            return _value(kind, value)
        except (FilterError, InvalidOperation):
            return None

    return read


def _value(kind: pa.DataType, value: Any) -> Any:
    if value is None or kind == _NESTED:
        return value
    if pa.types.is_string(kind):
        return _text_of(value)
    if pa.types.is_boolean(kind):
        return value if isinstance(value, bool) else None
    if isinstance(value, bool | list | dict):
        return None
    if isinstance(value, str):
        if pa.types.is_timestamp(kind):
            return as_timestamp(value)
        return as_date(value) if pa.types.is_date(kind) else None
    if pa.types.is_integer(kind):
        return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None
    if pa.types.is_decimal(kind):
        return Decimal(str(value))
    return float(value) if pa.types.is_floating(kind) else None
