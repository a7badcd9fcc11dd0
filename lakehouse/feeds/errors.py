"""Errors of the batch loader.

::

    LakehouseError
    └── FeedError
        ├── BadFile        a file cannot be read, or not to its end: which, where, why
        ├── CommitFailed   a table does not take rows: which, why
        ├── FileTaken      another loader has loaded this part of the file meanwhile
        ├── LoaderDied     a worker process was killed
        └── PullFailed     a feed's address did not give a file: which, why
"""

from __future__ import annotations

from lakehouse.errors import LakehouseError


class FeedError(LakehouseError):
    """Base of the loader's errors."""


class BadFile(FeedError):
    """A file that cannot be loaded, or only to some place.

    Attributes:
        name: the file.
        problem: what is wrong with it, and where.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


class CommitFailed(FeedError):
    """A table, bronze or that of loads, could not be written, or does not tell what it holds.

    Attributes:
        table: its name; bronze's is the source's.
        problem: why.
    """

    def __init__(self, table: str, problem: str) -> None:
        super().__init__(table, problem)  # both: it comes out of a worker process
        self.table = table
        self.problem = problem

    def __str__(self) -> str:
        return (
            f"table {self.table} takes no rows: {self.problem}. What it had taken is in; mend that, and run "
            f"the same command again to go on"
        )


class FileTaken(FeedError):
    """Another loader has committed rows of this file since we looked.

    Attributes:
        fingerprint: of the file's content.
    """

    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.fingerprint = fingerprint

    def __str__(self) -> str:
        return f"another loader is at the file {self.fingerprint}"


class LoaderDied(FeedError):
    """A worker process ended without a word."""

    def __str__(self) -> str:
        return "a worker of the loader was killed. What it had committed is in; run the same command again to go on"


class PullFailed(FeedError):
    """A feed's address gave no file.

    Attributes:
        feed: its name.
        problem: why.
        passing: whether the next try may succeed without anything being mended.
    """

    def __init__(self, feed: str, problem: str, *, passing: bool = True) -> None:
        super().__init__(problem)
        self.feed = feed
        self.problem = problem
        self.passing = passing

    def __str__(self) -> str:
        return f"feed {self.feed}: {self.problem}"
