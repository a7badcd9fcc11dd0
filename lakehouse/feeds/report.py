"""Table ``loads``: one row a file and load; and how a load stands against its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from lakehouse.contract.lake import LOADS, PROPERTY_KEY, Lake
from lakehouse.feeds.model import FileReport

COLUMNS = pa.schema(
    [
        ("load", pa.string()),
        ("source", pa.string()),
        ("name", pa.string()),
        ("file", pa.string()),
        ("format", pa.string()),
        ("bytes", pa.int64()),
        ("rows", pa.int64()),
        ("rejects", pa.int64()),
        ("from_row", pa.int64()),
        ("seconds", pa.float64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("bronze_version", pa.int64()),
        ("started_at", pa.timestamp("us", "UTC")),
        ("finished_at", pa.timestamp("us", "UTC")),
        ("deadline", pa.timestamp("us", "UTC")),
        ("late", pa.bool_()),
    ]
)


@dataclass
class Deadline:
    """A load against its SLA.

    Attributes:
        began: when the load began, seconds since the epoch.
        allowed_s: how long it may take; None: no SLA.
        total: bytes to be read.
        read: bytes read, by file.
    """

    began: float
    allowed_s: float | None
    total: int
    read: dict[str, int] = field(default_factory=dict)
    now: Callable[[], float] = time.time

    @property
    def at(self) -> float | None:
        """When it must have ended, seconds since the epoch."""
        return None if self.allowed_s is None else self.began + self.allowed_s

    def expected(self) -> float | None:
        """When it will have ended if it goes on as up to now; None where nothing has been read."""
        read = sum(self.read.values())
        if not read:
            return None
        return self.began + (self.now() - self.began) * max(1.0, self.total / read)

    @property
    def in_danger(self) -> bool:
        """Whether it will be late if it goes on like this, or is late already."""
        if self.at is None:
            return False
        expected = self.expected()
        return self.now() > self.at or (expected is not None and expected > self.at)

    def is_late(self, finished_at: int) -> bool:
        """Whether a file that was finished then (microseconds since the epoch) came too late."""
        return self.at is not None and finished_at > self.at * 1e6


def keep(lake: Lake, load: str, source: str, reports: Sequence[FileReport], deadline: Deadline) -> None:
    """Append the reports to the table ``loads``; it is created where absent.

    Args:
        load: id of the load.
    """
    if not reports:
        return
    table = lake.table("silver", LOADS)
    if not table.exists():
        table.path.mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            str(table.path),
            schema=COLUMNS,
            mode="ignore",
            name=table.name,
            description="Files that the batch loader was given, and what became of them",
            configuration={PROPERTY_KEY: "load,name,file"},
            raise_if_key_not_exists=False,
        )
    write_deltalake(str(table.path), _rows(load, source, reports, deadline), mode="append")


def _rows(load: str, source: str, reports: Sequence[FileReport], deadline: Deadline) -> pa.Table:
    at = None if deadline.at is None else int(deadline.at * 1e6)
    made = [
        {name: getattr(report, name, None) for name in COLUMNS.names}
        | {"load": load, "source": source, "deadline": at, "late": deadline.is_late(report.finished_at)}
        for report in reports
    ]
    plain = pa.schema([f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in COLUMNS])
    return pa.Table.from_pylist(made, schema=plain).cast(COLUMNS)
