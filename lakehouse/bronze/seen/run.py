"""A run: entries sorted by key in a file that is never changed, with a filter that tells what is not in it.

Nearly every event is new, so what has to be quick is a no: the filter (Bloom, 1970; about one wrong maybe in a hundred)
says it without a look at the entries. Both are mapped into memory, and so cost what the system can spare.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lakehouse.bronze.seen.entries import ENTRY_BYTES, TYPES, Column, Entries, Indices, merged_column, order_of

_HEAD = struct.Struct("<8sQQ")  # magic, entries, words of the filter
_MAGIC = b"MRSEEN1\n"
_WORD_BITS = 64
_BITS_A_KEY = 10  # at least; at most twice as many
_PROBES = 4


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
