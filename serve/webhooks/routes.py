"""Webhooks over HTTP. A key sees only its own; a secret is shown once."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.core.hub import Hub
from serve.core.model import SubscribeRequest
from serve.core.position import Position
from serve.core.values import to_json
from serve.errors import RequestError
from serve.push.request import (
    admitted,
    invalid,
    json_object,
    json_response,
    query_of,
    subscription_of,
    texts_of,
    whole_number,
)
from serve.security.access import Principal
from serve.tables.tables import Tables
from serve.webhooks.call import CallOutcome, Forbidden, new_secret, secret_key, target_of
from serve.webhooks.runner import WebhookFleet
from serve.webhooks.store import DELIVERED, Webhook, WebhookDelivery, WebhookStore

NOW = "now"
_MAX_BODY = 32_768
_MAX_LISTED = 1_000
_NAMES = frozenset({"table", "url", "where", "columns", "select", "conflate", "secret", "from"})


async def add(request: Request) -> Response:
    """``{"table", "url", "where"?, "columns"?, "select"?, "conflate"?, "secret"?, "from"?}`` → id and secret."""
    fleet: WebhookFleet = request.state.fleet
    principal = admitted(request)
    body = await json_object(request, _MAX_BODY, _NAMES)
    wanted, position = await _wanted(request, principal, body)
    url, secret = _text(body, "url"), _text(body, "secret") or new_secret()
    try:
        await target_of(url, private=request.state.settings.serve.webhook_private)
        secret_key(secret)
    except (Forbidden, ValueError) as error:
        raise RequestError(RequestError.BAD_REQUEST, "bad_webhook", str(error)) from None
    hook = Webhook(
        "wh_" + secrets.token_hex(12),
        principal.key,
        wanted.table,
        url,
        secret,
        wanted.where,
        wanted.columns,
        wanted.conflate,
        int(time.time() * 1000),
        wanted.select,
    )
    store = await fleet.store()
    most: int = request.state.settings.serve.max_webhooks
    if not await asyncio.to_thread(store.add, hook, position, most):
        raise RequestError(4409, "full", f"the lake has {most} webhooks, which is the bound")
    fleet.changed()
    return json_response({**_shown(hook), "secret": hook.secret}, 201, Location=f"/v1/webhooks/{hook.id}")


async def listed(request: Request) -> Response:
    """The caller's webhooks."""
    store, key = await _store(request), admitted(request).key
    hooks = [hook for hook in (await asyncio.to_thread(store.all)).values() if hook.key == key]
    return json_response({"webhooks": [await _with_state(store, hook) for hook in hooks]})


async def show(request: Request) -> Response:
    store, hook = await _own(request)
    return json_response(await _with_state(store, hook))


async def remove(request: Request) -> Response:
    """Stop delivery and forget its log."""
    store, hook = await _own(request)
    await asyncio.to_thread(store.remove, hook.id)
    request.state.fleet.changed()
    return Response(status_code=204)


async def ping(request: Request) -> Response:
    """Call it now with a ``ping`` message; answers with the outcome."""
    _, hook = await _own(request)
    fleet: WebhookFleet = request.state.fleet
    at = int(time.time() * 1000)
    body = to_json({"type": "ping", "webhook": hook.id, "table": hook.table, "at": at})
    return json_response(_outcome(await fleet.caller.post(hook.url, hook.secret, f"ping_{at}", "ping", body)))


async def deliveries(request: Request) -> Response:
    """Latest deliveries, newest first: ``?limit=&before=``."""
    return await _log(request, dead=False)


async def dead(request: Request) -> Response:
    """Dead letters with their messages, newest first: ``?limit=&before=``."""
    return await _log(request, dead=True)


async def redeliver(request: Request) -> Response:
    """Deliver a dead letter once more, out of turn."""
    store, hook = await _own(request)
    fleet: WebhookFleet = request.state.fleet
    ident: str = request.path_params["delivery"]
    letter = await asyncio.to_thread(store.dead, hook.id, ident)
    if letter is None:
        raise RequestError(RequestError.NOT_FOUND, "no_such_delivery", f"there is no dead letter {ident!r}")
    outcome = await fleet.caller.post(hook.url, hook.secret, letter.id, letter.kind, letter.body)
    await asyncio.to_thread(store.record, _after(letter, outcome))
    return json_response(_outcome(outcome))


ROUTES: list[BaseRoute] = [
    Route("/v1/webhooks", listed, methods=["GET"]),
    Route("/v1/webhooks", add, methods=["POST"]),
    Route("/v1/webhooks/{ident}", show, methods=["GET"]),
    Route("/v1/webhooks/{ident}", remove, methods=["DELETE"]),
    Route("/v1/webhooks/{ident}/ping", ping, methods=["POST"]),
    Route("/v1/webhooks/{ident}/deliveries", deliveries, methods=["GET"]),
    Route("/v1/webhooks/{ident}/dead", dead, methods=["GET"]),
    Route("/v1/webhooks/{ident}/dead/{delivery}", redeliver, methods=["POST"]),
]


async def _wanted(request: Request, principal: Principal, body: dict[str, Any]) -> tuple[SubscribeRequest, str]:
    """The requested subscription and its start position; empty for a snapshot."""
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    named = {name: value for name, value in body.items() if name not in ("url", "secret")}
    begin = named.get("from")
    if begin == NOW:
        del named["from"]
    wanted = subscription_of(texts_of(named), hub.seal)
    principal.check_table(wanted.table)
    await tables.wait_for(wanted.table)
    if why := tables.problems.get(wanted.table):
        raise invalid("not_served", why)
    view = hub.view_of(wanted.table, principal, wanted)
    if begin == NOW:
        state = hub.channels[wanted.table].state
        return wanted, hub.seal.token(Position(state.table.table_id, state.version, 0, view.id))
    return wanted, "" if wanted.position is None else hub.seal.token(wanted.position)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise invalid("bad_request", f"{name} is a text")
    return value


async def _store(request: Request) -> WebhookStore:
    fleet: WebhookFleet = request.state.fleet
    return await fleet.store()


async def _own(request: Request) -> tuple[WebhookStore, Webhook]:
    store, ident = await _store(request), request.path_params["ident"]
    hook = (await asyncio.to_thread(store.all)).get(ident)
    if hook is None or hook.key != admitted(request).key:
        raise RequestError(RequestError.NOT_FOUND, "no_such_webhook", f"there is no webhook {ident!r}")
    return store, hook


async def _log(request: Request, *, dead: bool) -> Response:
    store, hook = await _own(request)
    query = query_of(request.url.query)
    limit = whole_number(query.get("limit", "100"), "limit", 1, _MAX_LISTED)
    before = whole_number(query["before"], "before", 0, 999_999_999) if "before" in query else None
    found = await asyncio.to_thread(store.deliveries, hook.id, dead=dead, limit=limit, before=before)
    shown = [_delivery(number, each, message=dead) for number, each in found]
    return json_response({"deliveries": shown, "before": found[-1][0] if len(found) == limit else None})


def _delivery(number: int, one: WebhookDelivery, *, message: bool) -> dict[str, Any]:
    shown = {
        "id": one.id,
        "number": number,
        "type": one.kind,
        "position": one.position or None,
        "state": one.state,
        "attempts": one.attempts,
        "status": one.status or None,
        "error": one.error or None,
        "at": one.at,
    }
    return shown | ({"message": orjson.Fragment(one.body)} if message else {})


def _after(letter: WebhookDelivery, outcome: CallOutcome) -> WebhookDelivery:
    at, attempts = int(time.time() * 1000), letter.attempts + 1
    body, state = (letter.body, letter.state) if outcome.error else (b"", DELIVERED)
    return replace(letter, body=body, state=state, attempts=attempts, status=outcome.status, error=outcome.error, at=at)


async def _with_state(store: WebhookStore, hook: Webhook) -> dict[str, Any]:
    position, state, detail = await asyncio.to_thread(store.progress, hook.id)
    shown = _shown(hook) | {"state": state, "position": position or None}
    return shown | ({"detail": detail} if detail else {})


def _shown(hook: Webhook) -> dict[str, Any]:
    return {
        "id": hook.id,
        "table": hook.table,
        "url": hook.url,
        "where": hook.where,
        "columns": hook.columns,
        "select": hook.select,
        "conflate": hook.conflate,
        "created": hook.created,
    }


def _outcome(outcome: CallOutcome) -> dict[str, Any]:
    return {
        "delivered": not outcome.error,
        "status": outcome.status or None,
        "error": outcome.error or None,
        "ms": outcome.ms,
    }
