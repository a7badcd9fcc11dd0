"""Events by HTTP: ``POST /v1/SOURCE`` takes one event or many and answers when they are safe.

=============================  ====================================================================================
``application/json``           one object is one event; of an array each element is one
``application/x-ndjson``       one event a line
=============================  ====================================================================================

Each is kept byte for byte. Answers are JSON; errors are problem documents (RFC 9457) whose ``type`` names the kind. An
event that is refused is kept all the same (quarantine), so it has a token too.

====  ==================================================================================================
202   ``{"token"}`` for one event, ``{"tokens", "rejected": [{"index", "code", "detail"}]}`` for many
400   the body is not JSON
401   no key, or one that is not known, where one is asked for; 403: one that does not reach to this source
404   no such source, or it takes nothing by HTTP
413   the body, the number of events, or the (only) event is too large
415   not a content type of this source
422   the (only) event, or every event, is refused
429   too many events a second, or too many connections; ``Retry-After`` says when to come back
503   the node is not ready or its log is full; ``Retry-After`` says when to come back
====  ==================================================================================================

Most requests do not come here: :mod:`ingest.collectors.wire` takes what is plain below the web server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import parse_qsl

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingest.border import Admitted
from ingest.collectors import door
from ingest.collectors.door import RETRY_AFTER_S, Door, presented_key, problem_body
from ingest.errors import EventRefused, IngestError, LogFull, LogUnavailable, TooManyWaiters
from lakehouse.contract.pipeline import Source


class Responds(Protocol):
    """Answers events; see :class:`ingest.respond.Responder`."""

    def check(self, source: Source, query: Mapping[str, str]) -> str:
        """Before the event is taken: the callback that it asks for."""

    async def respond(self, source: Source, event: Admitted, callback: str) -> Response:
        """The response to the event."""


class EventsEndpoint:
    """The ASGI application of ``POST /v1/{source}``.

    Args:
        door: what the requests go through.
        responder: answers the events of sources that say so.
    """

    def __init__(self, door: Door, responder: Responds | None = None) -> None:
        self._door = door
        self._responder = responder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take a request."""
        try:
            answer = await self._take(scope, receive)
        except (EventRefused, LogFull, LogUnavailable) as error:
            await refuse(error)(scope, receive, send)
            return
        except TooManyWaiters as error:
            busy = EventRefused(str(error), 503, code="too-many-waiters", retry_after=RETRY_AFTER_S)
            await refuse(busy)(scope, receive, send)
            return
        if isinstance(answer, Response):
            await answer(scope, receive, send)
            return
        headers = [(b"content-length", str(len(answer)).encode())]
        if answer:
            headers.append((b"content-type", b"application/json"))
        await send({"type": "http.response.start", "status": 202, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _take(self, scope: Scope, receive: Receive) -> bytes | Response:
        source = scope["path_params"]["source"]
        if scope["method"] != "POST":
            raise EventRefused("events are sent with POST", 405)
        kind, length, key = _headers(scope)
        passed = self._door.enter(source, kind, length, key)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        declared = passed.intake.border.source
        callback = self._responder.check(declared, query) if self._responder and declared.respond else ""
        self._door.gate.reserve(length or door.MAX_BODY_BYTES)
        try:
            body = await _body(receive)
        finally:
            self._door.gate.free(length or door.MAX_BODY_BYTES)
        held = self._door.gate.hold(passed.intake.border.source, passed.caller, frozenset())
        try:
            taken = self._door.take(passed, kind, body)
            if query.get("ack") == "none":  # one way: before it is durable, whatever the border thinks of it
                return b""
            for group in taken.groups:
                await group.wait()
        finally:
            self._door.gate.release(held)
        if taken.error is not None:
            raise taken.error
        if self._responder is not None and declared.respond and len(taken.events) == 1 and not taken.events[0].shed:
            return await self._responder.respond(declared, taken.events[0], callback)
        return taken.answer


def _headers(scope: Scope) -> tuple[str, int, str | None]:
    """Content type, length of the body (0: unknown) and key."""
    kind, length, key = "", 0, None
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name == b"content-length" and value.isdigit():
            length = int(value)
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise EventRefused("send the body as it is, without a content encoding", 415, code="content-encoding")
        else:
            key = presented_key(name, value) or key
    return kind, length, key


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise EventRefused("the request was cut off", 400)
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > door.MAX_BODY_BYTES:
            raise EventRefused(f"the body has more than {door.MAX_BODY_BYTES} bytes", 413, code="body-too-large")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def refuse(error: IngestError) -> Response:
    """The problem document for what went wrong."""
    status, body, retry = problem_body(error)
    headers = {"Retry-After": str(retry)} if retry else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, status, headers, "application/problem+json")


def problem(
    status: int, detail: str, *, code: str = "", headers: Mapping[str, str] | None = None, **members: Any
) -> Response:
    """A problem document (RFC 9457)."""
    answer = refuse(EventRefused(detail, status, code=code, **members))
    answer.headers.update(headers or {})
    return answer


def unavailable(detail: str, **members: Any) -> Response:
    """503 with the time to come back."""
    return refuse(EventRefused(detail, 503, code="not-ready", retry_after=RETRY_AFTER_S, **members))
