"""Events by HTTP: ``POST /v1/SOURCE`` takes one event or many and answers when they are safe.

=============================  ====================================================================================
``application/json``           one object is one event, kept byte for byte; of an array each element is an event, and is
                               written anew (orjson), since an array has no bytes of its own for an element
``application/x-ndjson``       one event a line, each kept byte for byte
=============================  ====================================================================================

Answers are JSON; errors are problem documents (RFC 9457). An event that is refused is kept all the same (quarantine),
so it has a token too.

====  ==================================================================================================
202   ``{"token"}`` for one event, ``{"tokens", "rejected": [{"index", "detail"}]}`` for many
400   the body is not JSON
404   no such source, or it takes nothing by HTTP
413   the body, the number of events, or the (only) event is too large
415   neither of the two content types
422   the (only) event, or every event, is refused
503   the node is not ready or its log is full; ``Retry-After`` says when to come back
====  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingest.acks import Token
from ingest.border import Admitted
from ingest.errors import EventRefused, LogFull, LogUnavailable
from ingest.source import Intake
from lakehouse.contract.envelope import Envelope

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_EVENTS = 5_000
RETRY_AFTER_S = 1

_JSON = "application/json"
_LINES = ("application/x-ndjson", "application/jsonl")


class EventsEndpoint:
    """The ASGI application of ``POST /v1/{source}``; plain ASGI, since this is the hot path.

    Args:
        intakes: by source, for those that take events by HTTP.
        ready: whether the node takes events now.
    """

    def __init__(self, intakes: Mapping[str, Intake], ready: Callable[[], bool]) -> None:
        self._intakes = intakes
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request."""
        try:
            answer, status = await self._take(scope, receive), 202
        except EventRefused as refused:
            await problem(refused.status, refused.reason, **refused.members)(scope, receive, send)
            return
        except (LogFull, LogUnavailable) as error:
            await unavailable(str(error))(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _take(self, scope: Scope, receive: Receive) -> bytes:
        source = scope["path_params"]["source"]
        intake = self._intakes.get(source)
        if intake is None:
            raise EventRefused(f"there is no source {source!r} that takes events by HTTP", 404)
        if scope["method"] != "POST":
            raise EventRefused("events are sent with POST", 405)
        kind, length = _headers(scope)
        if length > MAX_BODY_BYTES:
            raise EventRefused(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
        if not self._ready():
            raise LogUnavailable("the node is not ready yet")
        body = await _body(receive)
        one, events = _split(kind, body)
        if not intake.log.has_room(len(body), len(events)):
            raise LogFull(intake.log.used, intake.log.limit)
        admitted = [intake.border.admit(event) for event in events]
        groups = {id(group): group for group in (intake.take(event).group for event in admitted) if group is not None}
        for group in groups.values():
            await group.wait()
        return _answer(one, admitted)


def _headers(scope: Scope) -> tuple[str, int]:
    kind, length = "", 0
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"content-length" and value.isdigit():
            length = int(value)
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise EventRefused("send the body as it is, without a content encoding", 415)
    return kind, length


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise EventRefused("the request was cut off", 400)
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise EventRefused(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _split(kind: str, body: bytes) -> tuple[bool, Sequence[bytes]]:
    """Whether the body is one event, and the events."""
    if kind == _JSON:
        if body.lstrip()[:1] != b"[":
            return True, (body,)
        try:
            events = [orjson.dumps(element) for element in orjson.loads(body)]
        except orjson.JSONDecodeError:
            return True, (body,)  # the border says what is wrong with it, and keeps it
    elif kind in _LINES:
        events = [line for line in (raw.strip() for raw in body.split(b"\n")) if line]
    else:
        raise EventRefused(f"send {_JSON} or {_LINES[0]}", 415)
    if not events:
        raise EventRefused("there is no event in the body", 400)
    if len(events) > MAX_EVENTS:
        raise EventRefused(f"the body has {len(events)} events, more than {MAX_EVENTS}", 413)
    return False, events


def _answer(one: bool, events: Sequence[Admitted]) -> bytes:
    refused = [(index, event.refusal) for index, event in enumerate(events) if event.refusal is not None]
    tokens = [_token(event.envelope) for event in events]
    if len(refused) < len(events):
        if one:
            return b'{"token":"' + tokens[0].encode() + b'"}'
        rejected = [{"index": index, "detail": refusal.reason} for index, refusal in refused]
        return orjson.dumps({"tokens": tokens, "rejected": rejected})
    first = refused[0][1]
    if one:
        raise EventRefused(first.reason, first.status, token=tokens[0])
    raise EventRefused(
        "every event is refused",
        422,
        tokens=tokens,
        rejected=[{"index": index, "detail": refusal.reason} for index, refusal in refused],
    )


def _token(envelope: Envelope) -> str:
    return Token.of(envelope).encode()


def problem(status: int, detail: str, *, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    """A problem document (RFC 9457)."""
    body = {"title": _TITLES[status], "status": status, "detail": detail, **members}
    return Response(orjson.dumps(body), status, dict(headers or {}), "application/problem+json")


def unavailable(detail: str) -> Response:
    """503 with the time to come back."""
    return problem(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


_TITLES = {
    400: "Bad request",
    404: "Not found",
    405: "Method not allowed",
    413: "Too large",
    415: "Unsupported media type",
    422: "Event refused",
    503: "Not taking events now",
}
