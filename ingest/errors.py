"""Errors of the collecting side, grouped by what the caller can do.

::

    MillraceError
    └── IngestError
        ├── LogFull             push back and try again: the message log has reached its bound
        ├── LogUnavailable      push back and try again: the disk refuses writes
        ├── BrokerUnavailable   try again: Kafka cannot be reached, or its topics are not there yet
        ├── EventRefused        tell the sender: a request or an event does not pass the border
        ├── BadToken            tell the sender: not an acknowledgement token of ours
        ├── LookupRefused       tell the sender: what it looks up is not there, or is not asked for rightly
        ├── TooManyWaiters      push back and try again: as many senders wait for an answer as may
        └── UpstreamEnded       connect again: an upstream ended its stream, or there is no connection
"""

from __future__ import annotations

from typing import Any

from lakehouse.contract.errors import MillraceError


class IngestError(MillraceError):
    """Base of the errors of ``ingest``."""


class LogFull(IngestError):
    """The message log has reached its bound; nothing was taken.

    Attributes:
        used: bytes on disk.
        limit: the bound in bytes.
        size: bytes that there was no room for.
    """

    def __init__(self, used: int, limit: int, size: int = 0) -> None:
        super().__init__(used, limit, size)
        self.used = used
        self.limit = limit
        self.size = size

    def __str__(self) -> str:
        return f"the message log is full ({self.used} of {self.limit} bytes); Kafka has to take some of it first"


class LogUnavailable(IngestError):
    """The message log cannot be written at the moment; nothing was taken.

    Attributes:
        reason: what the operating system said.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the message log cannot be written: {self.reason}"


class BrokerUnavailable(IngestError):
    """Kafka cannot be reached, or cannot serve the topics yet.

    Attributes:
        bootstrap: the address that was tried.
        reason: what the client said.
    """

    def __init__(self, bootstrap: str, reason: str) -> None:
        super().__init__(bootstrap, reason)
        self.bootstrap = bootstrap
        self.reason = reason

    def __str__(self) -> str:
        return f"Kafka at {self.bootstrap} is not available: {self.reason}"


class EventRefused(IngestError):
    """A request or an event in it does not pass the border.

    Attributes:
        reason: what is wrong with it, for its sender.
        status: the HTTP status that says so.
        code: names the kind of refusal, for programs; it does not change.
        retry_after: seconds after which another try is worth it; 0: it is not.
        members: what else the answer says.
    """

    def __init__(self, reason: str, status: int, *, code: str = "", retry_after: int = 0, **members: Any) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.members = members

    def __str__(self) -> str:
        return self.reason


class BadToken(IngestError):
    """Not an acknowledgement token that a collector gave out."""

    def __str__(self) -> str:
        return "this is not an acknowledgement token"


class UpstreamEnded(IngestError):
    """The connection to an upstream ended, or did not come about; the text says why."""


class LookupRefused(IngestError):
    """What is looked up is not there, or is not asked for rightly.

    Attributes:
        reason: for who asked.
        status: the HTTP status that says so.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason, status)
        self.reason = reason
        self.status = status

    def __str__(self) -> str:
        return self.reason


class TooManyWaiters(IngestError):
    """As many senders wait for an answer as may.

    Attributes:
        most: how many may.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most

    def __str__(self) -> str:
        return f"{self.most} senders wait for an answer, which is as many as may"
