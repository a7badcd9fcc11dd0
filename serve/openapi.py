"""OpenAPI 3.1 and AsyncAPI 3.0 documents of the server: ``/v1/openapi.json`` and ``/v1/asyncapi.json``.

Written down by hand where words are wanted, checked against routes and messages by a test.
"""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.rows import to_json

VERSION = "1"
_SUBSCRIPTION = ("where", "columns", "select")
PARAMETERS = {
    "table": "name of the table",
    "from": "position to go on from; without it a snapshot comes first",
    "where": "SQL condition on rows",
    "columns": "names of columns, separated by commas",
    "select": "a live aggregate, SELECT … GROUP BY …, instead of rows",
    "conflate": "1: when one lags, the latest of each key instead of every change",
    "window": "changes that may be out without an acknowledgement",
    "codec": "json, msgpack or arrow",
    "wait": "seconds to wait for something, at most 60",
    "limit": "at most so many",
    "as_of": "version, or time in ISO 8601",
    "before": "older than this number",
    "drop": "true: the table too",
    "ticket": "instead of the header, for streams of a browser",
}
OPERATIONS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("GET", "/v1/tables"): ("Every table, and whether it can be subscribed to", ()),
    ("GET", "/v1/tables/{name}"): (
        "A table's rows, by ETag only if newer; with as_of as they were",
        (*_SUBSCRIPTION, "limit", "as_of"),
    ),
    ("GET", "/v1/tables/{name}/{key}"): (
        "The rows of a key, or of its first columns: values with commas between, each percent-encoded",
        ("where", "columns", "limit"),
    ),
    ("GET", "/v1/poll"): (
        "Long polling: what came after a position, and the next one",
        ("table", "from", *_SUBSCRIPTION, "conflate", "codec", "wait"),
    ),
    ("GET", "/v1/subscribe"): (
        "WebSocket, or server-sent events with Accept: text/event-stream; see the AsyncAPI document",
        ("table", "from", *_SUBSCRIPTION, "conflate", "window", "codec"),
    ),
    ("GET", "/v1/sse"): ("Server-sent events", ("table", "from", *_SUBSCRIPTION, "conflate")),
    ("POST", "/v1/sql"): ("Run one reading statement", ()),
    ("DELETE", "/v1/sql/{ident}"): ("End a statement that runs in this process", ()),
    ("GET", "/v1/webhooks"): ("Your webhooks", ()),
    ("POST", "/v1/webhooks"): ("Add a webhook; its secret is shown once", ()),
    ("GET", "/v1/webhooks/{ident}"): ("A webhook, and how it fares", ()),
    ("DELETE", "/v1/webhooks/{ident}"): ("Remove a webhook", ()),
    ("POST", "/v1/webhooks/{ident}/ping"): ("Call it now with a message of type ping", ()),
    ("GET", "/v1/webhooks/{ident}/deliveries"): ("Its latest deliveries", ("limit", "before")),
    ("GET", "/v1/webhooks/{ident}/dead"): ("Its dead letters, with their messages", ("limit", "before")),
    ("POST", "/v1/webhooks/{ident}/dead/{delivery}"): ("Deliver a dead letter once more, now", ()),
    ("POST", "/v1/tickets"): ("A ticket for one stream of a browser, good for 30 s", ()),
    ("GET", "/v1/queries"): ("Continuous queries", ()),
    ("POST", "/v1/queries"): ("Add a continuous query", ()),
    ("GET", "/v1/queries/{name}"): ("A continuous query, and how it fares", ()),
    ("DELETE", "/v1/queries/{name}"): ("Remove a continuous query", ("drop",)),
    ("GET", "/v1/openapi.json"): ("This document", ()),
    ("GET", "/v1/asyncapi.json"): ("The streams, in the same manner", ()),
    ("GET", "/healthz"): ("The process answers", ()),
    ("GET", "/readyz"): ("Every table found is in memory", ()),
    ("GET", "/metrics"): ("Prometheus text of the process that answers", ()),
}
_TEXT, _NUMBER, _TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
BODIES: dict[tuple[str, str], tuple[dict[str, Any], tuple[str, ...]]] = {
    ("POST", "/v1/sql"): (
        {
            "sql": _TEXT,
            "as_of": {"type": ["string", "integer"]},
            "limit": _NUMBER,
            "format": {"enum": ["json", "arrow"]},
            "id": _TEXT,
        },
        ("sql",),
    ),
    ("POST", "/v1/webhooks"): (
        {
            "table": _TEXT,
            "url": _TEXT,
            "where": _TEXT,
            "columns": {"type": "array", "items": _TEXT},
            "conflate": _TRUTH,
            "secret": _TEXT,
            "from": _TEXT,
        },
        ("table", "url"),
    ),
    ("POST", "/v1/queries"): (
        {
            "name": _TEXT,
            "sql": _TEXT,
            "key": {"type": "array", "items": _TEXT},
            "from": _TEXT,
            "source": _TEXT,
            "options": {"type": "object"},
        },
        ("name", "sql"),
    ),
}
MESSAGES = {
    "snapshot": "the rows at a position; what came before is void when first is true",
    "change": "what one commit changed: upserts, deletes, leaves; after is the position before it",
    "resumed": "the position is served; the changes after it follow",
    "heartbeat": "alive, and how far behind",
    "slow": "the subscriber lags, and when it will be cut",
    "expired": "what the subscriber had is void; a snapshot follows",
    "error": "the request is wrong; the connection is closed",
    "close": "the end, where the transport has no close codes",
    "ping": "a webhook's test",
}
SENT = {"ack": "everything up to a position has been processed", "filter": "other rows or columns from now on"}
_PUBLIC = ("/healthz", "/readyz", "/v1/openapi.json", "/v1/asyncapi.json")


def openapi() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), (summary, query) in OPERATIONS.items():
        inside = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"\{(\w+)\}", path)
        ]
        asked = [{"name": name, "in": "query", "description": PARAMETERS[name], "schema": _TEXT} for name in query]
        operation: dict[str, Any] = {"summary": summary, "parameters": inside + asked, "responses": _responses(path)}
        if (body := BODIES.get((method, path))) is not None:
            schema = {"type": "object", "properties": body[0], "required": body[1], "additionalProperties": False}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if path in _PUBLIC:
            operation["security"] = []
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": VERSION},
        "security": [{"key": []}, {"ticket": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "ticket": {"type": "apiKey", "in": "query", "name": "ticket"},
            },
            "schemas": {"Problem": _problem()},
        },
    }


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI document."""
    both = MESSAGES | SENT
    refs = {name: {"$ref": f"#/components/messages/{name}"} for name in both}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Millrace", "version": VERSION},
        "channels": {"table": {"address": "/v1/subscribe", "description": PARAMETERS["table"], "messages": refs}},
        "operations": {
            "push": _operation("send", MESSAGES),
            "answer": _operation("receive", SENT),
        },
        "components": {
            "messages": {
                name: {"summary": text, "payload": {"type": "object", "properties": {"type": {"const": name}}}}
                for name, text in both.items()
            }
        },
    }


async def show_openapi(_: Request) -> Response:
    """The OpenAPI document."""
    return Response(to_json(openapi()), media_type="application/json")


async def show_asyncapi(_: Request) -> Response:
    """The AsyncAPI document."""
    return Response(to_json(asyncapi()), media_type="application/json")


ROUTES: list[BaseRoute] = [
    Route("/v1/openapi.json", show_openapi, methods=["GET"]),
    Route("/v1/asyncapi.json", show_asyncapi, methods=["GET"]),
]


def _operation(action: str, messages: dict[str, str]) -> dict[str, Any]:
    refs = [{"$ref": f"#/channels/table/messages/{name}"} for name in messages]
    return {"action": action, "channel": {"$ref": "#/channels/table"}, "messages": refs}


def _responses(path: str) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[str, Any] = {"2XX": {"description": "done"}, "4XX": {"description": "refused", "content": problem}}
    return found if path == "/healthz" else found | {"503": {"description": "not now", "content": problem}}


def _problem() -> dict[str, Any]:
    texts = dict.fromkeys(("type", "title", "detail", "code"), _TEXT)
    return {"type": "object", "properties": texts | {"status": _NUMBER}, "required": ["title", "status"]}
