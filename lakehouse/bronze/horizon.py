"""The index of seen events with a horizon: it forgets an id that did not come again for so long.

A row counts if no copy of it stands in bronze within the horizon before it, which :func:`lakehouse.batch.build` asks of
bronze itself in the same words. What the last batch was told is kept, because forgetting makes a second answer differ.
"""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.bronze.runs import place_of
from lakehouse.bronze.seen import RunIndex, SeenIndex
from lakehouse.contract.pipeline import Source

MAP_BYTES = 1 << 40  # address space, not disk: the file grows with what is in it
_TIME = struct.Struct(">q")
_COORDINATES = struct.Struct(">qqIq")  # bronze_at, place, partition, offset: sorts as bronze does
_PLACE_BYTES = _COORDINATES.size
_POSITION = b"\x00position"
_COPIES = b"\x00copies"


def seen_index(folder: Path, source: Source) -> SeenIndex:
    return HorizonIndex(folder, source.dedupe_horizon_ms * 1000) if source.dedupe_horizon_ms else RunIndex(folder)


class HorizonIndex(SeenIndex):
    """First occurrences, each for as long as copies of it keep coming.

    An entry is the coordinates of the copy that counts, then ``bronze_at`` of the copy that came last. In LMDB: one
    writer, memory-mapped, survives kill -9; its commit is durable before the products' commits are made.

    Args:
        horizon: microseconds of ``bronze_at``.
    """

    def __init__(self, folder: Path, horizon: int) -> None:
        super().__init__(folder)
        # metasync off: an OS crash may undo the last commit, never damage the file; bronze then fills it in again.
        self._env = lmdb.open(
            str(folder), map_size=MAP_BYTES, metasync=False, readahead=False, max_readers=16, max_dbs=1
        )
        self._horizon = horizon
        self._by_time = self._env.open_db(b"by time")

    def position(self) -> str:
        with self._env.begin() as txn:
            return bytes(txn.get(_POSITION, b"")).decode()

    def __len__(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._by_time)["entries"])

    def judge(self, rows: pa.Table, position: str) -> npt.NDArray[np.bool_]:
        keys = rows["dedupe_key"].to_pylist()
        coordinates = _coordinates_of(rows)
        with self._env.begin(write=True) as txn:
            told = bytes(txn.get(_COPIES, b""))
            if position and txn.get(_POSITION) == position.encode():
                places = {told[i : i + _PLACE_BYTES] for i in range(0, len(told), _PLACE_BYTES)}
                return np.array([own not in places for own in coordinates], dtype=bool)
            first = np.zeros(len(keys), dtype=bool)
            for i in sorted(range(len(keys)), key=coordinates.__getitem__):
                first[i] = self._counts(txn, keys[i], coordinates[i])
            txn.put(_COPIES, b"".join(own for own, counts in zip(coordinates, first, strict=True) if not counts))
            txn.put(_POSITION, position.encode())
            if coordinates:
                self._forget(txn, _TIME.unpack_from(max(coordinates))[0] - self._horizon)
        return first

    def copy(self, folder: Path) -> str:
        position = self.position()  # first: the copy holds at least this much
        folder.mkdir(parents=True)
        self._env.copy(str(folder), compact=True)
        return position

    def close(self) -> None:
        self._env.close()

    def _counts(self, txn: lmdb.Transaction, key: bytes, own: bytes) -> bool:
        found = bytes(txn.get(key, b""))
        at = own[: _TIME.size]
        if not found:
            counts, entry = True, own + at
        else:
            place, last = found[:_PLACE_BYTES], found[_PLACE_BYTES:]
            counts = place == own or _TIME.unpack(last)[0] < _TIME.unpack(at)[0] - self._horizon
            entry = (own if counts else place) + max(last, at)
            txn.delete(last + key, db=self._by_time)
        txn.put(key, entry)
        txn.put(entry[_PLACE_BYTES:] + key, b"", db=self._by_time)
        return counts

    def _forget(self, txn: lmdb.Transaction, before: int) -> None:
        cursor = txn.cursor(self._by_time)
        while cursor.first():
            found = bytes(cursor.key())
            if _TIME.unpack_from(found)[0] >= before:
                return
            txn.delete(found[_TIME.size :])
            cursor.delete()


def _coordinates_of(rows: pa.Table) -> list[bytes]:
    """Each row's place in bronze as bytes that sort in bronze's order."""
    times = pc.cast(rows["bronze_at"], pa.int64()).to_pylist()
    topics = rows["topic"].to_pylist()
    places = {name: place_of(name) for name in set(topics)}
    pack = _COORDINATES.pack
    columns = (times, topics, rows["partition"].to_pylist(), rows["offset"].to_pylist())
    return [pack(at, places[topic], partition, offset) for at, topic, partition, offset in zip(*columns, strict=True)]
