"""Errors of the lakehouse."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lakehouse.contract.errors import MillraceError
from lakehouse.contract.storage import LakePath


class LakehouseError(MillraceError):
    """Base of the lakehouse's errors."""


class TableBusy(LakehouseError):
    """Another process holds the writer's lock."""

    def __init__(self, name: str, lock: LakePath) -> None:
        super().__init__(name)
        self.name = name
        self.lock = lock

    def __str__(self) -> str:
        return f"another process writes {self.name} (it holds {self.lock}). Stop that one first: a table has one writer"


class BadSketch(LakehouseError):
    """Bytes that are no such sketch, sketches that do not merge, or a question that a sketch cannot answer."""


class ExpectationHalt(LakehouseError):
    """An event fails an expectation whose action is ``halt``; its batch has not been counted.

    Attributes:
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
            f"halt; nothing of its batch counts yet. Let it count: millrace quality {self.source} --accept "
            f"{shlex.quote(self.event)}; or change the expectation; then start again"
        )


class RegistryProblem(LakehouseError):
    """The schema of an Avro payload is neither in the lake nor to be had from the registry."""

    def __init__(self, schema: int, problem: str, remedy: str) -> None:
        super().__init__(schema, problem, remedy)  # all of them, so that a worker process can send the error
        self.schema = schema
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        # One line: it passes through Spark's own error on its way to the user.
        return f"Avro schema {self.schema} is needed, and {self.problem}. {self.remedy}"


_OF_THE_SQL = (
    "PARSE_",
    "UNRESOLVED_",
    "DATATYPE_MISMATCH",
    "MISSING_GROUP_BY",
    "MISSING_AGGREGATION",
    "WRONG_NUM_ARGS",
)
"""How conditions of Spark begin that the SQL of a pipeline causes, whatever the events are."""


class QueryFailed(LakehouseError):
    """A streaming query stopped by itself.

    Attributes:
        condition: Spark's error condition, or the exception's class.
        detail: the first line of the cause.
    """

    def __init__(self, query: str, condition: str, detail: str) -> None:
        super().__init__(detail)
        self.is_configuration = condition.startswith(_OF_THE_SQL)
        self.query = query
        self.condition = condition
        self.detail = detail

    def __str__(self) -> str:
        return f"query {self.query} stopped: {self.condition}: {self.detail}"


class FileTaken(LakehouseError):
    """Another loader has committed rows of this file since its position was read."""

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint

    def __str__(self) -> str:
        return f"another loader loads the file {self.fingerprint}"


class LoaderDied(LakehouseError):
    """A worker process of the loader ended without reporting."""

    def __str__(self) -> str:
        return "a worker of the loader was killed. Its committed rows are in; run the same command again to go on"


class NamedProblem(LakehouseError):
    """One named thing that cannot be used.

    Attributes:
        remedy: what to do; empty if the problem says it.
    """

    label = ""

    def __init__(self, name: str, problem: str, remedy: str = "") -> None:
        super().__init__(name, problem, remedy)  # all of them, so that a worker process can send the error
        self.name = name
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.label}{self.name}: {self.problem}" + (f". {self.remedy}" if self.remedy else "")


class QueryError(NamedProblem):
    """One view, alert or query cannot go on; the others do."""


class BadProduct(NamedProblem):
    """A product that cannot be kept up to date.

    Attributes:
        key: of its table in the TOML file.
        line: of its SQL, 1-based; 0: not known.
    """

    is_configuration = True

    label = "product "

    def __init__(self, name: str, problem: str, remedy: str = "", *, key: str = "sql", line: int = 0) -> None:
        super().__init__(name, problem, remedy)
        self.key = key
        self.line = line


class QualityProblem(NamedProblem):
    """Expectations that cannot be evaluated on a table or batch."""


class BadFile(NamedProblem):
    """A file that cannot be read, or only up to the place that the problem names."""


class CommitFailed(NamedProblem):
    """A table, bronze or ``loads``, could not be written or read; ``name`` of bronze is the source's."""

    label = "table "

    def __str__(self) -> str:
        return (
            f"table {self.name} takes no rows: {self.problem}. Rows committed before are in; mend that, and run "
            f"the same command again to go on"
        )


class FetchFailed(NamedProblem):
    """The address of a feed gave no file.

    Attributes:
        retryable: whether the next attempt may succeed without a change of the declaration.
    """

    label = "feed "

    def __init__(self, name: str, problem: str, remedy: str = "", *, retryable: bool = True) -> None:
        super().__init__(name, problem, remedy)
        self.retryable = retryable


class StagingError(NamedProblem):
    """A staging table that cannot be made."""

    label = "staging table "


class SourceProblem(LakehouseError):
    """A source whose topic, bronze table and derived tables do not agree."""

    def __init__(self, source: str, detail: str) -> None:
        super().__init__(detail)
        self.source = source
        self.detail = detail


class BronzeGap(SourceProblem):
    """Kafka's retention has overtaken bronze; ``detail`` is Kafka's message."""

    def __str__(self) -> str:
        return (
            f"source {self.source}: Kafka no longer holds offsets that bronze has not taken ({self.detail}). "
            "Raise the topic's retention; to go on without them, start once with --accept-loss"
        )


class TopicReplaced(SourceProblem):
    """The topic counts from the beginning again, so that an offset that bronze has taken stands for another event."""

    def __init__(self, source: str, topic: str, detail: str) -> None:
        super().__init__(source, detail)
        self.topic = topic

    def __str__(self) -> str:
        # One line: it may pass through Spark's own error on its way to the user.
        return (
            f"source {self.source}: topic {self.topic} began anew ({self.detail}), so its offsets no longer say which "
            "events bronze has, and --accept-loss does not change that. Give the source another topic name, and copy "
            "there, with its headers, what this one holds (docs/operations/running.md)"
        )


class VersionsGone(SourceProblem):
    """Versions of bronze that were to be read have been removed; all of their rows are in the newest version."""

    def __str__(self) -> str:
        return (
            f"source {self.source}: {self.detail}. Start again: products that are behind are built from all of bronze"
        )


class BronzeReplaced(SourceProblem):
    """Bronze was deleted, restored to an older state, or replaced, while tables derived from it stayed.

    Attributes:
        leftovers: folders to remove in order to start again from the data that remains.
    """

    def __init__(self, source: str, detail: str, leftovers: Sequence[LakePath] = ()) -> None:
        super().__init__(source, detail)
        self.leftovers = tuple(leftovers)

    def __str__(self) -> str:
        folders = " ".join(str(path) for path in self.leftovers)
        return (
            f"source {self.source}: bronze is the record, and {self.detail}. Put the table back from your copy; or, to "
            f"start again from what Kafka and bronze still hold, remove: {folders}"
        )
