"""Payloads to bronze rows, with the envelope, event id and refusals that a collector's border gives.

This is the hot loop of the loader: one pass over the payloads in Python (parse, id, key, fingerprint), the rest in
Arrow.

Rows become a data file before the time of their commit is known. ``bronze_at`` has one value in a commit, later than in
every commit before; the loader learns it in its turn (lakehouse.bronze.table), too late to write megabytes. So the file
has a placeholder: the column is dictionary-encoded and uncompressed, and its dictionary is one 8-byte value, which
:meth:`DataFile.stamp` overwrites. Nothing else in the file depends on it: it has no statistics and no page checksums.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from lakehouse.bronze.table import COLUMNS
from lakehouse.contract.envelope import MAX_ID_BYTES
from lakehouse.contract.lake import FILE_TOPIC as TOPIC
from lakehouse.contract.pipeline import Source, Template
from lakehouse.contract.sql.ddl import JSON_NAMES

KEPT_BYTES = 65_536
PLACEHOLDER = "bronze_at"  # this column gets its value when the commit's turn comes
_CONSTANT = ("source", "tenant", "collector", "suspect", "reject", "topic", "partition", "origin", "weight")
_MICROS = struct.Struct("<q")
_CODEC = "zstd"
Render = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True, slots=True)
class FilePosition:
    """How much of a file is in bronze.

    Attributes:
        file: fingerprint of its content.
        rows: committed rows, refused ones too; the next row has this number.
        rejects: refused rows among them.
        offset: next byte of the unpacked text to read; -1: unknown, count rows.
        ended: whether the whole file is in.
        first: digest of the event id of its first row; empty: unknown, or that row has none.
    """

    file: str
    rows: int = 0
    rejects: int = 0
    offset: int = 0
    ended: bool = False
    first: str = ""

    def to_json(self) -> list[Any]:
        """The form in commits."""
        return [self.file, self.rows, self.rejects, self.offset, int(self.ended), self.first]

    @classmethod
    def from_json(cls, found: list[Any]) -> FilePosition:
        file, rows, rejects, offset, ended, *first = found
        return cls(str(file), int(rows), int(rejects), int(offset), bool(ended), *map(str, first))


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one file, as its reader gives them.

    Attributes:
        payloads: JSON objects; for a refused row its text.
        refused: index in ``payloads`` to the reason why the reader refuses the row.
        offset: start of the next segment, bytes of the unpacked text.
        ended: whether this is the last segment of the file.
    """

    payloads: list[bytes]
    refused: Mapping[int, str] = field(default_factory=dict)
    offset: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment with the envelopes of its rows.

    Attributes:
        received_at: reading time, microseconds since the epoch.
        payloads, event_ids, keys, fingerprints, rejects: a value a row; ``rejects`` is empty if no row is refused.
    """

    name: str
    before: FilePosition
    after: FilePosition
    received_at: int
    payloads: list[bytes]
    event_ids: list[str]
    keys: list[bytes]
    fingerprints: list[str]
    rejects: list[str | None]

    @property
    def bytes(self) -> int:
        return sum(map(len, self.payloads))


def short_digest(text: str) -> str:
    """BLAKE2b-96 in hexadecimal, 24 characters."""
    return blake2b(text.encode(), digest_size=12).hexdigest()


class Sealer:
    """Gives rows of one source their envelopes.

    A row without an event id of its own is named by its file and number. Where the rows of a source have ids, a refused
    one is named by the file's first row and its number: in the file again, packed, renamed or grown, it is the same
    event, and quarantine has it once.

    Args:
        node: id of the loader, the rows' ``collector``.
    """

    def __init__(self, source: Source, *, tenant: str, node: str) -> None:
        self._source = source
        self._tenant = tenant
        self._node = node
        self._event_id = render(source.event_id_template) if source.event_id_template else None
        self._key = render(source.key_template) if source.key_template and source.key != source.event_id else None

    def seal(self, name: str, before: FilePosition, segment: Segment, received_at: int) -> SealedSegment:
        """The segment's rows, numbered from ``before.rows`` on."""
        payloads = segment.payloads
        event_ids: list[str] = []
        keys: list[str] = []
        reasons = dict(segment.refused)
        limit, identify, unwraps = self._source.max_event_bytes, self._identify, bool(self._source.unwrap)
        prefix, number = f"~{before.file}/", before.rows
        for index, payload in enumerate(payloads):
            event_id = key = reason = None
            if index in reasons:
                pass
            elif len(payload) > limit:
                reason = f"the event has {len(payload)} bytes, more than the {limit} that are allowed"
            else:
                try:
                    fields = orjson.loads(payload)
                except orjson.JSONDecodeError as error:
                    reason = f"not JSON: {error}"
                else:
                    if unwraps:
                        fields = self._source.fields_in(fields)
                    if type(fields) is dict:
                        event_id, key, reason = identify(fields)
                    elif unwraps:
                        reason = f"missing {self._source.unwrap}"
                    else:
                        reason = f"an event is a JSON object, not {JSON_NAMES.get(type(fields), 'that')}"
            if reason is not None:
                reasons[index] = reason
            event_ids.append(event_id or f"{prefix}{number + index}")
            keys.append(key or event_ids[-1])
        first = before.first
        if not before.rows and payloads and 0 not in reasons and self._event_id is not None:
            first = short_digest(event_ids[0])
        for index in reasons:
            if len(payloads[index]) > limit:
                payloads[index] = payloads[index][:KEPT_BYTES]
            if first and event_ids[index].startswith(prefix):
                event_ids[index] = f"~{short_digest(f'{first}/{number + index}')}"
                keys[index] = event_ids[index]
        after = replace(
            before,
            rows=before.rows + len(payloads),
            rejects=before.rejects + len(reasons),
            offset=segment.offset,
            ended=segment.ended,
            first=first,
        )
        return SealedSegment(
            name,
            before,
            after,
            received_at,
            payloads,
            event_ids,
            [key.encode() for key in keys],
            [blake2b(payload, digest_size=16).hexdigest() for payload in payloads],
            [reasons.get(index) for index in range(len(payloads))] if reasons else [],
        )

    def _identify(self, fields: Mapping[str, Any]) -> tuple[str | None, str | None, str | None]:
        """Event id, key, and the reason of a refusal."""
        event_id = key = None
        if self._event_id is not None:
            event_id = self._event_id(fields)
            if event_id is None:
                return None, None, _missing("event id", self._source.event_id)
            if len(event_id) > MAX_ID_BYTES // 4 and len(event_id.encode()) > MAX_ID_BYTES:
                return None, None, f"the event id is longer than {MAX_ID_BYTES} bytes"
        if self._key is not None:
            key = self._key(fields)
            if key is None:
                return event_id, None, _missing("key", self._source.key)
            if len(key) > MAX_ID_BYTES // 4 and len(key.encode()) > MAX_ID_BYTES:
                return event_id, None, f"the key is longer than {MAX_ID_BYTES} bytes"
        return event_id, key, None

    def rows(self, parts: Sequence[SealedSegment]) -> pa.Table:
        """Bronze rows of the segments, without the partition column and :data:`PLACEHOLDER`."""
        size = sum(len(part.payloads) for part in parts)
        counts = [len(part.payloads) for part in parts]
        rejects = [
            reason for part in parts for reason in (part.rejects or [None] * len(part.payloads))
        ]  # most chunks have none
        columns: dict[str, pa.Array] = {
            "event_id": pa.array([e for part in parts for e in part.event_ids], pa.string()),
            "source": pa.repeat(pa.scalar(self._source.name, pa.string()), size),
            "tenant": pa.repeat(pa.scalar(self._tenant, pa.string()), size),
            "received_at": _each([part.received_at for part in parts], counts, pa.int64()).cast(
                pa.timestamp("us", "UTC")
            ),
            "collector": pa.repeat(pa.scalar(self._node, pa.string()), size),
            "fingerprint": pa.array([f for part in parts for f in part.fingerprints], pa.string()),
            "suspect": pa.repeat(pa.scalar(True), size),  # an event of a file may have come another way too
            "reject": pa.array(rejects, pa.string()),
            "headers": _no_headers(size),
            "key": _binary([key for part in parts for key in part.keys]),
            "payload": _binary([payload for part in parts for payload in part.payloads]),
            "topic": _each([TOPIC + part.after.file for part in parts], counts, pa.string()),
            "partition": pa.repeat(pa.scalar(0, pa.int32()), size),
            "offset": pa.array(np.concatenate([np.arange(p.before.rows, p.after.rows) for p in parts]), pa.int64()),
            "broker_time": pa.nulls(size, pa.timestamp("us", "UTC")),
            "origin": _each([part.name for part in parts], counts, pa.string()),
            "weight": pa.repeat(pa.scalar(1.0), size),
        }
        return pa.table(columns, schema=pa.schema([column for column in COLUMNS if column.name in columns]))


def render(template: Template) -> Render:
    """A faster :meth:`Template.render` for plain fields whose values are strings or integers."""
    fields = template.fields
    if any("." in name for name in fields):
        return template.render
    pattern = template.text.replace("%", "%%")
    for name in fields:
        pattern = pattern.replace("{" + name + "}", "%s", 1)
    get = itemgetter(*fields)
    slow = template.render

    def one(payload: Mapping[str, Any]) -> str | None:
        value = payload.get(fields[0])
        return pattern % value if type(value) is str or type(value) is int else slow(payload)

    def several(payload: Mapping[str, Any]) -> str | None:
        try:
            values = get(payload)
        except KeyError:
            return None
        for value in values:
            if type(value) is not str and type(value) is not int:
                return slow(payload)
        return str(pattern % values)

    return one if len(fields) == 1 else several


def _missing(what: str, template: str) -> str:
    return f"the {what} {template} needs fields that are absent, null or not plain values"


def _each(values: Sequence[Any], counts: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Repeats each value by its count."""
    return pa.array(values, kind).take(pa.array(np.repeat(np.arange(len(values)), counts)))


def _binary(values: list[bytes]) -> pa.Array:
    """``pa.array``, ten times as fast."""
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, len(values)), out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)


def _no_headers(size: int) -> pa.Array:
    offsets = pa.array(np.zeros(size + 1, dtype=np.int32))
    return pa.MapArray.from_arrays(offsets, pa.array([], pa.string()), pa.array([], pa.binary()))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A written file that waits for its commit. ``stamp_at``: offset of the value of ``bronze_at`` in the file."""

    path: Path
    rows: int
    size: int
    stamp_at: int

    def stamp(self, bronze_at: int) -> None:
        """Set ``bronze_at`` (microseconds since the epoch) of all rows."""
        with self.path.open("r+b") as file:
            file.seek(self.stamp_at)
            file.write(_MICROS.pack(bronze_at))


def write_data_file(rows: pa.Table, path: Path) -> DataFile:
    """Write the rows as one Parquet file of one row group."""
    mark = os.urandom(_MICROS.size)
    at = pa.array(_MICROS.unpack(mark), pa.int64()).cast(pa.timestamp("us", "UTC"))
    rows = rows.append_column(PLACEHOLDER, pa.repeat(at[0], rows.num_rows))
    compression = {field.name: _CODEC for field in rows.schema if field.name != PLACEHOLDER}
    if "headers" in rows.schema.names:
        del compression["headers"]
        compression |= {f"headers.key_value.{part}": _CODEC for part in ("key", "value")}
    with pq.ParquetWriter(
        path,
        rows.schema,
        compression={**compression, PLACEHOLDER: "NONE"},
        compression_level=dict.fromkeys(compression, 1),
        use_dictionary=[*_CONSTANT, PLACEHOLDER],
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(rows, row_group_size=max(1, rows.num_rows))
    return DataFile(path, rows.num_rows, path.stat().st_size, _stamp_place(mark, path))


def _stamp_place(mark: bytes, path: Path) -> int:
    metadata = pq.read_metadata(path)
    group = metadata.row_group(0)
    column = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == PLACEHOLDER)
    start = column.dictionary_page_offset
    with path.open("rb") as file:
        file.seek(start)
        page = file.read(column.data_page_offset - start)
    assert metadata.num_row_groups == 1 and column.compression == "UNCOMPRESSED" and page.count(mark) == 1
    return int(start + page.index(mark))
