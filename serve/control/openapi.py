"""The OpenAPI 3.1 document of the control plane, made from its operations and their types."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import msgspec

from serve.control import types
from serve.control.routes import FORWARDED, MAX_WAIT_S, OPERATIONS, Operation

VERSION = "1"
_REF = "#/components/schemas/{name}"
_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "string", "description": "what the page before said as next"},
    "limit": {"type": "integer", "minimum": 1, "maximum": types.MAX_PAGE},
    "tenant": {"type": "string"},
    "app": {"type": "string"},
}
_PATH: dict[str, dict[str, Any]] = {name: {"type": "string"} for name in ("tenant", "app", "id", "name")}
_STATE_QUERY: dict[str, dict[str, Any]] = {
    "wait": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S, "description": "seconds to wait for a change"},
    "node": {"type": "string", "pattern": "^[0-9a-f]{1,32}$", "description": "id of the process that asks"},
}
_REFUSALS = {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}}


def control_openapi() -> dict[str, Any]:
    """The document."""
    kinds = [each for one in OPERATIONS for each in (one.body, one.answer) if each not in (None, dict)]
    shared = [*dict.fromkeys([*kinds, types.SharedState, types.Health, types.Problem])]
    schemas, components = msgspec.json.schema_components(shared, ref_template=_REF)
    refs = dict(zip(shared, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one, refs)
    state = _operation("The state that our processes need, or what has changed in it", "GET")
    state["parameters"] = [
        *_parameters("query", _STATE_QUERY),
        {"name": "If-None-Match", "in": "header", "schema": {"type": "string"}},
    ]
    state["responses"] |= {"200": _content("OK", refs[types.SharedState]), "304": {"description": "Not Modified"}}
    paths["/v1/state"] = {"get": state}
    for path, words in (("/healthz", "The process answers"), ("/readyz", "The database answers")):
        public = _operation(words, "GET") | {"security": []}
        public["responses"] |= {"200": _content("OK", refs[types.Health])}
        paths[path] = {"get": public}
    for kind in FORWARDED:
        paths[f"/v1/{kind}"] = {
            "get": _forwarded(f"List {kind}", "GET"),
            "post": _forwarded(f"Add one of {kind}", "POST"),
        }
        paths[f"/v1/{kind}/{{id}}"] = {
            method: _forwarded(words, method.upper()) | {"parameters": _parameters("path", {"id": _PATH["id"]})}
            for method, words in (("get", f"One of {kind}"), ("delete", f"Remove one of {kind}"))
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Millrace control plane", "version": VERSION},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": components},
    }


def _described(one: Operation, refs: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    words = (one.run.__doc__ or "").partition("\n")[0]
    summary, _, asked = words.partition(": ``?")
    found = _operation(summary if asked else words, one.method)
    inside = {name: _PATH[name] for name in re.findall(r"\{(\w+)\}", one.path)}
    query = {name: _QUERY[name] for name in re.findall(r"(\w+)=", asked)}
    found["parameters"] = [*_parameters("path", inside), *_parameters("query", query)]
    if one.method in ("PATCH", "PUT", "DELETE"):
        found["parameters"].append({"name": "If-Match", "in": "header", "schema": {"type": "string"}})
    if one.body is dict:
        kind = {"type": "object"}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": kind}, "application/toml": {"schema": {"type": "string"}}},
        }
    elif one.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[one.body]}}}
    phrase = HTTPStatus(one.status).phrase
    answer = {"description": phrase} if one.answer is None else _content(phrase, refs[one.answer])
    found["responses"][str(one.status)] = answer
    if "ETag" in words:
        found["responses"]["304"] = {"description": "Not Modified"}
    return found


def _operation(summary: str, method: str) -> dict[str, Any]:
    responses = {
        "4XX": {"description": "refused", "content": _REFUSALS},
        "503": {"description": "the database does not answer", "content": _REFUSALS},
    }
    return {"summary": summary, "parameters": [], "responses": responses}


def _forwarded(summary: str, method: str) -> dict[str, Any]:
    found = _operation(summary, method)
    found["responses"]["2XX"] = {"description": "as the server answers; see its own document"}
    if method == "POST":
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    return found


def _parameters(place: str, schemas: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": place, "schema": schema} | ({"required": True} if place == "path" else {})
        for name, schema in schemas.items()
    ]


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
