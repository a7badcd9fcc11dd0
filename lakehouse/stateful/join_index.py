"""What a join remembers: every event of both sides by join key and time, in LMDB, which reads them in order.

Each event carries the number of the step that entered it, so that entering a step again tells the same changes: what
the join was before this step, what it is now.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pyarrow as pa

from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Product
from lakehouse.operators.base import times

MAP_BYTES = 1 << 40  # address space, not disk
LEFT, RIGHT = 0, 1
_BIAS = 1 << 63  # times before 1970 sort before later ones
_KEY = struct.Struct(">16sBQ16s")
_STEP = struct.Struct(">q")
_TIMED = struct.Struct(">QB16s16s")
_POSITION = b"\x00position"
_LAST = b"\xff" * 16
_FIRST = b"\x00" * 16


@dataclass(frozen=True, slots=True)
class PairChange:
    """A row that the join gained or lost."""

    left: str  # the left event's columns as JSON
    right: str | None  # the right one's; None if the left one stands alone
    sign: int  # 1 or -1


class JoinIndex:
    """Both sides of one join; the product's retention bounds what is remembered."""

    def __init__(self, folder: Path, product: Product, *, readonly: bool = False) -> None:
        if not readonly:
            folder.mkdir(parents=True, exist_ok=True)
        self._within = product.within_ms * 1000
        self._outer = product.kind == "left_outer"
        self._first = product.match == "first"
        self._env = lmdb.open(
            str(folder),
            map_size=MAP_BYTES,
            metasync=False,
            readahead=False,
            max_readers=16,
            max_dbs=2,
            readonly=readonly,
        )
        self._events = self._env.open_db(b"events", create=not readonly)
        self._by_time = self._env.open_db(b"by time", create=not readonly) if product.retention else None

    def position(self) -> str:
        """What was given to the last :meth:`enter`; empty for a new index."""
        with self._env.begin() as txn:
            return bytes(txn.get(_POSITION, b"")).decode()

    def __len__(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._events)["entries"])

    def enter(self, rows: pa.Table, step: int, position: str, *, changes: bool = True) -> list[PairChange]:
        """Remember a step's events and tell what they change.

        Args:
            rows: columns ``side``, ``join_key`` (16 bytes, or null: equal to nothing), ``at`` (timestamp),
                ``dedupe_key`` (16 bytes) and ``body`` (JSON); each event once.
            step: its number, higher than those before; a step that is entered again must have the same rows.
            position: stored with the entries in one transaction.
            changes: whether to tell.
        """
        keys = self._keys(rows)
        bodies = rows["body"].to_pylist()
        mark = _STEP.pack(step)
        with self._env.begin(write=True) as txn:
            for key, body in zip(keys, bodies, strict=True):
                if key is not None:
                    txn.put(key, mark + body.encode(), db=self._events, overwrite=False)
                    if self._by_time is not None:
                        join_key, side, at, dedupe_key = _KEY.unpack(key)
                        txn.put(_TIMED.pack(at, side, join_key, dedupe_key), b"", db=self._by_time)
            txn.put(_POSITION, position.encode())
            return list(self._changes(txn, [key for key in keys if key is not None], step)) if changes else []

    def lookup(self, join_key: bytes) -> list[tuple[int, int, str]]:
        """Side, time (microseconds since the epoch) and JSON of all events of a key: left ones first, by time."""
        found = []
        with self._env.begin() as txn:
            for key, value in _between(txn.cursor(self._events), join_key + b"\x00", join_key + b"\x02"):
                _, side, at, _ = _KEY.unpack(key)
                found.append((side, at - _BIAS, _parts(value)[1]))
        return found

    def forget(self, before: int) -> int:
        """Remove events that happened before this time (microseconds since the epoch); returns how many."""
        if self._by_time is None:
            return 0
        removed = 0
        with self._env.begin(write=True) as txn:
            cursor = txn.cursor(self._by_time)
            while cursor.first():
                at, side, join_key, dedupe_key = _TIMED.unpack(cursor.key())
                if at - _BIAS >= before:
                    break
                txn.delete(_KEY.pack(join_key, side, at, dedupe_key), db=self._events)
                cursor.delete()
                removed += 1
        return removed

    def close(self) -> None:
        self._env.close()

    def _keys(self, rows: pa.Table) -> list[bytes | None]:
        columns = (rows[name].to_pylist() for name in ("side", "join_key", "dedupe_key"))
        keys: list[bytes | None] = []
        for side, join_key, dedupe_key, at in zip(*columns, times(rows["at"]).tolist(), strict=True):
            if join_key is None and side == RIGHT:
                keys.append(None)
            else:  # a left event that is equal to nothing stands under a name of its own
                keys.append(_KEY.pack(join_key or dedupe_key, side, at + _BIAS, dedupe_key))
        return keys

    def _changes(self, txn: lmdb.Transaction, keys: list[bytes], step: int) -> Iterator[PairChange]:
        for key in sorted(self._lefts(txn, keys)):
            join_key, _, at, _ = _KEY.unpack(key)
            entered, left = _parts(bytes(txn.get(key, b"", db=self._events)))
            upto = min(at + self._within, (1 << 64) - 1)
            rights = [
                _parts(value)
                for _, value in _between(
                    txn.cursor(self._events),
                    _KEY.pack(join_key, RIGHT, at, _FIRST),
                    _KEY.pack(join_key, RIGHT, upto, _LAST),
                )
            ]
            before = self._of([n for n, (b, _) in enumerate(rights) if b < step]) if entered < step else []
            now = self._of(list(range(len(rights))))
            yield from (PairChange(left, _body(rights, n), -1) for n in before if n not in now)
            yield from (PairChange(left, _body(rights, n), 1) for n in now if n not in before)

    def _lefts(self, txn: lmdb.Transaction, keys: list[bytes]) -> set[bytes]:
        """Left events among ``keys``, and those that its right ones may belong to."""
        found: set[bytes] = set()
        for key in keys:
            join_key, side, at, _ = _KEY.unpack(key)
            if side == LEFT:
                found.add(key)
                continue
            low = _KEY.pack(join_key, LEFT, max(0, at - self._within), _FIRST)
            high = _KEY.pack(join_key, LEFT, at, _LAST)
            found.update(left for left, _ in _between(txn.cursor(self._events), low, high))
        return found

    def _of(self, rights: list[int]) -> list[int | None]:
        """The rows of a left event whose right ones, in order of time, have these numbers."""
        chosen: list[int | None] = list(rights[:1] if self._first else rights)
        return chosen or ([None] if self._outer else [])


def index_folder(lake: Lake, product: str) -> Path:
    return lake.state / "joins" / product


def _between(cursor: lmdb.Cursor, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Entries from ``low`` to ``high``, both included."""
    if cursor.set_range(low):
        for found in cursor:
            key = bytes(found[0])
            if key > high:
                return
            yield key, bytes(found[1])


def _parts(value: bytes) -> tuple[int, str]:
    return _STEP.unpack_from(value)[0], value[_STEP.size :].decode()


def _body(rights: list[tuple[int, str]], number: int | None) -> str | None:
    return None if number is None else rights[number][1]
