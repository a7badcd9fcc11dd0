"""Errors of the lakehouse.

::

    MillraceError
    └── LakehouseError
        ├── TableBusy          another process writes this table
        ├── BadProduct         a product's SQL is not of a kind we can keep up to date
        ├── BadSketch          a column holds no such sketch, or it cannot answer the question
        ├── BronzeGap          Kafka no longer holds events that bronze has not taken
        ├── TopicReplaced      the topic began anew: offsets no longer say what bronze has taken
        ├── VersionsGone       bronze no longer holds versions that a product has not taken
        ├── BronzeReplaced     bronze is not the table that checkpoints and products derive from
        ├── ExpectationHalt    an event fails an expectation that stops its source's query
        ├── QualityProblem     expectations of a table or batch cannot be looked at
        └── QueryFailed        a streaming query stopped: which, in which batch, why
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from lakehouse.contract.errors import MillraceError


class LakehouseError(MillraceError):
    """Base of the lakehouse's errors."""


class TableBusy(LakehouseError):
    """Another process holds the writer's lock.

    Attributes:
        name: what is held.
        lock: the lock file.
    """

    def __init__(self, name: str, lock: Path) -> None:
        super().__init__(name)
        self.name = name
        self.lock = lock

    def __str__(self) -> str:
        return f"another process writes {self.name} (it holds {self.lock}). Stop that one first: a table has one writer"


class BadProduct(LakehouseError):
    """A product that cannot be kept up to date.

    Attributes:
        product: its name.
        problem: what is wrong with its declaration.
        remedy: what to write instead.
    """

    def __init__(self, product: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.product = product
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"product {self.product}: {self.problem}" + (f". {self.remedy}" if self.remedy else "")


class BadSketch(LakehouseError):
    """Bytes that are no such sketch, sketches that do not merge, or a question that a sketch cannot answer."""


class BronzeGap(LakehouseError):
    """Kafka's retention has overtaken bronze.

    Attributes:
        source: the source concerned.
        detail: what Kafka said.
    """

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(detail)
        self.source = source
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"source {self.source}: Kafka no longer holds offsets that bronze has not taken ({self.detail}). "
            "Raise the topic's retention; to go on without them, start once with --accept-loss"
        )


class TopicReplaced(LakehouseError):
    """The topic counts from the beginning again, so that an offset that bronze has taken stands for another event.

    Attributes:
        source: the source concerned.
        topic: its topic.
        detail: what tells that it began anew.
    """

    def __init__(self, source: str, topic: str, detail: str) -> None:
        super().__init__(detail)
        self.source = source
        self.topic = topic
        self.detail = detail

    def __str__(self) -> str:
        # One line: it may pass through Spark's own error on its way to the user.
        return (
            f"source {self.source}: topic {self.topic} began anew ({self.detail}), so its offsets no longer say which "
            "events bronze has, and --accept-loss does not change that. Give the source another topic name, and copy "
            "there, with its headers, what this one holds (docs/operations.md)"
        )


class VersionsGone(LakehouseError):
    """Versions of bronze that were to be read have been removed; all of their rows are in the newest version.

    Attributes:
        source: the source concerned.
        detail: what is gone.
    """

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(detail)
        self.source = source
        self.detail = detail

    def __str__(self) -> str:
        return (
            f"source {self.source}: {self.detail}. Start again: products that are behind are built from all of bronze"
        )


class BronzeReplaced(LakehouseError):
    """The record was deleted, restored to an older state, or replaced, while what derives from it stayed.

    Attributes:
        source: the source concerned.
        detail: what does not agree.
        leftovers: folders to remove in order to start again from what there is.
    """

    def __init__(self, source: str, detail: str, leftovers: Sequence[Path] = ()) -> None:
        super().__init__(detail)
        self.source = source
        self.detail = detail
        self.leftovers = tuple(leftovers)

    def __str__(self) -> str:
        folders = " ".join(str(path) for path in self.leftovers)
        return (
            f"source {self.source}: bronze is the record, and {self.detail}. Put the table back from your copy; or, to "
            f"start again from what Kafka and bronze still hold, remove: {folders}"
        )


class ExpectationHalt(LakehouseError):
    """An event fails an expectation whose action is ``halt``; its batch has not been counted.

    Attributes:
        source: the source.
        expectation: name of the expectation.
        event: id of the event.
        place: where in bronze it stands, ``TOPIC/PARTITION/OFFSET``.
    """

    def __init__(self, source: str, expectation: str, event: str, place: str) -> None:
        super().__init__(f"{source}: {expectation}: {event}")
        self.source = source
        self.expectation = expectation
        self.event = event
        self.place = place

    def __str__(self) -> str:
        # One line: it passes through Spark's own error on its way to the user.
        return (
            f"source {self.source}: event {self.event} ({self.place}) fails expectation {self.expectation}, which says "
            f"halt; nothing of its batch counts yet. Let it count: millrace quality accept {self.source} "
            f"{shlex.quote(self.event)}; or change the expectation; then start again"
        )


class QualityProblem(LakehouseError):
    """Expectations that cannot be evaluated on a table or batch.

    Attributes:
        table: the table.
        problem: why not.
        remedy: what to do.
    """

    def __init__(self, table: str, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.table = table
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.table}: {self.problem}" + (f". {self.remedy}" if self.remedy else "")


class QueryFailed(LakehouseError):
    """A streaming query stopped by itself.

    Attributes:
        query: its name.
        condition: Spark's error condition, or the exception's class.
        detail: the first line of the cause.
    """

    def __init__(self, query: str, condition: str, detail: str) -> None:
        super().__init__(detail)
        self.query = query
        self.condition = condition
        self.detail = detail

    def __str__(self) -> str:
        return f"query {self.query} stopped: {self.condition}: {self.detail}"
