"""Errors of the lakehouse.

::

    MillraceError
    └── LakehouseError
        ├── TableBusy          another process writes this table
        ├── BadProduct         a product's SQL is not of a kind we can keep up to date
        ├── BronzeGap          Kafka no longer holds events that bronze has not taken
        └── QueryFailed        a streaming query stopped: which, in which batch, why
"""

from __future__ import annotations

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
