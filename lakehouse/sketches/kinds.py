"""The sketch of each operator, merged from any number of rows, and the questions that it answers with bounds.

``distinct``: HyperLogLog (Flajolet et al., AofA 2007). ``top_n``: frequent items. ``quantiles`` and ``skew``: KLL.
``frequency``: Count-Min (Cormode and Muthukrishnan, "An improved data stream summary", J. Algorithms 2005);
DataSketches answers point queries, ranges and inner products are computed here. A Count-Min estimate is never too low,
and too high by more than ``2 N / width`` (N: the weight of all) with a probability of at most ``2^-depth``: 1.6 % of N
at 99.6 % for 8 times 128.

``membership``: a Bloom filter (Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970) in the
binary form of Apache DataSketches' ``BloomFilter`` (Java, on Spark's class path), which their Python package lacks:
XXH64 hashes (Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) with seed 42, the second seeded
with the first, combined as Kirsch and Mitzenmacher do. Spark computes both in SQL, as ``xxhash64(item)`` and
``xxhash64(item, item)``. A point query hashes one item, so plain Python is fast enough here.
"""

from __future__ import annotations

import json
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasketches
import numpy as np
import numpy.typing as npt

from lakehouse.errors import BadSketch

Row = Mapping[str, Any]
SIGMAS = 3
"""Standard deviations between an HLL estimate and its bounds."""
YES, NO, MAYBE = "yes", "no", "maybe"
"""Whether an item is in: certainly, certainly not, or with the probability of a false positive."""
_PREAMBLE = 16  # bytes of a Count-Min sketch before its total weight and counters, all doubles; an empty one ends here


@dataclass(frozen=True, slots=True)
class Question:
    """A question; an empty one asks for what the sketch can tell by itself."""

    item: str | None = None  # its count, or whether it is in
    low: int | None = None  # the count of items from here …
    high: int | None = None  # … to here, both included
    quantiles: tuple[float, ...] = ()  # values at these ranks
    rank: float | None = None  # the share of values that are no greater than this one
    n: int = 10  # number of most frequent items


@dataclass(frozen=True, slots=True)
class Answer:
    """An estimate with its bounds."""

    what: str  # the item, range, quantile or measure
    estimate: float | str
    lower: float | None = None
    upper: float | None = None
    confidence: float = 1.0  # probability, at least, that the truth lies within; 1 for certain bounds


class Sketch(ABC):
    """The sketch of a window and group, or of several in one: empty at first."""

    columns: tuple[str, ...] = ("sketch",)  # that :meth:`add` reads

    @abstractmethod
    def __init__(self, parameters: Row) -> None:
        """``parameters`` of the product are those that its table's property has."""

    @abstractmethod
    def add(self, row: Row) -> None:
        """Merge in what a row of the table holds, whose ``sketch`` is not null."""

    @abstractmethod
    def answers(self, question: Question) -> list[Answer]:
        """Its answers. Raises BadSketch: it cannot answer this."""

    @abstractmethod
    def serialize(self) -> dict[str, bytes]:
        """The sketches by column, in DataSketches' binary form."""


def sketch_of(parameters: str) -> Sketch:
    """An empty sketch like those of a table whose property is this JSON. Raises BadSketch: it is not one of ours."""
    try:
        found = json.loads(parameters)
        return _KINDS[found["operator"]](found)
    except (ValueError, KeyError, TypeError) as error:
        raise BadSketch(f"the table does not say which sketches it holds: {error}") from None


def _only(question: Question, *allowed: str) -> None:
    asked = {"item": question.item, "range": question.low, "quantile": question.quantiles, "rank": question.rank}
    for name, value in asked.items():
        if value not in (None, ()) and name not in allowed:
            raise BadSketch(f"its sketches do not answer --{name}; they answer: {', '.join(allowed) or 'no question'}")


class DistinctSketch(Sketch):
    """HyperLogLog."""

    def __init__(self, parameters: Row) -> None:
        self._union = datasketches.hll_union(parameters["lg_k"])

    def add(self, row: Row) -> None:
        self._union.update(datasketches.hll_sketch.deserialize(row["sketch"]))

    def result(self) -> datasketches.hll_sketch:
        """See :func:`canonical_hll`."""
        return canonical_hll(self._union)

    def answers(self, question: Question) -> list[Answer]:
        _only(question)
        sketch = self.result()
        bounds = (sketch.get_lower_bound(SIGMAS), sketch.get_upper_bound(SIGMAS))
        return [Answer("distinct items", sketch.get_estimate(), *bounds, 0.997)]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self.result().serialize_compact()}


def canonical_hll(union: datasketches.hll_union) -> datasketches.hll_sketch:
    """The union's sketch, with an estimate that depends on the set of items and not on their order.

    A sketch that saw its items one by one, or got them from small sketches, estimates by its history (HIP); one that
    was merged with a full one does not. So it is merged with itself. Four bits a slot: 2 KB for ``lg_k`` 12.
    """
    sketch = union.get_result(datasketches.tgt_hll_type.HLL_8)
    twice = datasketches.hll_union(union.lg_config_k)
    twice.update(sketch)
    twice.update(sketch)
    return twice.get_result(datasketches.tgt_hll_type.HLL_4)


class TopSketch(Sketch):
    """Frequent items."""

    columns = ("sketch", "unseen")

    def __init__(self, parameters: Row) -> None:
        self.items: Any = None  # a datasketches.frequent_strings_sketch, which says itself how much it may track
        self.unseen = 0  # how often, at most, an item occurred that the sketch knows nothing of

    def add(self, row: Row) -> None:
        self.unseen += row["unseen"]
        found = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
        if self.items is None:
            self.items = found
        else:
            self.items.merge(found)

    def best(self, n: int) -> list[tuple[str, int, int, int]]:
        """The ``n`` most frequent items, each with its estimate and bounds: the same sketch gives the same order."""
        found = self.items.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        return sorted(found, key=lambda item: (-item[1], item[0]))[:n]

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item")
        if question.item is not None:
            item = question.item
            bounds = (self.items.get_lower_bound(item), self.items.get_upper_bound(item) + self.unseen)
            return [Answer(item, self.items.get_estimate(item), *bounds)]
        best = self.best(question.n)
        return [Answer(item, estimate, lower, upper + self.unseen) for item, estimate, lower, upper in best]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self.items.serialize()}


class FrequencySketch(Sketch):
    """Count-Min: of the items, and with ``range_bits`` of the items without their lowest bit, two bits, …"""

    def __init__(self, parameters: Row) -> None:
        bits = parameters.get("range_bits", 0)
        self.columns = ("sketch", *(f"sketch_{level}" for level in range(1, bits)))
        self._shape = (parameters["depth"], parameters["width"])
        self._ranges = bool(bits)
        self.levels: list[datasketches.count_min_sketch] = []

    def start(self) -> list[datasketches.count_min_sketch]:
        """Levels that have counted nothing; the first row that is added brings its own."""
        self.levels = [datasketches.count_min_sketch(*self._shape) for _ in self.columns]
        return self.levels

    def add(self, row: Row) -> None:
        found = [datasketches.count_min_sketch.deserialize(row[column]) for column in self.columns]
        if not self.levels:
            self.levels = found
            return
        for mine, other in zip(self.levels, found, strict=True):
            mine.merge(other)

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item", *(["range"] if self._ranges else []))
        if question.low is not None and question.high is not None:
            return [count_min_range(self.levels, question.low, question.high)]
        if question.item is None:
            return [Answer("items", self.levels[0].total_weight)]
        item = self._item(question.item)
        return [count_min_point(self.levels[0], item)]

    def serialize(self) -> dict[str, bytes]:
        return {column: sketch.serialize() for column, sketch in zip(self.columns, self.levels, strict=True)}

    def _item(self, text: str) -> str | int:
        if not self._ranges:
            return text
        try:
            return int(text)
        except ValueError:
            raise BadSketch(f"its items are integers, and {text!r} is none") from None


def inner_product(one: Sketch, other: Sketch) -> Answer:
    """See :func:`count_min_inner_product`. Raises BadSketch: they are not both of ``frequency``, or differ in shape."""
    if not isinstance(one, FrequencySketch) or not isinstance(other, FrequencySketch):
        raise BadSketch("only tables of frequency have inner products")
    return count_min_inner_product(one.levels[0], other.levels[0])


def count_min_point(sketch: datasketches.count_min_sketch, item: str | int) -> Answer:
    """The count of an item."""
    return _at_least(
        str(item), sketch.get_estimate(item), 2 * sketch.total_weight / sketch.num_buckets, sketch.num_hashes
    )


def count_min_range(levels: Sequence[datasketches.count_min_sketch], low: int, high: int) -> Answer:
    """The count of integers from ``low`` to ``high``, both included.

    Args:
        levels: sketches of the items shifted right by 0, 1, 2, … bits: a range is a sum of at most two blocks a level
            (dyadic decomposition, section 4.2 of the paper). The bound is the sum of theirs.
    """
    estimate = error = 0.0
    blocks = 0
    for level, block in dyadic(max(0, low), min(high, 2 ** len(levels) - 1), len(levels)):
        sketch = levels[level]
        estimate += sketch.get_estimate(block)
        error += 2 * sketch.total_weight / sketch.num_buckets
        blocks += 1
    total = levels[0].total_weight
    found = _at_least(f"{low}:{high}", min(estimate, total), error, levels[0].num_hashes)
    return replace(found, confidence=max(0.0, 1 - blocks * 2.0 ** -levels[0].num_hashes))


def dyadic(low: int, high: int, levels: int) -> Iterator[tuple[int, int]]:
    """Blocks ``(level, number)`` that make up ``low`` to ``high``: block b of level l is [b 2^l, (b + 1) 2^l - 1]."""
    while low <= high:
        level = min((low & -low).bit_length() - 1 if low else levels - 1, levels - 1)
        while low + (1 << level) - 1 > high:
            level -= 1
        yield level, low >> level
        low += 1 << level


def count_min_inner_product(one: datasketches.count_min_sketch, other: datasketches.count_min_sketch) -> Answer:
    """The sum over all items of their count here times their count there, e.g. the size of an equi-join.

    Raises:
        BadSketch: the sketches differ in depth, width or seed.
    """
    shapes = [(s.num_hashes, s.num_buckets, s.seed) for s in (one, other)]
    if shapes[0] != shapes[1]:
        raise BadSketch(f"sketches of {shapes[0]} and {shapes[1]} (depth, width, seed) have no inner product")
    estimate = float((counters(one) * counters(other)).sum(axis=1).min())
    return _at_least(
        "inner product", estimate, 2 * one.total_weight * other.total_weight / one.num_buckets, one.num_hashes
    )


def counters(sketch: datasketches.count_min_sketch) -> npt.NDArray[np.float64]:
    """The sketch's table, depth times width."""
    shape = (sketch.num_hashes, sketch.num_buckets)
    if sketch.is_empty():
        return np.zeros(shape)
    return np.frombuffer(sketch.serialize(), "<f8", offset=_PREAMBLE + 8).reshape(shape)


def _at_least(what: str, estimate: float, error: float, depth: int) -> Answer:
    return Answer(what, estimate, max(0.0, estimate - error), estimate, 1 - 2.0**-depth)


class MembershipSketch(Sketch):
    """A Bloom filter."""

    def __init__(self, parameters: Row) -> None:
        self.filter = BloomFilter.sized(parameters["items"], parameters["fpp"])
        self._empty = True

    def add(self, row: Row) -> None:
        found = BloomFilter.deserialize(row["sketch"])
        if self._empty:
            self.filter, self._empty = found, False
        else:
            self.filter.merge(found)

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item")
        if question.item is None:
            return [Answer("distinct items", self.filter.estimate), Answer("false positives", self.filter.fpp)]
        if not self.filter.query(question.item):
            return [Answer(question.item, NO)]
        return [Answer(question.item, MAYBE, confidence=1 - self.filter.fpp)]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self.filter.serialize()}


class QuantileSketch(Sketch):
    """KLL."""

    def __init__(self, parameters: Row) -> None:
        self._declared = tuple(parameters["quantiles"])
        self.values: Any = None  # a datasketches.kll_doubles_sketch

    def add(self, row: Row) -> None:
        found = datasketches.kll_doubles_sketch.deserialize(row["sketch"])
        if self.values is None:
            self.values = found
        else:
            self.values.merge(found)

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "quantile", "rank")
        sketch = self.values
        if sketch is None or sketch.is_empty():
            raise BadSketch("it has seen no values")
        error = sketch.normalized_rank_error(False) if sketch.is_estimation_mode() else 0.0
        confidence = 0.99 if error else 1.0
        if question.rank is not None:
            share = sketch.get_rank(question.rank, inclusive=True)
            bounds = (max(0.0, share - error), min(1.0, share + error))
            return [Answer(f"rank of {question.rank:g}", share, *bounds, confidence)]
        answers = []
        for rank in question.quantiles or self._declared:
            ranks = [rank, max(0.0, rank - error), min(1.0, rank + error)]
            value, lower, upper = sketch.get_quantiles(ranks, inclusive=True)
            answers.append(Answer(f"quantile {rank:g}", value, lower, upper, confidence))
        return answers

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self.values.serialize()}


_KINDS: dict[str, type[Sketch]] = {
    "top_n": TopSketch,
    "distinct": DistinctSketch,
    "frequency": FrequencySketch,
    "membership": MembershipSketch,
    "quantiles": QuantileSketch,
    "skew": QuantileSketch,
}


# --- the Bloom filter

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
        return len(self._words) * 64

    @property
    def bits_set(self) -> int:
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

    def update_hashed(self, first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> None:
        """Add items by their hashes (:func:`xxh64`): with seed 42, and with the first hash as the seed."""
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
        """What :meth:`serialize`, or DataSketches elsewhere, wrote. Raises BadSketch: none, or of another seed."""
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
