"""Errors of the serving tier, grouped by what a caller can do.

:mod:`lakehouse.contract.deltalog` has TableGone and TableUnreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lakehouse.contract.errors import FilterError as FilterError
from lakehouse.contract.errors import MillraceError, StatementError


class ServeError(MillraceError):
    """Base of the serving tier's errors."""


class PositionExpired(ServeError):
    """The changes after a position can no longer be rebuilt.

    Attributes:
        detail: what is missing.
    """

    def __init__(self, table: str, version: int, detail: str) -> None:
        super().__init__(f"{table}: version {version} is no longer served: {detail}")
        self.detail = detail


class SqlError(StatementError):
    """A statement that is not run, or that failed."""


class RequestError(ServeError):
    """A subscriber asked for something that it cannot have.

    Attributes:
        close: WebSocket close code (docs/reference/protocol.md).
        code: for programs, e.g. ``no_such_table``.
        detail: for people.
    """

    BAD_REQUEST = 4400
    UNAUTHORIZED = 4401
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
        """The corresponding HTTP status."""
        return self._STATUS.get(self.close, self.close - 4_000 if self.close >= 4_400 else 500)
