"""Errors of the collecting side, grouped by what the caller can do, and the problem documents that tell senders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import orjson

from lakehouse.contract.errors import MillraceError

RETRY_AFTER_S = 1

CODES: Mapping[int, str] = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "timeout",
    411: "length-required",
    413: "too-large",
    415: "content-type",
    422: "refused",
    429: "too-fast",
    431: "head-too-large",
    502: "bad-gateway",
    503: "unavailable",
    504: "answer-timeout",
}
"""Default code by status."""


class IngestError(MillraceError):
    """Base of the errors of ``ingest``."""


class LogFull(IngestError):
    """The message log has reached its limit of bytes on disk; the ``size`` bytes offered were not taken."""

    def __init__(self, used: int, limit: int, size: int = 0) -> None:
        super().__init__(f"the message log is full ({used} of {limit} bytes); Kafka has to take some of it first")
        self.size = size


class LogUnavailable(IngestError):
    """The message log cannot be written now; nothing was taken."""


class NotReady(LogUnavailable):
    """No events are taken now.

    Attributes:
        until_ready: waits for the source's reference data; None if the node itself is not ready.
    """

    def __init__(self, reason: str, until_ready: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(reason)
        self.until_ready = until_ready


class BrokerUnavailable(IngestError):
    """Kafka at ``bootstrap`` cannot be reached, or cannot serve the topics yet."""

    def __init__(self, bootstrap: str, reason: str) -> None:
        super().__init__(f"Kafka at {bootstrap} is not available: {reason}")
        self.bootstrap = bootstrap


class RequestRefused(IngestError):
    """A request or an event is refused.

    Attributes:
        code: stable name of the kind of refusal; empty: the status's default.
        retry_after: seconds to wait before a retry; 0: a retry is pointless.
        members: further members of the problem document.
    """

    def __init__(self, reason: str, status: int, *, code: str = "", retry_after: int = 0, **members: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.members = members


class UpstreamEnded(IngestError):
    """The connection to an upstream ended or failed; the text tells why."""


_BUSY_CODES: Mapping[type[IngestError], str] = {LogFull: "log-full", NotReady: "not-ready"}


def refusal_code(error: RequestRefused) -> str:
    """The error's own code, or the default of its status."""
    return error.code or CODES.get(error.status, "error")


def problem_body(error: IngestError) -> tuple[int, bytes, list[tuple[str, str]]]:
    """HTTP status, problem document (RFC 9457) and further headers.

    ``type`` names the kind of problem and does not change: ``urn:millrace:problem:CODE``.
    """
    if isinstance(error, RequestRefused):
        status, code, retry, members = error.status, refusal_code(error), error.retry_after, error.members
    else:
        code = _BUSY_CODES.get(type(error), "log-unavailable")
        status, retry, members = 503, RETRY_AFTER_S, {}
    body = {
        "type": f"urn:millrace:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": str(error),
        **members,
    }
    headers = [("retry-after", str(retry))] if retry else []
    if status == 401:
        headers.append(("www-authenticate", "Bearer"))
    return status, orjson.dumps(body), headers
