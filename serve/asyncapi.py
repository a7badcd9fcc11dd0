"""The AsyncAPI 3.0 document: what goes over WebSockets, server-sent events, callbacks and webhooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from serve.schemas import ASKED, NUMBER, PUSHED, SENT, TEXT, TRUTH, Schema, message_schemas, shape

_STREAMED = [name for name in PUSHED if name not in ("close", "ping")]
_HOOKED = ("snapshot", "change", "expired", "ping")
_CALLS: dict[str, Schema] = {
    "subscribe": shape(ASKED | {"method": {"enum": ["change", "alert"]}, "reply": TRUTH}),
    "unsubscribe": shape({"table": TEXT}),
    "filter": shape({name: ASKED[name] for name in ("table", "where", "columns", "select")}),
    "ack": shape({"position": ASKED["from"]}),
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
    """The document.

    Args:
        version: of the interface.
    """
    words = {name: text for name, (text, _) in (PUSHED | SENT).items()}
    called, answers, calls = (
        _called(),
        _answers(),
        {f"call_{name}": _call(name, it, True) for name, it in _CALLS.items()},
    )
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Millrace", "version": version},
        "channels": {
            "table": _channel("/v1/subscribe", "a table over a WebSocket", _shared([*_STREAMED, *SENT]), ASKED),
            "events": _channel("/v1/sse", "a table as server-sent events", _shared([*_STREAMED, "close"])),
            "rpc": _channel("/v1/rpc", "several tables, JSON-RPC 2.0 with millrace.rpc", called | answers | calls, {}),
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
    """What the server calls, with a message as parameters. A change has its position as id where replies are wanted."""
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
    """A channel; with ``query`` over a WebSocket."""
    found = {"address": address, "description": words, "messages": messages}
    if query is None:
        return found
    return found | {"bindings": {"ws": {"method": "GET", "query": shape(query), "bindingVersion": "0.1.0"}}}


def _operation(action: str, channel: str, messages: Iterable[str]) -> dict[str, Any]:
    place = f"#/channels/{channel}"
    refs = [{"$ref": f"{place}/messages/{name}"} for name in messages]
    return {"action": action, "channel": {"$ref": place}, "messages": refs}
