"""Entries of the index of seen events: keys and coordinates as columns, in memory and in files that never change.

Everything is done to many at once. Nearly every event is new, so what has to be quick is a no: the filter of a file
(Bloom, 1970; about one wrong maybe in a hundred) says it without a look at the entries. Both are mapped into memory,
and so cost what the system can spare.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lakehouse.contract.lake import FILE_TOPIC

_DIGITS = 15  # of a fingerprint: 60 bits
_HEXADECIMAL = frozenset("0123456789abcdef")
Column = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]
TYPES = ("<u8", "<u8", "<i8", "<i8", "<i8", "<u4")
ENTRY_BYTES = sum(np.dtype(kind).itemsize for kind in TYPES)
_HEAD = struct.Struct("<8sQQ")  # magic, entries, words of the filter
_MAGIC = b"MRSEEN1\n"
_WORD_BITS = 64
_BITS_A_KEY = 10  # at least; at most twice as many
_PROBES = 4


@dataclass(frozen=True, slots=True)
class Entries:
    """Columns of one length.

    Attributes:
        high, low: the key's first and last eight bytes. Keys are digests: any bit of them is as good as a random one.
        place: the topic's or file's name (:func:`place_of`).
    """

    high: Column
    low: Column
    at: Column
    place: Column
    offset: Column
    partition: Column

    @classmethod
    def of(cls, rows: pa.Table) -> Entries:
        """Entries of rows with the columns of :data:`~lakehouse.bronze.seen.JUDGED`."""
        keys = pc.cast(rows["dedupe_key"], pa.binary(16)).combine_chunks()
        chunks = keys.chunks if isinstance(keys, pa.ChunkedArray) else [keys]
        raw = b"".join(bytes(c.buffers()[1])[c.offset * 16 : (c.offset + len(c)) * 16] for c in chunks if len(c))
        halves = np.frombuffer(raw, dtype=">u8").reshape(-1, 2)
        topics = pc.dictionary_encode(rows["topic"].cast(pa.string())).combine_chunks()
        if isinstance(topics, pa.ChunkedArray):
            topics = topics.chunk(0) if topics.num_chunks else pa.array([], pa.string()).dictionary_encode()
        places = np.array([place_of(name) for name in topics.dictionary.to_pylist()], dtype="<i8")
        columns = (
            halves[:, 0],
            halves[:, 1],
            pc.cast(rows["bronze_at"], pa.int64()).to_numpy(),
            places[topics.indices.to_numpy(zero_copy_only=False)] if len(places) else places,
            rows["offset"].to_numpy(),
            rows["partition"].to_numpy(),
        )
        return cls(*(np.ascontiguousarray(c, dtype=kind) for c, kind in zip(columns, TYPES, strict=True)))

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> Entries:
        """What :meth:`to_bytes` gave."""
        count, at = len(data) // ENTRY_BYTES, 0
        columns = []
        for kind in TYPES:
            columns.append(np.frombuffer(data, dtype=kind, count=count, offset=at))
            at += columns[-1].nbytes
        return cls(*columns)

    def to_bytes(self) -> bytes:
        """One column after the other."""
        return b"".join(column.tobytes() for column in self.columns)

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __len__(self) -> int:
        return len(self.high)

    def take(self, which: npt.NDArray[Any]) -> Entries:
        """Those at these places, or where this is true."""
        return Entries(*(column[which] for column in self.columns))

    def order(self) -> Indices:
        """Their places by key, and those of one key as they stand in bronze."""
        return np.lexsort((self.offset, self.partition, self.place, self.at, self.low, self.high))

    def same_rows(self, others: Entries) -> npt.NDArray[np.bool_]:
        """Where both name the same row."""
        same = (self.at == others.at) & (self.offset == others.offset)
        return np.asarray(same & (self.partition == others.partition) & (self.place == others.place))

    def find(self, high: Column, low: Column) -> Indices:
        """Where the keys stand in these entries, which are sorted by ``high``; -1: they do not."""
        at = np.searchsorted(self.high, high)
        found = np.full(len(high), -1, dtype=np.intp)
        left = np.flatnonzero(at < len(self))
        while len(left):
            left = left[self.high[at[left]] == high[left]]
            hit = self.low[at[left]] == low[left]
            found[left[hit]] = at[left[hit]]
            left = left[~hit]  # of two keys with one first half, the other
            at[left] += 1
            left = left[at[left] < len(self)]
        return found


def merged(parts: Sequence[Entries]) -> Entries:
    """Entries of parts that are sorted by ``high`` as one such part."""
    order = order_of(parts)
    return Entries(*(merged_column(parts, number, order) for number in range(len(TYPES))))


def order_of(parts: Sequence[Entries]) -> Indices:
    """How the entries of sorted parts, one part behind the other, come to be sorted by ``high``."""
    return np.argsort(np.concatenate([part.high for part in parts]), kind="stable")  # quick: it sees what is in order


def merged_column(parts: Sequence[Entries], number: int, order: Indices) -> Column:
    """One column of the parts in this order."""
    return np.concatenate([part.columns[number] for part in parts])[order]


def place_of(name: str) -> int:
    """A topic or file name as 63 bits that are the same in every process.

    Files, of which one commit may hold many, sort as their names do, which are fingerprints: a rebuild of products from
    bronze sorts copies by name, and has to choose the same.
    """
    if name.startswith(FILE_TOPIC):
        digits = name.removeprefix(FILE_TOPIC)[:_DIGITS]
        if len(digits) == _DIGITS and _HEXADECIMAL.issuperset(digits):
            return int(digits, 16)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


class Damaged(Exception):
    """A file is not what was written."""


class Run:
    """An open run. It stays readable when its file is removed."""

    def __init__(self, path: Path) -> None:
        """Map a run's file.

        Raises:
            Damaged: it is cut off, or no run.
            OSError: it is not there.
        """
        self.path = path
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size
            if len(head) < _HEAD.size:
                raise Damaged(f"{path} is cut off")
            magic, count, words = _HEAD.unpack(head)
            if magic != _MAGIC or size != _HEAD.size + count * ENTRY_BYTES + _padding(count) + words * 8:
                raise Damaged(f"{path} is no run of {count} entries")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_RANDOM)
        end = size - words * 8
        self.entries = Entries.from_bytes(memoryview(mapped)[_HEAD.size : _HEAD.size + count * ENTRY_BYTES])
        self._filter = np.frombuffer(mapped, dtype="<u8", count=words, offset=end)

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, high: Column, low: Column) -> Indices:
        """Where the keys stand in :attr:`entries`; -1: they do not."""
        found = np.full(len(high), -1, dtype=np.intp)
        maybe = _maybe(self._filter, high, low)
        if len(maybe):
            found[maybe] = self.entries.find(high[maybe], low[maybe])
        return found

    @staticmethod
    def write(path: Path, parts: Sequence[Entries], stopped: Callable[[], bool] = lambda: False) -> Run | None:
        """Merge parts, each sorted by ``high``, durably into a file of this name: a column at a time, to save memory.

        Returns:
            None: stopped on the way, and nothing is left.
        """
        part = path.with_suffix(".part")
        order = order_of(parts)
        words = _words(len(order))
        keys: list[Column] = []
        try:
            with part.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, len(order), words))
                for number in range(len(TYPES)):
                    if stopped():
                        return None
                    column = merged_column(parts, number, order)
                    file.write(column.tobytes())
                    if len(keys) < 2:
                        keys.append(column)
                file.write(bytes(_padding(len(order))))
                file.write(_filter_of(keys[0], keys[1], words).tobytes())
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return Run(path)


def _words(count: int) -> int:
    """Words of a filter for so many keys: a power of two."""
    return max(1, (1 << (count * _BITS_A_KEY).bit_length()) // _WORD_BITS)


def _padding(count: int) -> int:
    """Bytes behind the entries, so that the filter's words are aligned."""
    return -count * ENTRY_BYTES % 8


def _filter_of(high: Column, low: Column, count: int) -> npt.NDArray[np.uint64]:
    words = np.zeros(count, dtype="<u8")
    for probe in range(_PROBES):
        word, bit = _bit(high, low, probe, count)
        np.bitwise_or.at(words, word, bit)
    return words


def _maybe(words: npt.NDArray[np.uint64], high: Column, low: Column) -> Indices:
    """Indices of the keys that the filter does not rule out."""
    left = np.arange(len(high))
    for probe in range(_PROBES):
        word, bit = _bit(high[left], low[left], probe, len(words))
        left = left[(words[word] & bit) != 0]
    return left


def _bit(high: Column, low: Column, probe: int, words: int) -> tuple[Column, Column]:
    """Which word, and which bit of it (Kirsch and Mitzenmacher, 2006: two hashes make as many as are wanted)."""
    place = (low + np.uint64(probe) * (high | np.uint64(1))) & np.uint64(words * _WORD_BITS - 1)
    return place >> np.uint64(6), np.uint64(1) << (place & np.uint64(63))
