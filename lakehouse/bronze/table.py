"""The bronze table: its columns, how far it is, what it gained since a version, and the turns of its writers.

Of several copies of an event the first in bronze counts. A driver meets commits in the order of their versions, a
replay orders rows by ``bronze_at``: both name the same copy only where the two orders are one. With a single writer
that comes by itself; the stream's query and batch loaders that write at the same time take turns by a lock in the lake.
A loader holds it for a commit (some 15 ms), with its data file written before; the stream for its append.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import DeltaError

from lakehouse.contract.deltalog import DeltaLog, TableGone
from lakehouse.contract.lake import Lake, TableRef, offsets_behind
from lakehouse.contract.storage import lake_path
from lakehouse.errors import VersionsGone
from lakehouse.lock import lock_at

COMMIT_LOAD = "millrace.load"  # JSON in a loader's commitInfo: its bronze_at, and how far it is in which files
_MICROS = struct.Struct(">q")

# received_at: when a collector first had the event; broker_time: Kafka's; bronze_at: when the commit that holds the row
# was made (never goes back). origin: "stream", or the file a loader read it from. weight: how many events it stands
# for, where others were left out beside it; null in rows from before there was one: 1.
COLUMNS = pa.schema(
    [
        ("event_id", pa.string()),
        ("source", pa.string()),
        ("tenant", pa.string()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("collector", pa.string()),
        ("fingerprint", pa.string()),
        ("suspect", pa.bool_()),
        ("reject", pa.string()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("key", pa.binary()),
        ("payload", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("broker_time", pa.timestamp("us", "UTC")),
        ("origin", pa.string()),
        ("weight", pa.float64()),
        ("bronze_at", pa.timestamp("us", "UTC")),
        ("date", pa.date32()),
    ]
)
UNLIKE = ("payload", "fingerprint", "event_id", "key", "offset", "received_at")
"""Columns of which hardly two values are alike: Parquet's dictionaries of them cost time and make files larger."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far bronze is.

    Attributes:
        offsets: ``TOPIC/PARTITION`` to the next offset to take.
        bronze_at: microseconds since the epoch of the newest commit; 0 where there is none.
        topics: name of a topic to the id under which its offsets count; not of those that commits from before there
            was this name.
    """

    offsets: Mapping[str, int] = field(default_factory=dict)
    bronze_at: int = 0
    topics: Mapping[str, str] = field(default_factory=dict)

    def to_metadata(self) -> str:
        """The JSON that a commit carries as its ``userMetadata``."""
        found = {"offsets": dict(self.offsets), "bronze_at": self.bronze_at, "topics": dict(self.topics)}
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_metadata(cls, text: str) -> Progress | None:
        """What :meth:`to_metadata` wrote, or None if another application wrote it."""
        try:
            found = json.loads(text)
            topics = {str(k): str(v) for k, v in found.get("topics", {}).items()}
            return cls({str(k): int(v) for k, v in found["offsets"].items()}, int(found["bronze_at"]), topics)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def create(table: TableRef) -> None:
    """Create the table where it is absent; add columns that it does not have yet."""
    if table.exists():
        _evolve(table)
        return
    table.create(
        COLUMNS,
        {
            "delta.appendOnly": "true",
            "delta.checkpointInterval": "1000000",
            "delta.dataSkippingNumIndexedCols": "0",
            # A commit each 400 ms: Spark lists the log's folder for each of them. What a query has still to read stays
            # for longer (lakehouse.maintain).
            "delta.logRetentionDuration": "interval 2 hours",
            "delta.deletedFileRetentionDuration": "interval 2 hours",
        },
        "Raw events, append-only",
        partition_by=["date"],
    )


def _evolve(table: TableRef) -> None:
    delta = DeltaTable(str(table.path))
    absent = _absent(delta)
    if not absent:
        return
    try:
        delta.alter.add_columns(absent)
    except DeltaError:
        if _absent(DeltaTable(str(table.path))):  # else another driver that starts has done it
            raise


def _absent(delta: DeltaTable) -> list[Field]:
    there = {field.name for field in delta.schema().fields}
    return [field for field in Schema.from_arrow(COLUMNS).fields if field.name not in there]


def progress(table: TableRef) -> Progress:
    """How far the table is: from the newest commit that says so, else from the rows themselves."""
    if not table.exists():
        return Progress()
    for _, info in DeltaLog(table.path).infos(newest_first=True):
        if (text := info.get("userMetadata")) and (found := Progress.from_metadata(text)):
            return found
    return _in_rows(table)


def _in_rows(table: TableRef) -> Progress:
    """Progress by a scan: the log that named it is gone."""
    rows = DeltaTable(str(table.path)).to_pyarrow_dataset()
    found = rows.to_table(columns=["topic", "partition", "offset", "bronze_at"], filter=pc.field("origin") == "stream")
    if not found.num_rows:
        return Progress()
    return Progress(offsets_behind(found), pc.max(pc.cast(found["bronze_at"], pa.int64())).as_py())


class BronzeClock:
    """The clock of one bronze table, shared by all processes that write it.

    Args:
        now: seconds since the epoch.
    """

    def __init__(self, lake: Lake, table: TableRef, now: Callable[[], float] = time.time) -> None:
        self._lock = lock_at(lake.shared / "clocks" / table.name)
        self._table = table
        self._now = now

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait for the turn; gives the ``bronze_at`` (microseconds since the epoch) of the commit to be made in it.

        The time is noted before it is used: one that a crash left without a commit is passed over.
        """
        with self._lock.turn(self._next) as noted:
            yield _MICROS.unpack(noted)[0]

    def _next(self, noted: bytes) -> bytes:
        last = _MICROS.unpack(noted)[0] if len(noted) == _MICROS.size else newest_bronze_at(self._table)
        return _MICROS.pack(max(int(self._now() * 1e6), last + 1))


def newest_bronze_at(table: TableRef) -> int:
    """The latest ``bronze_at`` of any commit, microseconds since the epoch; 0 for an empty table.

    From the newest commits where they say it, else from the rows.
    """
    if not table.exists():
        return 0
    streamed = progress(table).bronze_at
    for _, info in DeltaLog(table.path).infos(newest_first=True):
        if COMMIT_LOAD in info:
            return max(streamed, int(json.loads(info[COMMIT_LOAD])["bronze_at"]))
        if info.get("userMetadata") and streamed:
            return streamed  # the stream's own, newer than any load's
    rows = DeltaTable(str(table.path)).to_pyarrow_dataset().to_table(columns=["bronze_at"])
    newest = pc.max(rows["bronze_at"].cast(pa.int64())).as_py()
    return max(streamed, newest or 0)


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that one or more commits in a row added.

    Attributes:
        version: of the last of these commits.
        files: data files with the rows; none if the commits only rewrote or removed some.
    """

    version: int
    files: tuple[str, ...]
    bytes: int


def newest_version(bronze: TableRef, known: int) -> int:
    """The newest version, looked for from one that is known to be there.

    Raises:
        VersionsGone: the table's log is gone.
    """
    log = DeltaLog(bronze.path)
    version = known
    while log.has(version + 1):
        version += 1
    if version == known and not log.exists():
        raise VersionsGone(bronze.name, f"{log.folder} is gone")
    return version


def changes(bronze: TableRef, since: int, until: int, max_bytes: int) -> Iterator[Changes]:
    """All that came after version ``since``, up to ``until``, in order. One commit is read at a time.

    Args:
        max_bytes: of one item's files, at the most; a single commit may have more.

    Raises:
        VersionsGone: the log or a data file of these versions has been removed.
    """
    files: list[str] = []
    size = 0
    for version in range(since + 1, until + 1):
        found = _added(bronze, version)
        added = sum(found.values())
        if files and size + added > max_bytes:
            yield Changes(version - 1, tuple(files), size)
            files, size = [], 0
        files += found
        size += added
    if until > since:
        yield Changes(until, tuple(files), size)


def _added(bronze: TableRef, version: int) -> dict[str, int]:
    """Data files that a commit added with new rows, and their bytes."""
    try:
        added = DeltaLog(bronze.path).read(version).added
    except TableGone as gone:
        raise VersionsGone(bronze.name, gone.detail) from None
    found = {str(file.located(bronze.path)): file.size for file in added if file.data_change}
    if absent := next((path for path in found if not lake_path(path).exists()), None):
        raise VersionsGone(bronze.name, f"data file {absent} of version {version} has been removed")
    return found
