"""Bloom filter (Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970).

In the binary form of Apache DataSketches' ``BloomFilter`` (Java, on Spark's class path), which their Python package
lacks: XXH64 hashes (Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) with seed 42, the second
seeded with the first, combined as Kirsch and Mitzenmacher do. Spark computes both in SQL, as ``xxhash64(item)`` and
``xxhash64(item, item)``. A point query hashes one item, so plain Python is fast enough here.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from lakehouse.errors import BadSketch

_HEADER = struct.Struct("<BBBBHHqiiq")  # longs of preamble, version, family, flags, hashes, -, seed, words, -, bits set
_EMPTY_SIZE = 24
_VERSION, _FAMILY, _EMPTY_FLAG = 1, 21, 4
SEED = 42  # of Spark's xxhash64
_MASK = 2**64 - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


class BloomFilter:
    """A set without false negatives, and with a known share of false positives.

    Args:
        words: of 64 bits each.
        hashes: bits set an item.
    """

    def __init__(self, words: int, hashes: int) -> None:
        self._words: npt.NDArray[np.uint64] = np.zeros(words, np.uint64)
        self.hashes = hashes

    @classmethod
    def sized(cls, items: int, fpp: float) -> BloomFilter:
        """An empty filter that holds ``items`` distinct items with a share ``fpp`` of false positives."""
        bits = math.ceil(-items * math.log(fpp) / math.log(2) ** 2)
        hashes = max(1, min(64, math.ceil(-math.log2(fpp))))
        return cls(max(1, math.ceil(bits / 64)), hashes)

    @property
    def bits(self) -> int:
        """Size in bits."""
        return len(self._words) * 64

    @property
    def bits_set(self) -> int:
        """Bits that are one."""
        return int.from_bytes(self._words.tobytes(), "little").bit_count()

    @property
    def fpp(self) -> float:
        """Share of false positives at its present fill."""
        return float((self.bits_set / self.bits) ** self.hashes)

    @property
    def estimate(self) -> float:
        """Distinct items in it (Swamidass and Baldi, J. Chem. Inf. Model. 2007); infinite for a full one."""
        share = self.bits_set / self.bits
        return -self.bits / self.hashes * math.log1p(-share) if share < 1 else math.inf

    def update(self, item: str) -> None:
        """Add an item."""
        first = xxh64(item.encode())
        self.update_hashed(np.array([first], np.uint64), np.array([xxh64(item.encode(), first)], np.uint64))

    def update_hashed(self, first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> None:
        """Add items by their hashes: with seed 42, and with the first hash as the seed."""
        for number in range(1, self.hashes + 1):
            place = ((first + np.uint64(number) * second) >> np.uint64(1)) % np.uint64(self.bits)
            bit = np.uint64(1) << (place & np.uint64(63))
            np.bitwise_or.at(self._words, (place >> np.uint64(6)).astype(np.int64), bit)

    def query(self, item: str) -> bool:
        """Whether the item may be in; False is certain."""
        first = xxh64(item.encode(), SEED)
        second = xxh64(item.encode(), first)
        for number in range(1, self.hashes + 1):
            place = ((first + number * second) % 2**64 >> 1) % self.bits
            if not int(self._words[place >> 6]) >> (place & 63) & 1:
                return False
        return True

    def merge(self, other: BloomFilter) -> None:
        """Add all items of the other. Raises BadSketch: the filters differ in size or in hashes."""
        if (self.bits, self.hashes) != (other.bits, other.hashes):
            raise BadSketch(f"filters of {self.bits} and {other.bits} bits do not merge")
        self._words |= other._words

    def serialize(self) -> bytes:
        """DataSketches' binary form."""
        count = self.bits_set
        size, flags = (4, 0) if count else (3, _EMPTY_FLAG)
        header = _HEADER.pack(size, _VERSION, _FAMILY, flags, self.hashes, 0, SEED, len(self._words), 0, count)
        return header + self._words.astype("<u8").tobytes() if count else header[:_EMPTY_SIZE]

    @classmethod
    def deserialize(cls, data: bytes) -> BloomFilter:
        """The filter that :meth:`serialize`, or DataSketches in another language, wrote.

        Raises:
            BadSketch: the bytes are not such a filter, or it has another seed.
        """
        if len(data) < _EMPTY_SIZE:
            raise BadSketch("too short for a Bloom filter")
        fields = _HEADER.unpack(data[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        _, version, family, flags, hashes, _, seed, words, _, _ = fields
        if (version, family, seed) != (_VERSION, _FAMILY, SEED) or words < 1 or hashes < 1:
            raise BadSketch("not a Bloom filter of Apache DataSketches with seed 42")
        if flags & _EMPTY_FLAG:
            return cls(words, hashes)
        if len(data) != _HEADER.size + 8 * words:
            raise BadSketch("a Bloom filter of another length than it says")
        found = cls(0, hashes)
        found._words = np.frombuffer(data, "<u8", offset=_HEADER.size).astype(np.uint64)
        return found


def xxh64(data: bytes, seed: int = SEED) -> int:
    """The hash, from 0 to 2^64 - 1; ``seed`` is taken modulo 2^64."""
    seed &= _MASK
    length, at = len(data), 0
    if length >= 32:
        lanes = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
        while at <= length - 32:
            for lane in range(4):
                word = int.from_bytes(data[at + 8 * lane : at + 8 * lane + 8], "little")
                lanes[lane] = _round(lanes[lane], word)
            at += 32
        found = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = (seed + _P5) & _MASK
    return _finish((found + length) & _MASK, data, at)


def _finish(found: int, data: bytes, at: int) -> int:
    """Hash the last bytes, fewer than 32, and mix."""
    while at + 8 <= len(data):
        found ^= _round(0, int.from_bytes(data[at : at + 8], "little"))
        found = (_rotate(found, 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= len(data):
        found ^= int.from_bytes(data[at : at + 4], "little") * _P1 & _MASK
        found = (_rotate(found, 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        found ^= byte * _P5 & _MASK
        found = _rotate(found, 11) * _P1 & _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotate(value: int, by: int) -> int:
    value &= _MASK
    return (value << by | value >> 64 - by) & _MASK
