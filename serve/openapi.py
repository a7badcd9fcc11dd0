"""The OpenAPI 3.1 document, and the routes of both: ``/v1/openapi.json`` and ``/v1/asyncapi.json``.

Written down by hand where words are wanted, checked against routes and answers by a test.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.asyncapi import asyncapi
from serve.rows import to_json
from serve.schemas import NUMBER, TEXT, TRUTH, answer_schemas, message_schemas

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
    ("DELETE", "/v1/sql/{ident}"): ("End a statement, whichever process of the port runs it", ()),
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
    ("GET", "/metrics"): ("Prometheus text of all processes of the port", ()),
}
BODIES: dict[tuple[str, str], tuple[dict[str, Any], tuple[str, ...]]] = {
    ("POST", "/v1/sql"): (
        {
            "sql": TEXT,
            "as_of": {"type": ["string", "integer"]},
            "limit": NUMBER,
            "format": {"enum": ["json", "arrow"]},
            "id": TEXT,
        },
        ("sql",),
    ),
    ("POST", "/v1/webhooks"): (
        {
            "table": TEXT,
            "url": TEXT,
            "where": TEXT,
            "columns": {"type": "array", "items": TEXT},
            "select": TEXT,
            "conflate": TRUTH,
            "secret": TEXT,
            "from": TEXT,
        },
        ("table", "url"),
    ),
    ("POST", "/v1/queries"): (
        {
            "name": TEXT,
            "sql": TEXT,
            "key": {"type": "array", "items": TEXT},
            "from": TEXT,
            "source": TEXT,
            "options": {"type": "object"},
        },
        ("name", "sql"),
    ),
}
_JSON = "application/json"
_DONE: dict[str, tuple[str, ...]] = {"200": (_JSON,)}
ANSWERS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("GET", "/v1/tables/{name}"): {"200": (_JSON,), "304": ()},
    ("GET", "/v1/poll"): {"200": (_JSON, "application/vnd.msgpack")},
    ("GET", "/v1/subscribe"): {"101": (), "200": ("text/event-stream",)},
    ("GET", "/v1/sse"): {"200": ("text/event-stream",)},
    ("POST", "/v1/sql"): {"200": (_JSON, "application/vnd.apache.arrow.stream")},
    ("DELETE", "/v1/sql/{ident}"): {"202": (_JSON,)},
    ("POST", "/v1/webhooks"): {"201": (_JSON,)},
    ("DELETE", "/v1/webhooks/{ident}"): {"204": ()},
    ("POST", "/v1/tickets"): {"201": (_JSON,)},
    ("POST", "/v1/queries"): {"201": (_JSON,)},
    ("DELETE", "/v1/queries/{name}"): {"202": (_JSON,)},
    ("GET", "/metrics"): {"200": ("text/plain",)},
}
"""Status and media types of what is no refusal, where it is not 200 and JSON."""
_SHAPES = {"/v1/poll": "Poll", "/v1/tables/{name}": "State"}
_PUBLIC = ("/healthz", "/readyz", "/v1/openapi.json", "/v1/asyncapi.json")


def openapi() -> dict[str, Any]:
    """The OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), (summary, query) in OPERATIONS.items():
        inside = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"\{(\w+)\}", path)
        ]
        asked = [{"name": name, "in": "query", "description": PARAMETERS[name], "schema": TEXT} for name in query]
        operation: dict[str, Any] = {
            "summary": summary,
            "parameters": inside + asked,
            "responses": _responses(method, path),
        }
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
            "schemas": {"Problem": _problem()} | answer_schemas() | message_schemas(),
        },
    }


async def show_openapi(_: Request) -> Response:
    """The OpenAPI document."""
    return Response(to_json(openapi()), media_type="application/json")


async def show_asyncapi(_: Request) -> Response:
    """The AsyncAPI document."""
    return Response(to_json(asyncapi(VERSION)), media_type="application/json")


ROUTES: list[BaseRoute] = [
    Route("/v1/openapi.json", show_openapi, methods=["GET"]),
    Route("/v1/asyncapi.json", show_asyncapi, methods=["GET"]),
]


def _responses(method: str, path: str) -> dict[str, Any]:
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: dict[str, Any] = {}
    for status, kinds in ANSWERS.get((method, path), _DONE).items():
        found[status] = {"description": HTTPStatus(int(status)).phrase}
        if kinds:
            found[status]["content"] = {kind: _content(path, kind) for kind in kinds}
    found["4XX"] = {"description": "refused", "content": problem}
    return found if path == "/healthz" else found | {"503": {"description": "not now", "content": problem}}


def _content(path: str, kind: str) -> dict[str, Any]:
    if kind != _JSON:
        return {}
    name = _SHAPES.get(path)
    return {"schema": {"$ref": f"#/components/schemas/{name}"} if name else {"type": "object"}}


def _problem() -> dict[str, Any]:
    texts = dict.fromkeys(("type", "title", "detail", "code"), TEXT)
    return {"type": "object", "properties": texts | {"status": NUMBER}, "required": ["title", "status"]}
