"""The bronze table: its columns, and how far it is, read from the table itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.exceptions import DeltaError

from lakehouse.contract.lake import TableRef

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
        """What :meth:`to_metadata` wrote, or None where it is somebody else's."""
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
    table.path.mkdir(parents=True, exist_ok=True)
    DeltaTable.create(
        str(table.path),
        schema=COLUMNS,
        mode="ignore",
        name=table.name,
        description="Raw events, append-only",
        partition_by=["date"],
        configuration={
            "delta.appendOnly": "true",
            "delta.checkpointInterval": "1000000",
            "delta.dataSkippingNumIndexedCols": "0",
            # A commit each 400 ms: Spark lists the log's folder for each of them. What a query has still to read stays
            # for longer (lakehouse.maintain).
            "delta.logRetentionDuration": "interval 2 hours",
            "delta.deletedFileRetentionDuration": "interval 2 hours",
        },
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


def touch(path: Path) -> int:
    """Make an empty commit and return its version: a version to stream from must exist."""
    delta = DeltaTable(str(path))
    write_deltalake(delta, COLUMNS.empty_table(), mode="append")
    return delta.version()


def progress(table: TableRef) -> Progress:
    """How far the table is: from the newest commit that says so, else from the rows themselves."""
    if not table.exists():
        return Progress()
    for commit in sorted((table.path / "_delta_log").glob("[0-9]*.json"), reverse=True):
        found = _in_commit(commit)
        if found is not None:
            return found
    return _in_rows(table)


def _in_commit(commit: Path) -> Progress | None:
    for line in commit.read_text(encoding="utf-8").splitlines():
        if line.startswith('{"commitInfo"'):
            text = json.loads(line)["commitInfo"].get("userMetadata")
            return Progress.from_metadata(text) if text else None
    return None


def _in_rows(table: TableRef) -> Progress:
    """Progress by a scan: the log that named it is gone."""
    rows = DeltaTable(str(table.path)).to_pyarrow_dataset()
    found = rows.to_table(columns=["topic", "partition", "offset", "bronze_at"], filter=pc.field("origin") == "stream")
    if not found.num_rows:
        return Progress()
    ends = found.group_by(["topic", "partition"]).aggregate([("offset", "max"), ("bronze_at", "max")]).to_pylist()
    newest = max(pa.scalar(row["bronze_at_max"], pa.timestamp("us", "UTC")).value for row in ends)
    return Progress({f"{row['topic']}/{row['partition']}": row["offset_max"] + 1 for row in ends}, newest)
