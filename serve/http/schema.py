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

from serve.core.messages import to_json
from serve.http.control import NewQuery
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
_SUBSCRIPTION = ("where", "columns", "select")
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
    "before": "older than this number",
    "drop": "true: the table too",
}
_JSON = "application/json"
_SHAPES = {"/v1/poll": "Poll", "/v1/tables/{name}": "State"}
_PUBLIC = ("/healthz", "/readyz", "/v1/openapi.json", "/v1/asyncapi.json")


def shape(fields: Mapping[str, Schema], optional: frozenset[str] = _OPTIONAL) -> Schema:
    """An object with these fields and no others."""
    needed = [name for name in fields if name not in optional]
    return {"type": "object", "properties": dict(fields), "required": needed, "additionalProperties": False}


def message_schemas() -> dict[str, Schema]:
    pushed = {name: shape({"type": {"const": name}} | fields, _SOMETIMES) for name, (_, fields) in PUSHED.items()}
    return pushed | {name: shape({"type": {"const": name}} | fields) for name, (_, fields) in SENT.items()}


def answer_schemas() -> dict[str, Schema]:
    """Schemas of a poll's answer and of a table's rows."""
    polled = [
        {"$ref": f"#/components/schemas/{name}"} for name in ("snapshot", "change", "heartbeat", "slow", "expired")
    ]
    poll = {"messages": {"type": "array", "items": {"oneOf": polled}}, "position": _POSITION, "behind": NUMBER}
    state = _VIEW | {"rows": _OBJECTS, "version": NUMBER} | _RESULT
    return {"Poll": shape(poll), "State": shape(state, _SOMETIMES | {"version"})}


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


def asyncapi(version: str) -> dict[str, Any]:
    """The AsyncAPI document."""
    words = {name: text for name, (text, _) in (PUSHED | SENT).items()}
    called, answers = _called(), _answers()
    calls = {f"call_{name}": _call(name, params, True) for name, params in _CALLS.items()}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Millrace", "version": version},
        "channels": {
            "table": _channel("/v1/subscribe", "a table over a WebSocket", _shared([*_STREAMED, *SENT]), ASKED),
            "events": _channel("/v1/subscribe", "a table as server-sent events", _shared([*_STREAMED, "close"])),
            "rpc": _channel("/v1/subscribe", "tables, JSON-RPC 2.0 with millrace.rpc", called | answers | calls, {}),
            "webhook": _channel(None, "the URL of a webhook: a POST a message", _hooked()),
        },
        "operations": {
            "push": _operation("send", "table", _STREAMED),
            "answer": _operation("receive", "table", SENT),
            "stream": _operation("send", "events", [*_STREAMED, "close"]),
            "call": _operation("send", "rpc", called | {name: answers[name] for name in ("result", "failure")}),
            "called": _operation("receive", "rpc", calls | {"reply": answers["reply"]}),
            "deliver": _operation("send", "webhook", _HOOKED),
        },
        "components": {
            "schemas": message_schemas(),
            "messages": {name: {"summary": text, "payload": _payload(name)} for name, text in words.items()},
        },
    }


def _called() -> dict[str, Any]:
    """The server's calls, with a message as parameters. With replies, a change's id is its position."""
    found = {name: _call(name, _payload(name)) for name in _STREAMED}
    for name in ("change", "alert"):
        found[name] = _call(name, _payload("change"), True)
    return found


def _answers() -> dict[str, Any]:
    error = shape({"code": NUMBER, "message": TEXT, "data": shape({"code": TEXT})})
    head = {"jsonrpc": {"const": "2.0"}, "id": _IDENT}
    return {
        "result": {"summary": "it is done", "payload": shape(head | {"result": {"type": "object"}})},
        "failure": {"summary": "it was refused", "payload": shape(head | {"error": error})},
        "reply": {
            "summary": "the change with this id has been processed; with an error nothing more is sent",
            "payload": shape(head | {"result": {}, "error": {}}, frozenset({"result", "error"})),
        },
    }


def _call(method: str, params: Schema, answered: bool = False) -> dict[str, Any]:
    fields = {"jsonrpc": {"const": "2.0"}, "method": {"const": method}, "params": params}
    return {"payload": shape(fields | ({"id": _IDENT} if answered else {}), frozenset({"id"}))}


def _hooked() -> dict[str, Any]:
    return {name: {"headers": _HEADERS, "payload": _payload(name)} for name in _HOOKED}


def _payload(name: str) -> Schema:
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
        ("table", "from", *_SUBSCRIPTION, "conflate", "wait"),
    ),
    ("GET", "/v1/subscribe"): (
        "WebSocket, or server-sent events with Accept: text/event-stream; see the AsyncAPI document",
        ("table", "from", *_SUBSCRIPTION, "conflate", "window"),
    ),
    ("POST", "/v1/sql"): ("Run one reading statement", ()),
    ("GET", "/v1/webhooks"): ("Your webhooks", ()),
    ("POST", "/v1/webhooks"): ("Add a webhook; its secret is shown once", ()),
    ("GET", "/v1/webhooks/{ident}"): ("A webhook, and how it fares", ()),
    ("DELETE", "/v1/webhooks/{ident}"): ("Remove a webhook", ()),
    ("GET", "/v1/webhooks/{ident}/deliveries"): ("Its latest deliveries", ("limit", "before")),
    ("GET", "/v1/webhooks/{ident}/dead"): ("Its dead letters, with their messages", ("limit", "before")),
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
BODIES: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("POST", "/v1/sql"): NewStatement,
    ("POST", "/v1/webhooks"): NewWebhook,
    ("POST", "/v1/queries"): NewQuery,
}
_DONE: dict[str, tuple[str, ...]] = {"200": (_JSON,)}
ANSWERS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("GET", "/v1/tables/{name}"): {"200": (_JSON,), "304": ()},
    ("GET", "/v1/subscribe"): {"101": (), "200": ("text/event-stream",)},
    ("POST", "/v1/sql"): {"200": (_JSON, "application/vnd.apache.arrow.stream")},
    ("POST", "/v1/webhooks"): {"201": (_JSON,)},
    ("DELETE", "/v1/webhooks/{ident}"): {"204": ()},
    ("POST", "/v1/tickets"): {"201": (_JSON,)},
    ("POST", "/v1/queries"): {"201": (_JSON,)},
    ("DELETE", "/v1/queries/{name}"): {"202": (_JSON,)},
    ("GET", "/metrics"): {"200": ("text/plain",)},
}
"""Status and media types of what is no refusal, where it is not 200 and JSON."""


def openapi() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    _, bodies = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    for (method, path), (summary, query) in OPERATIONS.items():
        inside = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in re.findall(r"\{(\w+)\}", path)
        ]
        asked = [{"name": name, "in": "query", "description": PARAMETERS[name], "schema": TEXT} for name in query]
        operation = {"summary": summary, "parameters": inside + asked, "responses": _responses(method, path)}
        if (body := BODIES.get((method, path))) is not None:
            operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _payload(body.__name__)}}}
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
            "schemas": {"Problem": _problem()} | answer_schemas() | message_schemas() | bodies,
        },
    }


async def show_openapi(_: Request) -> Response:
    return Response(to_json(openapi()), media_type="application/json")


async def show_asyncapi(_: Request) -> Response:
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
