"""JSON Schemas of all messages, for the OpenAPI and AsyncAPI documents; a test holds what is sent against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "ping": ("a webhook's test", {"webhook": TEXT, "table": TEXT, "at": _MS}),
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


def shape(fields: Mapping[str, Schema], optional: frozenset[str] = _OPTIONAL) -> Schema:
    """An object of these fields and no others."""
    needed = [name for name in fields if name not in optional]
    return {"type": "object", "properties": dict(fields), "required": needed, "additionalProperties": False}


def message_schemas() -> dict[str, Schema]:
    """Of every message, by its type."""
    pushed = {name: shape({"type": {"const": name}} | fields, _SOMETIMES) for name, (_, fields) in PUSHED.items()}
    return pushed | {name: shape({"type": {"const": name}} | fields) for name, (_, fields) in SENT.items()}


def answer_schemas() -> dict[str, Schema]:
    """Of the HTTP answers that a subscriber reads: a poll's, and a table's rows."""
    polled = [
        {"$ref": f"#/components/schemas/{name}"} for name in ("snapshot", "change", "heartbeat", "slow", "expired")
    ]
    poll = {"messages": {"type": "array", "items": {"oneOf": polled}}, "position": _POSITION, "behind": NUMBER}
    state = _VIEW | {"rows": _OBJECTS, "version": NUMBER} | _RESULT
    return {"Poll": shape(poll), "State": shape(state, _SOMETIMES | {"version"})}
