"""JSON bodies of requests, bounded. ``application/json`` is asked for, which no form on a foreign page can send."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from serve.errors import RequestError


async def json_object(request: Request, most: int, names: frozenset[str]) -> dict[str, Any]:
    """The object in a request's body.

    Args:
        request: its body was not read yet.
        most: bytes.
        names: that the object may have.

    Raises:
        RequestError: 415 another type, 413 too large, 400 no JSON object, or a name that is not known.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(4415, "bad_request", "send application/json")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise RequestError(4413, "too_large", f"the body has more than {most} bytes")
        chunks.append(chunk)
    try:
        content = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise RequestError(RequestError.BAD_REQUEST, "bad_request", f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(RequestError.BAD_REQUEST, "bad_request", "send a JSON object")
    if unknown := sorted(content.keys() - names):
        known = ", ".join(sorted(names))
        raise RequestError(RequestError.BAD_REQUEST, "bad_request", f"{unknown[0]!r} is not known; there are: {known}")
    return content
