"""Errors of the serving tier, grouped by what a caller can do.

::

    MillraceError
    └── ServeError
        ├── PositionError        the position is not one of ours: ask without it
        ├── PositionExpired      the log no longer reaches back to it: take a snapshot
        ├── StatementError
        │   ├── QueryError       the SQL is refused or wrong: another statement
        │   └── FilterError      a subscriber's condition, columns or aggregate are refused: write them otherwise
        └── RequestError         a subscriber's request is wrong: close code and machine-readable code
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lakehouse.contract.errors import MillraceError


class ServeError(MillraceError):
    """Base of the serving tier's errors."""


class PositionError(ServeError):
    """A text that is no position.

    Attributes:
        token: what was given, shortened.
        problem: what is wrong with it.
    """

    def __init__(self, token: str, problem: str) -> None:
        super().__init__(token, problem)
        self.token = token[:80]
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.token!r} is not a position: {self.problem}"


class PositionExpired(ServeError):
    """The changes after a position cannot be rebuilt any more.

    Attributes:
        table: name of the table.
        version: the position's version.
        detail: what is missing.
    """

    def __init__(self, table: str, version: int, detail: str) -> None:
        super().__init__(table, version, detail)
        self.table = table
        self.version = version
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.table}: version {self.version} is no longer served: {self.detail}"


class StatementError(ServeError):
    """SQL of a user's that is refused; raised as one of those below.

    Attributes:
        problem: what is wrong.
        remedy: what to write instead.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}" if self.remedy else self.problem


class QueryError(StatementError):
    """A statement that is not run, or that failed."""


class FilterError(StatementError):
    """A condition, list of columns or aggregate that is not taken."""


class RequestError(ServeError):
    """A subscriber asked for something that it cannot have.

    Attributes:
        close: WebSocket close code (docs/protocol.md).
        code: for programs, e.g. ``no_such_table``.
        detail: for people.
    """

    BAD_REQUEST = 4400
    UNAUTHORISED = 4401
    FORBIDDEN = 4403
    NOT_FOUND = 4404
    TOO_FAST = 4429
    FULL = 1013
    FAILED = 1011
    _STATUS: ClassVar[Mapping[int, int]] = {1013: 503, 1009: 413, 1011: 500, 4408: 408}

    def __init__(self, close: int, code: str, detail: str) -> None:
        super().__init__(close, code, detail)
        self.close = close
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return self.detail

    @property
    def status(self) -> int:
        """The HTTP status that means the same."""
        return self._STATUS.get(self.close, self.close - 4_000 if self.close >= 4_400 else 500)
