"""Requests over HTTP and WebSocket: parameters, JSON bodies, and refusals as problems (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lakehouse.contract.sql.filters import MAX_LENGTH
from serve.access import TICKET
from serve.core.messages import to_json
from serve.core.model import Principal, SubscribeRequest
from serve.core.position import Seal
from serve.errors import RequestError

PARAMETERS = frozenset({"table", "from", "where", "columns", "select", "conflate", "window"})
"""What a subscription takes; a transport may take more. See docs/reference/protocol.md."""
_MAX_QUERY = 16_384
_TRUTH = {"": False, "0": False, "false": False, "1": True, "true": True}
_S = TypeVar("_S", bound=msgspec.Struct)


def json_response(content: Any, status: int = 200, **headers: str) -> Response:
    """A JSON response that is not cached."""
    return Response(to_json(content), status, {"Cache-Control": "no-store", **headers}, "application/json")


def problem(status: int, detail: str, code: str = "", **more: str) -> Response:
    """An error; ``code`` is for programs, as in the ``error`` message of a stream."""
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **more}
    content |= {"code": code} if code else {}
    return Response(to_json(content), status, {"Cache-Control": "no-cache"}, "application/problem+json")


def refused(error: RequestError) -> Response:
    """The problem for an error, with headers that tell a client what to do next."""
    response = problem(error.status, error.detail, error.code)
    if error.close == RequestError.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="millrace"'
    elif error.close in (RequestError.TOO_FAST, RequestError.FULL):
        response.headers["Retry-After"] = "1"
    return response


async def http_error(_: Request, error: Exception) -> Response:
    """Handles Starlette's errors, such as those of unknown paths."""
    assert isinstance(error, HTTPException)
    response = problem(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


async def refused_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refused(error)


async def json_body(request: Request, most: int, kind: type[_S]) -> _S:
    """The object in a request's body, at most ``most`` bytes. Raises RequestError: 415 another type, 413 too large, 400
    not JSON, or not of this kind.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError(4415, "bad_request", "send application/json")
    body = await body_of(request, most)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("bad_request", f"the body is not taken: {error}") from None


async def body_of(request: Request, most: int) -> bytes:
    """A request's body. Raises RequestError: it has more than ``most`` bytes."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise RequestError(4413, "too_large", f"the body has more than {most} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def query_of(text: str) -> dict[str, str]:
    """A query string as a dict. Raises RequestError if it is too long or a name occurs twice."""
    if not text:
        return {}
    if len(text) > _MAX_QUERY:
        raise invalid("bad_request", f"the query has more than {_MAX_QUERY} characters")
    try:
        values = parse_qs(text, keep_blank_values=True, max_num_fields=64)
    except ValueError:
        raise invalid("bad_request", "the query has too many parameters") from None
    if twice := [name for name, given in values.items() if len(given) > 1]:
        raise invalid("bad_request", f"given more than once: {', '.join(sorted(twice))}")
    return {name: given[0] for name, given in values.items() if name != TICKET}


def subscription_of(query: Mapping[str, str], seal: Seal, *, also: frozenset[str] = frozenset()) -> SubscribeRequest:
    """The request in a query; ``also`` are names that the transport reads itself.

    Raises RequestError: a parameter is unknown, missing or wrong.
    """
    if unknown := query.keys() - PARAMETERS - also:
        raise invalid("bad_request", f"unknown parameters: {', '.join(sorted(unknown))}")
    table = query.get("table", "")
    if not table:
        raise invalid("bad_request", "give a table")
    texts = {name: query.get(name, "") for name in ("where", "columns", "select")}
    if long := [name for name, text in texts.items() if len(text) > MAX_LENGTH]:
        raise invalid("bad_filter", f"{', '.join(long)}: more than {MAX_LENGTH} characters")
    return SubscribeRequest(
        table,
        seal.parse(query["from"]) if "from" in query else None,
        texts["where"],
        tuple(name for name in (part.strip() for part in texts["columns"].split(",")) if name),
        texts["select"],
        truth_of(query.get("conflate", ""), "conflate"),
        whole_number(query.get("window", "0"), "window"),
    )


def truth_of(text: str, name: str) -> bool:
    """A switch: 1 or 0. Raises RequestError for anything else."""
    if text.lower() not in _TRUTH:
        raise invalid("bad_request", f"{name} is 1 or 0")
    return _TRUTH[text.lower()]


def whole_number(text: str, name: str, least: int = 0, most: int = 1_000_000) -> int:
    """A number within bounds. Raises RequestError."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise invalid("bad_request", f"{name} is a whole number from {least} to {most}")
    return int(text)


def texts_of(content: Any) -> dict[str, str]:
    """A message's object in the form of a query: texts, numbers, booleans, lists of texts. Raises RequestError."""
    if not isinstance(content, dict):
        raise invalid("bad_message", "send an object")
    found = {}
    for name, value in content.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            found[name] = ",".join(value)
        elif isinstance(value, bool):
            found[name] = "1" if value else "0"
        elif isinstance(value, (str, int)):
            found[name] = str(value)
        elif value is not None:
            raise invalid("bad_message", f"{name} is neither text nor a number")
    return found


def admitted(request: Request) -> Principal:
    """The principal of an HTTP request that :class:`serve.http.routes.AccessMiddleware` let in."""
    principal: Principal = request.state.principal
    return principal


async def hung_up(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def invalid(code: str, detail: str) -> RequestError:
    """A refusal because the request itself is wrong."""
    return RequestError(RequestError.BAD_REQUEST, code, detail)
