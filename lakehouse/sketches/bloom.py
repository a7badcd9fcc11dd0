"""Bloom filter (Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970).

In the binary form of Apache DataSketches' ``BloomFilter`` (Java, on Spark's class path), which their Python package
lacks: XXH64 hashes with seed 42, the second seeded with the first, combined as Kirsch and Mitzenmacher do. Spark makes
both hashes in SQL: ``xxhash64(item)`` and ``xxhash64(item, item)``.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import numpy.typing as npt

from lakehouse.errors import BadSketch
from lakehouse.sketches.xxhash import SEED, xxh64

_HEADER = struct.Struct("<BBBBHHqiiq")  # longs of preamble, version, family, flags, hashes, -, seed, words, -, bits set
_EMPTY_SIZE = 24
_VERSION, _FAMILY, _EMPTY_FLAG = 1, 21, 4


class BloomFilter:
    """A set that never forgets an item, and takes a known share of others for its own.

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
        """Share of items never put in that it takes for its own, as full as it is."""
        return float((self.bits_set / self.bits) ** self.hashes)

    @property
    def estimate(self) -> float:
        """Distinct items in it (Swamidass and Baldi, J. Chem. Inf. Model. 2007); infinite for a full one."""
        share = self.bits_set / self.bits
        return -self.bits / self.hashes * math.log1p(-share) if share < 1 else math.inf

    def update(self, item: str) -> None:
        """Put an item in."""
        first = xxh64(item.encode())
        self.update_hashed(np.array([first], np.uint64), np.array([xxh64(item.encode(), first)], np.uint64))

    def update_hashed(self, first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> None:
        """Put items in by their hashes: with seed 42, and with the first hash as the seed."""
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
        """Put all items of the other in.

        Raises:
            BadSketch: the filters differ in size or in hashes.
        """
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
        """What :meth:`serialize` or DataSketches in another language wrote.

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
