"""The REST of the control plane: its operations as one table, and how a request becomes a call of one."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import tomllib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from sqlalchemy.exc import DBAPIError, IntegrityError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakehouse.contract.access import key_hash
from serve.control import operations as act
from serve.control import types
from serve.control.store import Actor, AppRow, ControlStore, KeyRow, now_ms
from serve.errors import RequestError
from serve.push.request import body_of, http_error, invalid, problem, query_of, refused_request

KNOWN_S = 2.0  # that an answer to a change waits for our processes to know of it
MAX_WAIT_S = 30
_MAX_KEY_CHARS = 200
_AWAY_S = 3.0  # without a look: the process is gone, nobody waits for it
_MOST_NODES = 10_000
_NOBODY = key_hash("")
_NODE = re.compile(r"[0-9a-f]{1,32}")
_TAG = re.compile(r'"([0-9a-f]+)-(\d{1,15})"')
_JSON, _TOML = "application/json", "application/toml"


@dataclass(slots=True)
class _Node:
    revision: int
    seen: float
    looking: int = 0


class Watchers:
    """Which of our processes look at the state, and which revision each of them has.

    A look that is answered by a new state is acknowledged by the next one. One event loop.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._moved = asyncio.Event()
        self._revision = -1

    def committed(self, revision: int) -> None:
        """There is a newer state."""
        self._revision = max(self._revision, revision)
        self._notify()

    def began(self, name: str, revision: int) -> None:
        """A process looks, and has this revision."""
        now = asyncio.get_running_loop().time()
        if len(self._nodes) >= _MOST_NODES:
            self._nodes = {each: node for each, node in self._nodes.items() if self._here(node, now)}
        node = self._nodes.setdefault(name, _Node(revision, now))
        node.revision, node.seen, node.looking = revision, now, node.looking + 1
        self._notify()

    def ended(self, name: str) -> None:
        """Its look was answered."""
        if (node := self._nodes.get(name)) is not None:
            node.looking -= 1
            node.seen = asyncio.get_running_loop().time()

    async def newer(self, revision: int, most_s: float) -> None:
        """Return when there is a newer state than this, at the latest after so many seconds."""
        await self._until(lambda: self._revision > revision, most_s)

    async def known(self, revision: int, most_s: float) -> tuple[int, int]:
        """Wait until every process that looks knows a revision; how many do, of how many."""

        def counted() -> tuple[int, int]:
            now = asyncio.get_running_loop().time()
            here = [node for node in self._nodes.values() if self._here(node, now)]
            return sum(node.revision >= revision for node in here), len(here)

        await self._until(lambda: len({*counted()}) == 1, most_s)
        return counted()

    @staticmethod
    def _here(node: _Node, now: float) -> bool:
        return node.looking > 0 or now - node.seen < _AWAY_S

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _until(self, true: Callable[[], bool], most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not true():
                    await self._moved.wait()


@dataclass(frozen=True, slots=True)
class ControlContext:
    """What the requests share.

    Attributes:
        serve_url: where apps reach the servers.
        server: a client of theirs, for what they keep.
        epoch: of this process: revisions are compared within one, so that a restored database confuses nobody.
    """

    store: ControlStore
    watchers: Watchers
    serve_url: str
    server: httpx.AsyncClient
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked for.

    Attributes:
        run: see :mod:`serve.control.operations`; the first line of its docstring, up to a colon, is the summary.
        answer: type of the answer; None: there is no body.
        body: type of the request's body; ``dict``: a JSON object or TOML.
    """

    method: str
    path: str
    run: Callable[[act.ControlCall], Any]
    answer: Any = None
    body: Any = None
    status: int = 200

    @property
    def changes(self) -> bool:
        return self.method != "GET"


OPERATIONS = (
    Operation("GET", "/v1/tenants", act.list_tenants, types.Page[types.TenantEntry]),
    Operation("POST", "/v1/tenants", act.add_tenant, types.TenantEntry, types.NewTenant, 201),
    Operation("GET", "/v1/tenants/{tenant}", act.show_tenant, types.TenantEntry),
    Operation("DELETE", "/v1/tenants/{tenant}", act.remove_tenant, status=204),
    Operation("GET", "/v1/tenants/{tenant}/apps", act.list_apps, types.Page[types.AppEntry]),
    Operation("POST", "/v1/tenants/{tenant}/apps", act.add_app, types.AppEntry, types.NewApp, 201),
    Operation("GET", "/v1/tenants/{tenant}/apps/{app}", act.show_app, types.AppEntry),
    Operation("PATCH", "/v1/tenants/{tenant}/apps/{app}", act.change_app, types.AppEntry, types.ChangedApp),
    Operation("DELETE", "/v1/tenants/{tenant}/apps/{app}", act.remove_app, status=204),
    Operation("GET", "/v1/keys", act.list_keys, types.Page[types.KeyEntry]),
    Operation("POST", "/v1/keys", act.add_key, types.MadeKey, types.NewKey, 201),
    Operation("POST", "/v1/keys/import", act.import_keys, types.Imported, types.KeyImport),
    Operation("GET", "/v1/keys/{id}", act.show_key, types.KeyEntry),
    Operation("DELETE", "/v1/keys/{id}", act.revoke_key, status=204),
    Operation("POST", "/v1/keys/{id}/rotate", act.rotate_key, types.MadeKey, types.Rotation, 201),
    Operation("GET", "/v1/sources", act.list_sources, types.Page[types.SourceEntry]),
    Operation("GET", "/v1/sources/{name}", act.show_source, types.SourceEntry),
    Operation("PUT", "/v1/sources/{name}", act.put_source, types.SourceEntry, dict),
    Operation("DELETE", "/v1/sources/{name}", act.remove_source, status=204),
    Operation("GET", "/v1/subscriptions", act.list_subscriptions, types.Page[types.SubscriptionEntry]),
    Operation("POST", "/v1/subscriptions", act.add_subscription, types.MadeSubscription, types.NewSubscription, 201),
    Operation("GET", "/v1/subscriptions/{id}", act.show_subscription, types.SubscriptionEntry),
    Operation("DELETE", "/v1/subscriptions/{id}", act.remove_subscription, status=204),
    Operation("GET", "/v1/audit", act.list_audit, types.Page[types.AuditEntry]),
)
PUBLIC = frozenset({"/healthz", "/readyz", "/v1/openapi.json"})
FORWARDED = ("queries", "webhooks")
"""Resources that the servers keep: a request goes to them as it is, with the caller's key."""


def actor_of(store: ControlStore, headers: Mapping[str, str], *wanted: str) -> Actor:
    """Whose key was shown, if it is good for one of these actions. Raises RequestError."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    presented = text.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    parts = presented[:_MAX_KEY_CHARS].split("_", 2)
    named = len(parts) == 3 and parts[1].isascii() and parts[1].isprintable()
    with store.reading() as session:
        row = session.get(KeyRow, parts[1]) if named else None
        same = hmac.compare_digest(key_hash(presented), row.hash if row is not None else _NOBODY)
        app = session.get(AppRow, (row.tenant, row.app)) if row is not None and row.app else None
        ends = (row.until if row is not None else None, app.ends if app is not None else None)
        if row is None or not same or any(end is not None and end <= now_ms() for end in ends):
            raise RequestError(RequestError.UNAUTHORIZED, "unauthorized", "show a good key: Authorization: Bearer KEY")
        if not {*wanted} & {*row.actions}:
            raise RequestError(RequestError.FORBIDDEN, "forbidden", f"this key may not {' or '.join(wanted)}")
        return Actor(row.id, row.name, row.tenant)


def _endpoint(operations: Mapping[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    """The operations of one path, by method."""

    async def endpoint(request: Request) -> Response:
        operation = operations["GET" if request.method == "HEAD" else request.method]
        context: ControlContext = request.app.state.context
        query = query_of(request.url.query)
        if any("\0" in text for text in (request.url.path, *request.path_params.values(), *query.values())):
            raise invalid("bad_request", "there is a null character in the address")
        body = await body_of(request, types.MAX_BODY) if operation.body is not None else b""

        def run() -> tuple[Response, int | None]:
            actor = actor_of(context.store, request.headers, "manage")
            decoded = _decoded(request, body, operation.body) if operation.body is not None else None
            asked = request.path_params, query, decoded, request.headers.get("if-match", ""), context.serve_url
            if not operation.changes:
                with context.store.reading() as session:
                    return _answer(operation, act.ControlCall(actor, session, *asked), request.headers), None
            with context.store.changing(actor) as change:
                call = act.ControlCall(actor, change.session, *asked, change)
                return _answer(operation, call, request.headers), change.revision

        response, revision = await asyncio.to_thread(run)
        if revision is not None:
            context.watchers.committed(revision)
            known, of = await context.watchers.known(revision, KNOWN_S)
            response.headers["Millrace-Known-By"] = f"{known}/{of}"
        return response

    return endpoint


def _answer(operation: Operation, call: act.ControlCall, headers: Mapping[str, str]) -> Response:
    result = operation.run(call)
    call.session.flush()
    sent = {"Cache-Control": "no-store"}
    row, more = (result[0], {"key": result[1]}) if isinstance(result, tuple) else (result, {})
    if hasattr(row, "revision"):
        sent["ETag"] = f'"{row.revision}"'
        if not operation.changes and headers.get("if-none-match") == sent["ETag"]:
            return Response(None, 304, sent)
        result = act.shown(call, operation.answer, row, **more)
    if result is None:
        return Response(None, operation.status, sent)
    return Response(msgspec.json.encode(result), operation.status, sent, _JSON)


def _decoded(request: Request, body: bytes, kind: Any) -> Any:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent not in ((_JSON, _TOML) if kind is dict else (_JSON,)):
        raise RequestError(4415, "bad_request", f"send {_JSON}" + (f" or {_TOML}" if kind is dict else ""))
    try:
        if sent == _TOML:
            return tomllib.loads(body.decode())
        return msgspec.json.decode(body, type=dict[str, Any] if kind is dict else kind)
    except (msgspec.DecodeError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise invalid("bad_request", f"the body is not taken: {error}") from None


async def show_state(request: Request) -> Response:
    """What our processes must know; with If-None-Match what has changed since: ``?wait=&node=``"""
    context: ControlContext = request.app.state.context
    query = query_of(request.url.query)
    try:
        wait = min(MAX_WAIT_S, max(0.0, float(query.get("wait", "0"))))
    except ValueError:
        raise invalid("bad_request", "wait is a number of seconds") from None
    node = query.get("node", "")
    if node and not _NODE.fullmatch(node):
        raise invalid("bad_request", "node is at most 32 hexadecimal digits")
    tag = _TAG.fullmatch(request.headers.get("if-none-match", ""))
    since = int(tag[2]) if tag is not None and tag[1] == context.epoch else None

    def read() -> tuple[int, types.SharedState | None]:
        actor_of(context.store, request.headers, "state")
        with context.store.reading() as session:
            return act.state_since(session, since)

    revision, state = await asyncio.to_thread(read)
    context.watchers.committed(revision)
    if node:
        context.watchers.began(node, -1 if since is None else since)
    try:
        if state is None and wait:
            await context.watchers.newer(revision, wait)
            revision, state = await asyncio.to_thread(read)
    finally:
        if node:
            context.watchers.ended(node)
    headers = {"ETag": f'"{context.epoch}-{revision}"', "Cache-Control": "no-store"}
    if state is None:
        return Response(None, 304, headers)
    return Response(msgspec.json.encode(state), 200, headers, _JSON)


async def forward(request: Request) -> Response:
    """What the servers keep: see their own OpenAPI document"""
    context: ControlContext = request.app.state.context
    actor = await asyncio.to_thread(actor_of, context.store, request.headers, "read", "queries")
    body = await body_of(request, types.MAX_BODY)
    passed = ("authorization", "x-api-key", "content-type")
    sent = {name: request.headers[name] for name in passed if name in request.headers}
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    try:
        answer = await context.server.request(request.method, target, content=body, headers=sent)
    except httpx.HTTPError as error:
        raise RequestError(RequestError.FULL, "no_server", f"the server does not answer: {error}") from None
    if answer.is_success and request.method != "GET":
        kind, _, name = request.url.path.removeprefix("/v1/").partition("/")
        made = answer.json().get("id") or answer.json().get("name") if answer.content else ""
        await asyncio.to_thread(_log, context.store, actor, f"{kind}.{request.method.lower()}", name or str(made))
    kept = {name: answer.headers[name] for name in ("location", "retry-after") if name in answer.headers}
    return Response(answer.content, answer.status_code, kept, answer.headers.get("content-type"))


def _log(store: ControlStore, actor: Actor, what: str, subject: str) -> None:
    with store.changing(actor) as change:
        change.log(what, subject[:200], actor.tenant)


async def healthz(_: Request) -> Response:
    """The process answers"""
    return Response(msgspec.json.encode(types.Health("ok")), media_type=_JSON)


async def readyz(request: Request) -> Response:
    """The database answers"""
    context: ControlContext = request.app.state.context

    def look() -> None:
        with context.store.reading() as session:
            session.get(KeyRow, "")

    await asyncio.to_thread(look)
    return Response(msgspec.json.encode(types.Health("ready")), media_type=_JSON)


def routes() -> list[BaseRoute]:
    """One route a path: another method than those of its operations is answered 405."""
    by_path: dict[str, dict[str, Operation]] = defaultdict(dict)
    for operation in OPERATIONS:
        by_path[operation.path][operation.method] = operation
    found: list[BaseRoute] = [Route(path, _endpoint(each), methods=[*each]) for path, each in by_path.items()]
    forwarded = [
        Route(path, forward, methods=methods)
        for kind in FORWARDED
        for path, methods in ((f"/v1/{kind}", ["GET", "POST"]), (f"/v1/{kind}/{{rest:path}}", ["GET", "DELETE"]))
    ]
    return [*found, *forwarded, Route("/v1/state", show_state), Route("/healthz", healthz), Route("/readyz", readyz)]


async def _conflict(_: Request, __: Exception) -> Response:
    return problem(409, "somebody else changed it at the same time: try again", "changed")


async def _no_database(_: Request, __: Exception) -> Response:
    response = problem(503, "the database does not answer; the log says why", "no_database")
    response.headers["Retry-After"] = "1"
    return response


async def _failed(_: Request, __: Exception) -> Response:
    return problem(500, "the control plane failed; its log says how")


HANDLERS: Mapping[Any, Any] = {
    HTTPException: http_error,
    RequestError: refused_request,
    IntegrityError: _conflict,
    DBAPIError: _no_database,
    Exception: _failed,
}
