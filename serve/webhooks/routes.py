"""Webhooks over HTTP. A key sees only its own; a secret is shown once."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.core.hub import Hub
from serve.errors import RequestError
from serve.push.request import admitted, invalid, json_body, json_response, query_of, subscription_of, whole_number
from serve.tables.tables import Tables
from serve.webhooks.call import ForbiddenTarget, secret_text, target_of
from serve.webhooks.runner import WebhookFleet, secret_of
from serve.webhooks.store import Webhook, WebhookStore

_MAX_BODY = 32_768
MAX_WEBHOOKS = 100  # of a lake; each keeps a task and a connection
_MAX_LISTED = 1_000


class NewWebhook(msgspec.Struct, forbid_unknown_fields=True):
    """A webhook to be added: a subscription, and the URL that is called.

    Attributes:
        start: a position, or ``now``; empty: a snapshot first.
    """

    table: str
    url: str
    where: str = ""
    columns: tuple[str, ...] = ()
    select: str = ""
    conflate: bool = False
    start: str = msgspec.field(name="from", default="")
    cloudevents: bool = False


async def add(request: Request) -> Response:
    """Add a webhook; its secret is shown once"""
    fleet: WebhookFleet = request.state.fleet
    hub: Hub = request.state.hub
    tables: Tables = request.state.tables
    principal = admitted(request)
    new = await json_body(request, _MAX_BODY, NewWebhook)
    query = {"table": new.table, "where": new.where, "columns": ",".join(new.columns), "select": new.select}
    wanted = subscription_of(query | ({"from": new.start} if new.start not in ("", "now") else {}), hub.seal)
    principal.check_table(wanted.table)
    await tables.wait_for(wanted.table)
    if why := tables.problems.get(wanted.table):
        raise invalid("not_served", why)
    view = hub.view_of(wanted.table, principal, wanted)
    now = hub.seal.token(hub.channels[wanted.table].state.position(view.id))
    settings = request.state.settings.serve
    try:
        await target_of(new.url, private=settings.webhook_private)
    except ForbiddenTarget as error:
        raise invalid("bad_webhook", str(error)) from None
    hook = Webhook(
        "wh_" + secrets.token_hex(12),
        principal.owner,
        wanted.table,
        new.url,
        wanted.where,
        wanted.columns,
        new.conflate,
        int(time.time() * 1000),
        wanted.select,
        new.cloudevents,
    )
    store = await fleet.store()
    if not await asyncio.to_thread(store.add, hook, now if new.start == "now" else new.start, MAX_WEBHOOKS):
        raise RequestError(4409, "full", f"the lake has {MAX_WEBHOOKS} webhooks, which is the bound")
    fleet.changed()
    shown = _shown(hook) | {"secret": secret_text(secret_of(hub.seal, hook.id))}
    return json_response(shown, 201, Location=f"/v1/webhooks/{hook.id}")


async def listed(request: Request) -> Response:
    """Your webhooks"""
    fleet: WebhookFleet = request.state.fleet
    store, key = await fleet.store(), admitted(request).owner
    hooks = [hook for hook in (await asyncio.to_thread(store.all)).values() if hook.key == key]
    return json_response({"webhooks": [await _with_state(store, hook) for hook in hooks]})


async def show(request: Request) -> Response:
    """A webhook, and how it fares"""
    store, hook = await _own(request)
    return json_response(await _with_state(store, hook))


async def remove(request: Request) -> Response:
    """Remove a webhook and its log"""
    store, hook = await _own(request)
    await asyncio.to_thread(store.remove, hook.id)
    request.state.fleet.changed()
    return Response(status_code=204)


async def deliveries(request: Request) -> Response:
    """Latest deliveries, newest first: ``?limit=&before=``"""
    return await _log(request, dead=False)


async def dead(request: Request) -> Response:
    """Dead letters with their messages, newest first: ``?limit=&before=``"""
    return await _log(request, dead=True)


ROUTES: list[BaseRoute] = [
    Route("/v1/webhooks", listed, methods=["GET"]),
    Route("/v1/webhooks", add, methods=["POST"]),
    Route("/v1/webhooks/{ident}", show, methods=["GET"]),
    Route("/v1/webhooks/{ident}", remove, methods=["DELETE"]),
    Route("/v1/webhooks/{ident}/deliveries", deliveries, methods=["GET"]),
    Route("/v1/webhooks/{ident}/dead", dead, methods=["GET"]),
]


async def _own(request: Request) -> tuple[WebhookStore, Webhook]:
    fleet: WebhookFleet = request.state.fleet
    store, ident = await fleet.store(), request.path_params["ident"]
    hook = (await asyncio.to_thread(store.all)).get(ident)
    if hook is None or hook.key != admitted(request).owner:
        raise RequestError(RequestError.NOT_FOUND, "no_such_webhook", f"there is no webhook {ident!r}")
    return store, hook


async def _log(request: Request, *, dead: bool) -> Response:
    store, hook = await _own(request)
    query = query_of(request.url.query)
    limit = whole_number(query.get("limit", "100"), "limit", 1, _MAX_LISTED)
    before = whole_number(query["before"], "before", 0, 999_999_999) if "before" in query else None
    found = await asyncio.to_thread(store.deliveries, hook.id, dead=dead, limit=limit, before=before)
    shown: list[dict[str, Any]] = []
    for number, one in found:
        shown.append(
            {
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
        )
        if dead:
            shown[-1]["message"] = orjson.Fragment(one.body)
    return json_response({"deliveries": shown, "before": found[-1][0] if len(found) == limit else None})


async def _with_state(store: WebhookStore, hook: Webhook) -> dict[str, Any]:
    progress = await asyncio.to_thread(store.progress, hook.id)
    shown = _shown(hook) | {"state": progress.state, "position": progress.position or None}
    return shown | ({"detail": progress.detail} if progress.detail else {})


def _shown(hook: Webhook) -> dict[str, Any]:
    return {name: value for name, value in asdict(hook).items() if name != "key"}
