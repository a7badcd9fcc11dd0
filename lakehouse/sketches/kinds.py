"""What can be asked of the sketches of a table: one class an operator, merged from any number of its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import datasketches

from lakehouse.errors import BadSketch
from lakehouse.sketches import countmin
from lakehouse.sketches.bloom import BloomFilter
from lakehouse.sketches.hll import SIGMAS, of_the_set_alone

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; a sketch that is asked for nothing says what it can by itself.

    Attributes:
        item: how often it occurs, or whether.
        low, high: how many items lie between, both included.
        quantiles: values at these ranks.
        rank: the share of values that are no greater than this one.
        n: so many of the most frequent items.
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
        what: what it is of.
        estimate: the estimate; text for a yes or no.
        lower: no less.
        upper: no more.
        confidence: that the truth lies within, at least; 1 for certain bounds.
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
        """Take in a row of the table; one that holds no sketch changes nothing."""

    def answers(self, question: Question) -> list[Answer]:
        """What it says.

        Raises:
            BadSketch: it cannot answer this.
        """

    def serialize(self) -> dict[str, bytes]:
        """The merged sketches by column, in DataSketches' binary form."""


def merged_of(parameters: str) -> Merged:
    """An empty sketch like those of a table whose property says these parameters (JSON).

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


class _Distinct:
    columns: tuple[str, ...] = ("sketch",)

    def __init__(self, parameters: Row) -> None:
        self._union = datasketches.hll_union(parameters["lg_k"])

    def add(self, row: Row) -> None:
        self._union.update(datasketches.hll_sketch.deserialize(row["sketch"]))

    def answers(self, question: Question) -> list[Answer]:
        _only(question)
        sketch = of_the_set_alone(self._union)
        bounds = (sketch.get_lower_bound(SIGMAS), sketch.get_upper_bound(SIGMAS))
        return [Answer("distinct items", sketch.get_estimate(), *bounds, 0.997)]

    def serialize(self) -> dict[str, bytes]:
        return {"sketch": of_the_set_alone(self._union).serialize_compact()}


_LG_SMALLEST = 3


class _Top:
    columns: tuple[str, ...] = ("sketch", "unseen")

    def __init__(self, parameters: Row) -> None:
        self._sketch = datasketches.frequent_strings_sketch(_LG_SMALLEST)
        self._empty = True
        self._unseen = 0

    def add(self, row: Row) -> None:
        if row["sketch"] is None:
            return
        self._unseen += row.get("unseen", 0)  # a table from before there was one
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
            found = countmin.count_range(self.levels, question.low, question.high)
            return [_answer(f"{question.low}:{question.high}", found)]
        if question.item is None:
            return [Answer("items", self.levels[0].total_weight)]
        return [_answer(question.item, countmin.point(self.levels[0], self._item(question.item)))]

    def inner_product(self, other: Merged) -> Answer:
        """The sum over all items of their count here times their count there.

        Raises:
            BadSketch: the other holds no such sketches.
        """
        if not isinstance(other, _Frequency):
            raise BadSketch("only tables of frequency have inner products")
        return _answer("inner product", countmin.inner_product(self.levels[0], other.levels[0]))

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
    if not isinstance(one, _Frequency):
        raise BadSketch("only tables of frequency have inner products")
    return one.inner_product(other)


def _answer(what: str, found: countmin.Estimate) -> Answer:
    return Answer(what, found.estimate, found.lower, found.upper, found.confidence)


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


YES, NO, MAYBE = "yes", "no", "maybe"
"""Whether an item is in: for certain, for certain not, or with a chance of being taken for another."""


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
