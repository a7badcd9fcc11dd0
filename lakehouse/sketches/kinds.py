"""The sketches of each operator: merged from any number of rows, and the questions that they answer with bounds.

``distinct``: HyperLogLog (Flajolet et al., AofA 2007). ``top_n``: frequent items. ``quantiles`` and ``skew``: KLL.
``membership``: :mod:`lakehouse.sketches.bloom`. ``frequency``: Count-Min (Cormode and Muthukrishnan, "An improved data
stream summary", J. Algorithms 2005); DataSketches answers point queries, ranges and inner products are computed here.
A Count-Min estimate is never too low, and too high by more than ``2 N / width`` (N: the weight of all) with a
probability of at most ``2^-depth``: 1.6 % of N at 99.6 % for 8 times 128.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import datasketches
import numpy as np
import numpy.typing as npt

from lakehouse.errors import BadSketch
from lakehouse.sketches.bloom import BloomFilter

Row = Mapping[str, Any]
SIGMAS = 3
"""Standard deviations between an HLL estimate and its bounds."""
YES, NO, MAYBE = "yes", "no", "maybe"
"""Whether an item is in: certainly, certainly not, or with the probability of a false positive."""
_LG_SMALLEST = 3
_PREAMBLE = 16  # bytes of a Count-Min sketch before its total weight and counters, all doubles; an empty one ends here


@dataclass(frozen=True, slots=True)
class Question:
    """A question; an empty one asks for what the sketch can tell by itself.

    Attributes:
        item: its count, or whether it is in.
        low, high: the count of items between, both included.
        quantiles: values at these ranks.
        rank: the share of values that are no greater than this one.
        n: number of most frequent items.
    """

    item: str | None = None
    low: int | None = None
    high: int | None = None
    quantiles: tuple[float, ...] = ()
    rank: float | None = None
    n: int = 10


@dataclass(frozen=True, slots=True)
class Answer:
    """An estimate with its bounds.

    Attributes:
        what: the item, range, quantile or measure.
        lower, upper: bounds.
        confidence: probability, at least, that the truth lies within; 1 for certain bounds.
    """

    what: str
    estimate: float | str
    lower: float | None = None
    upper: float | None = None
    confidence: float = 1.0


class Merged(Protocol):
    """Sketches of several windows and groups in one."""

    columns: tuple[str, ...]
    """Columns that :meth:`add` reads."""

    def add(self, row: Row) -> None:
        """Add a row of the table; one without a sketch changes nothing."""

    def answers(self, question: Question) -> list[Answer]:
        """Its answers.

        Raises:
            BadSketch: it cannot answer this.
        """

    def serialize(self) -> dict[str, bytes]:
        """The merged sketches by column, in DataSketches' binary form."""


def merged_of(parameters: str) -> Merged:
    """An empty sketch like those of a table whose property has these parameters (JSON).

    Raises:
        BadSketch: the property is not one of ours.
    """
    kinds: dict[str, Callable[[Row], Merged]] = {
        "top_n": _Top,
        "distinct": _Distinct,
        "frequency": _Frequency,
        "membership": _Membership,
        "quantiles": _Quantiles,
        "skew": _Quantiles,
    }
    try:
        found = json.loads(parameters)
        return kinds[found["operator"]](found)
    except (ValueError, KeyError, TypeError) as error:
        raise BadSketch(f"the table does not say which sketches it holds: {error}") from None


def _only(question: Question, *allowed: str) -> None:
    asked = {"item": question.item, "range": question.low, "quantile": question.quantiles, "rank": question.rank}
    for name, value in asked.items():
        if value not in (None, ()) and name not in allowed:
            raise BadSketch(f"its sketches do not answer --{name}; they answer: {', '.join(allowed) or 'no question'}")


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


class _Distinct:
    columns: tuple[str, ...] = ("sketch",)

    def __init__(self, parameters: Row) -> None:
        self._union = datasketches.hll_union(parameters["lg_k"])

    def add(self, row: Row) -> None:
        self._union.update(datasketches.hll_sketch.deserialize(row["sketch"]))

    def answers(self, question: Question) -> list[Answer]:
        _only(question)
        sketch = canonical_hll(self._union)
        bounds = (sketch.get_lower_bound(SIGMAS), sketch.get_upper_bound(SIGMAS))
        return [Answer("distinct items", sketch.get_estimate(), *bounds, 0.997)]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": canonical_hll(self._union).serialize_compact()}


class _Top:
    columns: tuple[str, ...] = ("sketch", "unseen")

    def __init__(self, parameters: Row) -> None:
        self._sketch = datasketches.frequent_strings_sketch(_LG_SMALLEST)
        self._empty = True
        self._unseen = 0

    def add(self, row: Row) -> None:
        if row["sketch"] is None:
            return
        self._unseen += row["unseen"]
        found = datasketches.frequent_strings_sketch.deserialize(row["sketch"])
        if self._empty:  # a sketch says itself how much it may track
            self._sketch, self._empty = found, False
        else:
            self._sketch.merge(found)

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item")
        sketch = self._sketch
        if question.item is not None:
            item = question.item
            bounds = (sketch.get_lower_bound(item), sketch.get_upper_bound(item) + self._unseen)
            return [Answer(item, sketch.get_estimate(item), *bounds)]
        found = sketch.get_frequent_items(datasketches.frequent_items_error_type.NO_FALSE_NEGATIVES)
        best = sorted(found, key=lambda item: (-item[1], item[0]))[: question.n]
        return [Answer(item, estimate, lower, upper + self._unseen) for item, estimate, lower, upper in best]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self._sketch.serialize()}


class _Frequency:
    def __init__(self, parameters: Row) -> None:
        bits = parameters.get("range_bits", 0)
        self.columns: tuple[str, ...] = ("sketch", *(f"sketch_{level}" for level in range(1, bits)))
        shape = (parameters["depth"], parameters["width"])
        self._ranges = bool(bits)
        self.levels = [datasketches.count_min_sketch(*shape) for _ in self.columns]

    def add(self, row: Row) -> None:
        for column, sketch in zip(self.columns, self.levels, strict=True):
            sketch.merge(datasketches.count_min_sketch.deserialize(row[column]))

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item", *(["range"] if self._ranges else []))
        if question.low is not None and question.high is not None:
            return [count_min_range(self.levels, question.low, question.high)]
        if question.item is None:
            return [Answer("items", self.levels[0].total_weight)]
        return [count_min_point(self.levels[0], self._item(question.item))]

    def serialize(self) -> dict[str, bytes]:
        return {column: sketch.serialize() for column, sketch in zip(self.columns, self.levels, strict=True)}

    def _item(self, text: str) -> str | int:
        if not self._ranges:
            return text
        try:
            return int(text)
        except ValueError:
            raise BadSketch(f"its items are integers, and {text!r} is none") from None


def inner_product(one: Merged, other: Merged) -> Answer:
    """The sum over all items of their count in one times their count in the other.

    Raises:
        BadSketch: they are not both of ``frequency``, or differ in depth or width.
    """
    if not isinstance(one, _Frequency) or not isinstance(other, _Frequency):
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

    Raises:
        BadSketch: there are no levels.
    """
    if not levels:
        raise BadSketch("it keeps no ranges: declare range_bits")
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


class _Membership:
    columns: tuple[str, ...] = ("sketch",)

    def __init__(self, parameters: Row) -> None:
        self._filter = BloomFilter.sized(parameters["items"], parameters["fpp"])

    def add(self, row: Row) -> None:
        self._filter.merge(BloomFilter.deserialize(row["sketch"]))

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "item")
        if question.item is None:
            return [Answer("distinct items", self._filter.estimate), Answer("false positives", self._filter.fpp)]
        if not self._filter.query(question.item):
            return [Answer(question.item, NO)]
        return [Answer(question.item, MAYBE, confidence=1 - self._filter.fpp)]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": self._filter.serialize()}


class _Quantiles:
    columns: tuple[str, ...] = ("sketch",)

    def __init__(self, parameters: Row) -> None:
        self._declared = tuple(parameters["quantiles"])
        self._sketch = datasketches.kll_doubles_sketch(parameters["k"])

    def add(self, row: Row) -> None:
        self._sketch.merge(datasketches.kll_doubles_sketch.deserialize(row["sketch"]))

    def answers(self, question: Question) -> list[Answer]:
        _only(question, "quantile", "rank")
        sketch = self._sketch
        if sketch.is_empty():
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
        return {"sketch": self._sketch.serialize()}
