"""The OpenAPI 3.1 and AsyncAPI 3.0 documents, and the JSON Schemas of all messages that both refer to.

Bodies of requests are described by the types that read them; the rest is written here. Tests check it against the
routes, the answers and the messages sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.access import needs_key
from serve.http.catalog import NewQuery
from serve.push.request import json_response
from serve.sql.routes import NewStatement
from serve.webhooks.routes import NewWebhook

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
TRUTH: Schema = {"type": "boolean"}
_NAMES: Schema = {"type": "array", "items": TEXT}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_POSITION: Schema = {"type": "string", "description": "opaque: everything up to here has been delivered"}
_MS: Schema = {"type": "integer", "description": "milliseconds since the epoch"}
_MAYBE: Schema = {"type": ["integer", "null"]}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_VIEW: dict[str, Schema] = {
    "table": TEXT,
    "key": _NAMES,
    "columns": _NAMES,
    "position": _POSITION,
    "position_lives_ms": NUMBER,
    "where": TEXT,
    "select": TEXT,
}
_RESULT: dict[str, Schema] = {
    "through": {
        "type": ["object", "null"],
        "additionalProperties": NUMBER,
        "description": "offsets by TOPIC/PARTITION",
    },
    "committed_at": _MS,
}
_ANSWERED: dict[str, Schema] = {"code": TEXT, "detail": TEXT}
_CHOICE: dict[str, Schema] = {"where": TEXT, "columns": {"type": ["array", "string"], "items": TEXT}, "select": TEXT}

PUSHED: dict[str, tuple[str, dict[str, Schema]]] = {
    "snapshot": (
        "the rows at a position; what came before is void when first is true",
        _VIEW | {"rows": _OBJECTS, "first": TRUTH, "last": TRUTH} | _RESULT,
    ),
    "change": (
        "what one commit changed: upserts, deletes, leaves; after is the position before it",
        {"table": TEXT, "position": _POSITION, "after": _POSITION, "last": TRUTH}
        | {"upserts": _OBJECTS, "deletes": _OBJECTS, "leaves": _OBJECTS, "merged": NUMBER}
        | _RESULT
        | {"events": NUMBER, "oldest_at": _MS, "newest_at": _MS},
    ),
    "resumed": ("the position is served; the changes after it follow", _VIEW),
    "heartbeat": (
        "alive, and how far behind",
        {"table": TEXT, "position": _POSITION, "behind": NUMBER, "lag_ms": _MAYBE, "at": _MS},
    ),
    "slow": (
        "the subscriber lags, and when it will be cut",
        {"table": TEXT, "behind": NUMBER, "behind_ms": NUMBER, "cut_in_ms": NUMBER},
    ),
    "expired": (
        "what the subscriber had is void; a snapshot follows",
        {"table": TEXT, "reason": {"enum": ["log", "lagged", "filter"]}, "detail": TEXT},
    ),
    "error": ("the request is wrong; the connection is closed", _ANSWERED),
    "close": ("the end, where the transport has no close codes", {"code": NUMBER, "detail": TEXT}),
}
"""What the server sends: in a few words, and its fields beside ``type``."""

SENT: dict[str, tuple[str, dict[str, Schema]]] = {
    "ack": ("everything up to a position has been processed", {"position": _POSITION}),
    "filter": ("other rows or columns from now on", _CHOICE),
}
"""What a subscriber sends on a WebSocket."""

ASKED: dict[str, Schema] = {
    "table": TEXT,
    "from": _POSITION,
    **_CHOICE,
    "conflate": {"enum": [True, False, 0, 1, "0", "1"]},
    "window": NUMBER,
}
"""What a subscription is asked for with."""

_OPTIONAL = frozenset({"where", "columns", "select", "from", "conflate", "window", "method", "reply", "data"})
_SOMETIMES = frozenset({"leaves", "merged", "oldest_at", "newest_at", "where", "select"})
_HOOKED = ("snapshot", "change", "expired")
VERSION = "1"
PARAMETERS = {
    "table": "name of the table",
    "from": "position to go on from; without it a snapshot comes first",
    "where": "SQL condition on rows",
    "columns": "names of columns, separated by commas",
    "select": "a live aggregate, SELECT … GROUP BY …, instead of rows",
    "conflate": "1: when one lags, the latest of each key instead of every change",
    "window": "changes that may be out without an acknowledgement",
    "wait": "seconds to wait for something, at most 60",
    "limit": "at most so many",
    "as_of": "version, or time in ISO 8601",
    "since": "version, or time in ISO 8601, behind which changes begin",
    "until": "version, or time in ISO 8601, of the last change; without it the newest",
    "before": "older than this number",
    "drop": "true: the table too",
}
_JSON = "application/json"
_SHAPES = {"/v1/poll": "Poll", "/v1/tables/{name}": "State", "/v1/history/{name}": "History"}
BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/sql"): NewStatement,
    ("POST", "/v1/webhooks"): NewWebhook,
    ("POST", "/v1/queries"): NewQuery,
}
ANSWERS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("GET", "/v1/tables/{name}"): {"200": (_JSON,), "304": ()},
    ("GET", "/v1/history/{name}"): {"200": (_JSON, "application/x-ndjson"), "304": ()},
    ("GET", "/v1/subscribe"): {"101": (), "200": ("text/event-stream",)},
    ("POST", "/v1/sql"): {"200": (_JSON, "application/vnd.apache.arrow.stream")},
    ("POST", "/v1/webhooks"): {"201": (_JSON,)},
    ("DELETE", "/v1/webhooks/{ident}"): {"204": ()},
    ("POST", "/v1/tickets"): {"201": (_JSON,)},
    ("POST", "/v1/queries"): {"201": (_JSON,)},
    ("DELETE", "/v1/queries/{name}"): {"202": (_JSON,)},
    ("GET", "/v1/quality/{path}"): {"200": ("text/html", "text/css"), "304": ()},
    ("GET", "/metrics"): {"200": ("text/plain",)},
}
"""Status and media types of what is no refusal, where it is not 200 and JSON."""


def shape(fields: Mapping[str, Schema], optional: frozenset[str] = _OPTIONAL) -> Schema:
    """An object with these fields and no others."""
    needed = [name for name in fields if name not in optional]
    return {"type": "object", "properties": dict(fields), "required": needed, "additionalProperties": False}


_STREAMED = [name for name in PUSHED if name != "close"]
_CALLS: dict[str, Schema] = {
    "subscribe": shape(ASKED | {"method": {"enum": ["change", "alert"]}, "reply": TRUTH}),
    "unsubscribe": shape({"table": TEXT}),
}
_IDENT: Schema = {"type": ["string", "integer", "null"]}
_HEADERS = shape(
    {
        "webhook-id": {"type": "string", "description": "the same on every attempt"},
        "webhook-timestamp": TEXT,
        "webhook-signature": {"type": "string", "description": "v1, and base64 of HMAC-SHA-256 of id.timestamp.body"},
        "millrace-event": {"enum": list(_HOOKED)},
    }
) | {"additionalProperties": True}


def message_schemas() -> dict[str, Schema]:
    pushed = {name: shape({"type": {"const": name}} | fields, _SOMETIMES) for name, (_, fields) in PUSHED.items()}
    return pushed | {name: shape({"type": {"const": name}} | fields) for name, (_, fields) in SENT.items()}


def answer_schemas() -> dict[str, Schema]:
    """Schemas of a poll's answer, of a table's rows, and of problems."""
    polled = [_schema(name) for name in ("snapshot", "change", "heartbeat", "slow", "expired")]
    poll = {"messages": {"type": "array", "items": {"oneOf": polled}}, "position": _POSITION, "behind": NUMBER}
    state = _VIEW | {"rows": _OBJECTS, "version": NUMBER} | _RESULT
    history = {name: _VIEW[name] for name in ("table", "key", "columns", "position")}
    history |= {"until": NUMBER, "changes": {"type": "array", "items": _schema("change")}, "next": _MAYBE_TEXT}
    texts = dict.fromkeys(("type", "title", "detail", "code"), TEXT)
    problem = {"type": "object", "properties": texts | {"status": NUMBER}, "required": ["title", "status"]}
    return {
        "Poll": shape(poll),
        "History": shape(history),
        "State": shape(state, _SOMETIMES | {"version"}),
        "Problem": problem,
    }


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI document."""
    called = {name: _call(name, _schema(name)) for name in _STREAMED}
    called |= {name: _call(name, _schema("change"), True) for name in ("change", "alert")}
    calls = {f"call_{name}": _call(name, params, True) for name, params in _CALLS.items()}
    head = {"jsonrpc": {"const": "2.0"}, "id": _IDENT}
    error = shape({"code": NUMBER, "message": TEXT, "data": shape({"code": TEXT})})
    answers = {
        "result": {"summary": "it is done", "payload": shape(head | {"result": {"type": "object"}})},
        "failure": {"summary": "it was refused", "payload": shape(head | {"error": error})},
    }
    reply = shape(head | {"result": {}, "error": {}}, frozenset({"result", "error"}))
    words = "the change with this id has been processed; with an error nothing more is sent"
    replies = {"reply": {"summary": words, "payload": reply}}
    hooked = {name: {"headers": _HEADERS, "payload": _schema(name)} for name in _HOOKED}
    streamed, events = _shared([*_STREAMED, *SENT]), _shared([*_STREAMED, "close"])
    tables = "tables, JSON-RPC 2.0 with millrace.rpc"
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Millrace", "version": VERSION},
        "channels": {
            "table": _channel("/v1/subscribe", "a table over a WebSocket", streamed, ASKED),
            "events": _channel("/v1/subscribe", "a table as server-sent events", events),
            "rpc": _channel("/v1/subscribe", tables, called | answers | calls | replies, {}),
            "webhook": _channel(None, "the URL of a webhook: a POST a message", hooked),
        },
        "operations": {
            "push": _operation("send", "table", _STREAMED),
            "answer": _operation("receive", "table", SENT),
            "stream": _operation("send", "events", events),
            "call": _operation("send", "rpc", called | answers),
            "called": _operation("receive", "rpc", calls | replies),
            "deliver": _operation("send", "webhook", _HOOKED),
        },
        "components": {
            "schemas": message_schemas(),
            "messages": {
                name: {"summary": text, "payload": _schema(name)} for name, (text, _) in (PUSHED | SENT).items()
            },
        },
    }


def _call(method: str, params: Schema, answered: bool = False) -> dict[str, Any]:
    """A JSON-RPC call with a message, or with parameters. With replies, a change's id is its position."""
    fields = {"jsonrpc": {"const": "2.0"}, "method": {"const": method}, "params": params}
    return {"payload": shape(fields | ({"id": _IDENT} if answered else {}), frozenset({"id"}))}


def _schema(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _shared(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _channel(address: str | None, words: str, messages: dict[str, Any], query: Any = None) -> dict[str, Any]:
    """A channel; with ``query`` it is a WebSocket."""
    found = {"address": address, "description": words, "messages": messages}
    if query is None:
        return found
    return found | {"bindings": {"ws": {"method": "GET", "query": shape(query), "bindingVersion": "0.1.0"}}}


def _operation(action: str, channel: str, messages: Iterable[str]) -> dict[str, Any]:
    place = f"#/channels/{channel}"
    refs = [{"$ref": f"{place}/messages/{name}"} for name in messages]
    return {"action": action, "channel": {"$ref": place}, "messages": refs}


def openapi(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document.

    The first line of an endpoint's docstring is its summary, with the query parameters that it takes as
    ``?NAME=&NAME=``.
    """
    _, bodies = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = re.sub(r":\w+\}", "}", route.path)
            for method in (route.methods or {"GET"}) - {"HEAD"}:
                paths.setdefault(path, {})[method.lower()] = _described(method, path, route.endpoint.__doc__ or "")
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace", "version": VERSION},
        "security": [{"key": []}, {"ticket": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": bearer, "ticket": {"type": "apiKey", "in": "query", "name": "ticket"}},
            "schemas": answer_schemas() | message_schemas() | bodies,
        },
    }


def _described(method: str, path: str, words: str) -> dict[str, Any]:
    summary, _, _ = words.partition("\n")
    inside = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"\{(\w+)\}", path)]
    asked = [
        {"name": name, "in": "query", "description": PARAMETERS[name], "schema": TEXT}
        for name in re.findall(r"[?&](\w+)=", summary)
    ]
    problem = {"application/problem+json": {"schema": _schema("Problem")}}
    responses: dict[str, Any] = {"4XX": {"description": "refused", "content": problem}}
    for status, kinds in ANSWERS.get((method, path), {"200": (_JSON,)}).items():
        responses[status] = {"description": HTTPStatus(int(status)).phrase}
        if kinds:
            responses[status]["content"] = {kind: _content(path, kind) for kind in kinds}
    operation = {"summary": summary.partition(": ``?")[0], "parameters": inside + asked, "responses": responses}
    if (body := BODIES.get((method, path))) is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _schema(body.__name__)}}}
    if not needs_key(path):
        operation["security"] = []
    if path != "/healthz":
        responses["503"] = {"description": "not now", "content": problem}
    return operation


def _content(path: str, kind: str) -> dict[str, Any]:
    name = _SHAPES.get(path)
    return {"schema": _schema(name) if name else {"type": "object"}} if kind == _JSON else {}


async def show_openapi(request: Request) -> Response:
    """This document"""
    return json_response(openapi(request.app.routes))


async def show_asyncapi(_: Request) -> Response:
    """The streams, in the same manner"""
    return json_response(asyncapi())


ROUTES: list[BaseRoute] = [
    Route("/v1/openapi.json", show_openapi, methods=["GET"]),
    Route("/v1/asyncapi.json", show_asyncapi, methods=["GET"]),
]
