"""The process of the control plane, ``millrace control``, and the OpenAPI document of its REST."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakehouse.contract.access import (
    ADMIN_KEY,
    MACHINE_KEY,
    address_file,
    control_folder,
    is_loopback,
    key_hash,
    new_key,
    new_key_id,
)
from lakehouse.contract.listen import listen, serve_until, url_of, uvicorn_config
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import write_whole
from serve.access import uses_tls
from serve.control import types
from serve.control.operations import key_row
from serve.control.routes import (
    FORWARDED,
    HANDLERS,
    MAX_WAIT_S,
    OPERATIONS,
    ControlContext,
    Operation,
    Watchers,
    routes,
)
from serve.control.store import OPERATOR, ControlStore, KeyRow
from serve.control.types import Action, NewKey
from serve.push.request import json_response

log = logging.getLogger(__name__)

_SERVER_TIMEOUT_S = 15.0
_FIRST_KEYS: dict[str, Action] = {ADMIN_KEY: "manage", MACHINE_KEY: "state"}
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


def first_keys(settings: Settings, store: ControlStore) -> None:
    """Make the operator's key and that of our own processes, where their files are absent.

    So whoever may write the folder gets a new key by removing a file.
    """
    for name, action in _FIRST_KEYS.items():
        path = control_folder(settings) / name
        if path.exists():
            with store.reading() as session:
                if session.get(KeyRow, path.read_text(encoding="utf-8").partition("_")[2].partition("_")[0]) is None:
                    log.warning("the key in %s is not in %s: remove the file to get a new one", path, store.place)
            continue
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = new_key_id()
        text = new_key(made)
        with store.changing(OPERATOR) as change:
            change.session.add(key_row(NewKey((action,), name), made, key_hash(text), change))
            change.log("key.add", made, "", name=name, actions=[action])
        write_whole(path, f"{text}\n".encode(), 0o600, durable=True)
        log.info("a key that may %s is in %s", "see the state" if action == "state" else action, path)


def make_control_app(settings: Settings, store: ControlStore) -> Starlette:
    """The ASGI application."""
    serve = settings.serve
    host = f"[{serve.host}]" if ":" in serve.host else serve.host
    default = f"{'https' if serve.tls_cert else 'http'}://{host}:{serve.port}"
    serve_url = (settings.control.serve_url or default).rstrip("/")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=serve_url, timeout=_SERVER_TIMEOUT_S) as server:
            app.state.context = ControlContext(store, Watchers(), serve_url, server)
            yield

    async def show_openapi(_: Request) -> Response:
        return json_response(control_openapi())

    return Starlette(
        routes=[*routes(), Route("/v1/openapi.json", show_openapi)], exception_handlers=HANDLERS, lifespan=lifespan
    )


async def run_control(settings: Settings, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Run the control plane until ``stop`` is set.

    Raises ConfigError, EnvironmentProblem: the database, the address or the certificate cannot be used.
    """
    control = settings.control
    tls = uses_tls(settings.serve)
    if not (tls or is_loopback(control.host)):
        log.warning("%s is reached from elsewhere without TLS: keys can be read on the way", control.host)
    store = await asyncio.to_thread(ControlStore, settings)
    try:
        await asyncio.to_thread(first_keys, settings, store)
        listener = listen(control.host, control.port, "control")
        config = uvicorn_config(make_control_app(settings, store), settings.serve)
        url = url_of(listener, tls=tls)
        address_file(settings).write_text(url, encoding="utf-8")
        await serve_until(stop, config, listener, lambda: ready(url))
    finally:
        store.close()


def control_openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document, made from the operations and their types."""
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
