"""XXH64 of short texts (Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).

What Spark calls ``xxhash64`` is this with seed 42 over the UTF-8 bytes, and Apache DataSketches' Bloom filter hashes
with it too; a point query hashes one item, so that plain Python is quick enough.
"""

from __future__ import annotations

SEED = 42
"""Spark's."""

_MASK = 2**64 - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


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
    """Take in the last bytes, fewer than 32, and mix."""
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
