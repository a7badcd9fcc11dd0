"""The index of seen events with a horizon: it forgets an id that did not come again for so long.

A row counts if no copy of it stands in bronze within the horizon before it, which :func:`lakehouse.batch.build` asks of
bronze itself in the same words. What the last batch was told is kept, because forgetting makes a second answer differ.
"""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa

from lakehouse.bronze.seen import POSITION, SeenIndex, Verdict, coordinates_of
from lakehouse.contract.pipeline import Source

_TIME = struct.Struct(">q")
_PLACE_BYTES = 28  # of coordinates, which begin with bronze_at
_COPIES = b"\x00copies"


def seen_index(folder: Path, source: Source) -> SeenIndex:
    """The index that a source asks for."""
    return HorizonIndex(folder, source.dedupe_horizon_ms * 1000) if source.dedupe_horizon_ms else SeenIndex(folder)


class HorizonIndex(SeenIndex):
    """First occurrences, each for as long as copies of it keep coming.

    An entry is the coordinates of the copy that counts, then ``bronze_at`` of the copy that came last.

    Args:
        folder: where its files lie.
        horizon: microseconds of ``bronze_at``.
    """

    def __init__(self, folder: Path, horizon: int) -> None:
        super().__init__(folder)
        self._horizon = horizon
        self._by_time = self._env.open_db(b"by time")

    def __len__(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._by_time)["entries"])

    def judge(self, rows: pa.Table, position: str) -> Verdict:
        """See :meth:`SeenIndex.judge`."""
        keys = rows["dedupe_key"].to_pylist()
        coordinates = coordinates_of(rows)
        with self._env.begin(write=True) as txn:
            told = bytes(txn.get(_COPIES, b""))
            if position and txn.get(POSITION) == position.encode():
                places = {told[i : i + _PLACE_BYTES] for i in range(0, len(told), _PLACE_BYTES)}
                first = np.array([own not in places for own in coordinates], dtype=bool)
                return Verdict(first, len(keys) - int(first.sum()))
            first = np.zeros(len(keys), dtype=bool)
            for i in sorted(range(len(keys)), key=coordinates.__getitem__):
                first[i] = self._counts(txn, keys[i], coordinates[i])
            txn.put(_COPIES, b"".join(own for own, counts in zip(coordinates, first, strict=True) if not counts))
            txn.put(POSITION, position.encode())
            if coordinates:
                self._forget(txn, _TIME.unpack_from(max(coordinates))[0] - self._horizon)
        return Verdict(first, len(keys) - int(first.sum()))

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
