"""Turns of the writers of a bronze table: one commit at a time, each with a later ``bronze_at`` than all before it.

Of several copies of an event the first in bronze counts. A driver meets commits in the order of their versions, a
replay orders rows by ``bronze_at``: both name the same copy only where the two orders are one. With a single writer
that comes by itself; the stream's query and batch loaders that write at the same time take turns by a lock in the lake.
A loader holds it for a commit (some 15 ms), with its data file written before; the stream for its append.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from lakehouse.bronze.table import progress
from lakehouse.contract.deltalog import DeltaLog
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.lock import lock_at

COMMIT_LOAD = "millrace.load"  # JSON in a loader's commitInfo: its bronze_at, and how far it is in which files
_MICROS = struct.Struct(">q")


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
