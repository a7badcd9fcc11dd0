"""The gate in front of every HTTP route: a request without a good key gets no further. Streams that own their
connection (:mod:`serve.push.wire`) ask the same gate themselves."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import RequestError
from serve.principal import Access, Credentials
from serve.push.problems import refused

PUBLIC = frozenset({"/healthz", "/readyz", "/v1/openapi.json", "/v1/asyncapi.json"})
"""Routes without data; so are the dashboard's files, which lie beside ``/v1/``."""

ALLOWED_HEADERS = "authorization, content-type, if-none-match, last-event-id"
EXPOSED_HEADERS = "etag, millrace-position, millrace-behind, millrace-version, retry-after"
_METHODS = "GET, POST, DELETE"


def needs_key(path: str) -> bool:
    """Whether a path has data behind it."""
    return path not in PUBLIC and (path == "/v1" or path.startswith("/v1/") or path == "/metrics")


class Door:
    """ASGI middleware. The principal is put into the request's state.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        access: Access = state["access"]
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = access.allowed_origin(headers)
        if origin is not None:
            send = _with_cors(send, origin)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight(send)
                return
        if needs_key(scope["path"]):
            client = scope.get("client")
            peer = f"{client[0]}:{client[1]}" if client else "?"
            try:
                query = scope["query_string"].decode("latin-1")
                state["principal"] = access.admit(Credentials(headers, query, peer))
            except RequestError as error:
                await refused(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _with_cors(send: Send, origin: str) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", ()),
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", EXPOSED_HEADERS.encode()),
                (b"vary", b"origin"),
            ]
        await send(message)

    return wrapped


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", _METHODS.encode()),
        (b"access-control-allow-headers", ALLOWED_HEADERS.encode()),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
