"""Which copy of an event counts: the first in bronze, by an index that is a pure function of bronze.

The index maps a dedupe key (16 bytes) to the coordinates of the first row that carries it. A row counts if and only if
the index holds that row's own coordinates, so judging a batch again (after a crash, or when Spark repeats it) gives
the same answer, and there is no horizon: an event is once for ever. Lost or damaged, it is rebuilt from bronze.

LMDB: one writer, memory-mapped, survives kill -9; its commit is durable before the products' commits are made.
Rejected: Spark's own ``dropDuplicates`` state (it forgets behind a watermark, is lost with the checkpoint, and takes
whichever copy comes first off a shuffle, so that a replay could choose another one). docs/decisions/0005.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

JUDGED = ("dedupe_key", "topic", "partition", "offset", "bronze_at")
"""Columns of conformed events that the index looks at."""
MAP_BYTES = 1 << 40  # address space, not disk: the file grows with what is in it
_COORDINATES = struct.Struct(">qqIq")  # bronze_at, place, partition, offset: sorts as bronze does
POSITION = b"\x00position"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the index says of a batch.

    Attributes:
        first: for each row, whether it is the copy that counts.
        duplicates: rows that are not.
    """

    first: npt.NDArray[np.bool_]
    duplicates: int


class SeenIndex:
    """First occurrences of one source's events.

    Attributes:
        folder: where its files lie.
    """

    def __init__(self, folder: Path) -> None:
        """Open the index in ``folder``, creating it where absent."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # metasync off: an OS crash may undo the last commit, never damage the file; bronze then fills it in again.
        self._env = lmdb.open(
            str(folder), map_size=MAP_BYTES, metasync=False, readahead=False, max_readers=16, max_dbs=1
        )

    def position(self) -> str:
        """What was given to the last :meth:`judge`: how far in bronze the index is complete; empty for a new one."""
        with self._env.begin() as txn:
            return bytes(txn.get(POSITION, b"")).decode()

    def __len__(self) -> int:
        entries = int(self._env.stat()["entries"])
        return entries - (1 if self.position() else 0)

    def judge(self, rows: pa.Table, position: str) -> Verdict:
        """Enter a batch and tell which rows count.

        Args:
            rows: columns ``dedupe_key`` (16 bytes), ``topic``, ``partition``, ``offset``, ``bronze_at``.
            position: how far in bronze this batch reaches; kept with the entries in one transaction.
        """
        keys = rows["dedupe_key"].to_pylist()
        coordinates = coordinates_of(rows)
        # In bronze's order, so that of several copies in one batch the first is entered.
        order = sorted(range(len(keys)), key=coordinates.__getitem__)
        first = np.zeros(len(keys), dtype=bool)
        with self._env.begin(write=True) as txn:
            put, get = txn.put, txn.get
            for i in order:
                key, own = keys[i], coordinates[i]
                first[i] = put(key, own, overwrite=False) or get(key) == own
            txn.put(POSITION, position.encode())
        return Verdict(first, len(keys) - int(first.sum()))

    def counted(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of these rows, all of which were judged, are the copies that count; nothing is entered."""
        with self._env.begin() as txn:
            found = [bytes(txn.get(key, b""))[: _COORDINATES.size] for key in rows["dedupe_key"].to_pylist()]
        return np.array([a == b for a, b in zip(found, coordinates_of(rows), strict=True)], dtype=bool)

    def copy(self, folder: Path) -> str:
        """Copy the index as it is at a moment, while it may be written; returns the copy's position.

        Entries may be in the copy that its position does not cover yet: judged again they give the same answer.
        """
        position = self.position()  # first: the copy holds at least this much
        folder.mkdir(parents=True)
        self._env.copy(str(folder), compact=True)
        return position

    def close(self) -> None:
        """Close the files."""
        self._env.close()


def coordinates_of(rows: pa.Table) -> list[bytes]:
    """Each row's place in bronze as bytes that sort in bronze's order."""
    times = pc.cast(rows["bronze_at"], pa.int64()).to_pylist()
    partitions = rows["partition"].to_pylist()
    offsets = rows["offset"].to_pylist()
    topics = rows["topic"].combine_chunks().dictionary_encode()
    if isinstance(topics, pa.ChunkedArray):
        topics = topics.combine_chunks()
    places = [_place(name) for name in topics.dictionary.to_pylist()]
    codes = topics.indices.to_pylist()
    pack = _COORDINATES.pack
    return [pack(t, places[c], p, o) for t, c, p, o in zip(times, codes, partitions, offsets, strict=True)]


def _place(name: str) -> int:
    """A topic or file name as 63 bits that are the same in every process."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1
