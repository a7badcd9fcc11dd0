"""Errors over HTTP, as RFC 9457 has them."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import Response

from serve.errors import RequestError
from serve.rows import to_json


def problem(status: int, detail: str, code: str = "") -> Response:
    """An error.

    Args:
        status: of HTTP.
        detail: for people.
        code: for programs, as in the ``error`` message of a stream.
    """
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    content |= {"code": code} if code else {}
    headers = {"Cache-Control": "no-cache"}
    return Response(to_json(content), status, headers, "application/problem+json")


def refused(error: RequestError) -> Response:
    """A request that cannot be served."""
    response = problem(error.status, error.detail, error.code)
    response.headers.update(hints(error))
    return response


def hints(error: RequestError) -> dict[str, str]:
    """Headers that tell a client what to do about it."""
    if error.close == RequestError.UNAUTHORISED:
        return {"WWW-Authenticate": 'Bearer realm="millrace"'}
    return {"Retry-After": "1"} if error.close in (RequestError.TOO_FAST, RequestError.FULL) else {}
