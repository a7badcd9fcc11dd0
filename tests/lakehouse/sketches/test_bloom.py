"""The Bloom filter and its hash. Java's own reads and writes the same bits: see operators/test_spark.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.errors import BadSketch
from lakehouse.sketches.kinds import BloomFilter, xxh64

words = st.lists(st.text(), max_size=40)


@pytest.mark.parametrize(
    ("data", "seed", "expected"),
    [  # of the specification's reference implementation
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"abc", 0, 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64(data: bytes, seed: int, expected: int) -> None:
    assert xxh64(data, seed) == expected


def put(found: BloomFilter, word: str) -> None:
    """Add an item as Spark hashes it."""
    first = xxh64(word.encode())
    found.update_hashed(np.array([first], np.uint64), np.array([xxh64(word.encode(), first)], np.uint64))


@settings(max_examples=30)
@given(words, words, st.integers(1, 200), st.sampled_from([0.5, 0.01, 1e-6]))
def test_nothing_that_was_put_in_is_missing(one: list[str], other: list[str], items: int, fpp: float) -> None:
    filters = [BloomFilter.sized(items, fpp) for _ in range(2)]
    for found, some in zip(filters, (one, other), strict=True):
        for word in some:
            put(found, word)
    filters[0].merge(BloomFilter.deserialize(filters[1].serialize()))
    assert all(filters[0].query(word) for word in one + other)
    again = BloomFilter.deserialize(filters[0].serialize())
    assert again.serialize() == filters[0].serialize()
    assert (again.bits, again.hashes, again.bits_set) == (filters[0].bits, filters[0].hashes, filters[0].bits_set)


def test_an_empty_filter_holds_nothing() -> None:
    found = BloomFilter.sized(100, 0.01)
    assert not found.query("a")
    assert len(found.serialize()) == 24
    assert (found.fpp, found.estimate) == (0.0, 0.0)


def test_a_full_filter_says_so() -> None:
    found = BloomFilter(1, 1)
    for number in range(2_000):
        put(found, str(number))
    assert found.bits_set == 64
    assert found.fpp == 1.0
    assert math.isinf(found.estimate)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 23,
        b"x" * 40,
        BloomFilter(2, 3).serialize().replace(b"\x2a", b"\x2b"),  # another seed
        bytes([4, 1, 21, 0, 3, 0, 0, 0, 42, *bytes(7), 2, *bytes(7), 1, *bytes(7), 1]),  # cut short
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadSketch):
        BloomFilter.deserialize(data)


def test_filters_of_two_sizes_do_not_merge() -> None:
    with pytest.raises(BadSketch, match="do not merge"):
        BloomFilter(1, 3).merge(BloomFilter(2, 3))
