"""The process of the control plane: ``millrace control``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakehouse.contract.control import ADMIN_KEY, MACHINE_KEY, address_file, control_folder
from lakehouse.contract.keys import is_loopback, key_hash, new_key, new_key_id
from lakehouse.contract.listen import listen, serve_until, url_of, uvicorn_config
from lakehouse.contract.settings import Settings
from lakehouse.contract.storage import write_whole
from serve.access import uses_tls
from serve.control.openapi import control_openapi
from serve.control.operations import key_row
from serve.control.routes import HANDLERS, ControlContext, routes
from serve.control.store import OPERATOR, ControlStore
from serve.control.tables import KeyRow
from serve.control.types import Action, NewKey
from serve.control.watchers import Watchers
from serve.push.request import json_response

log = logging.getLogger(__name__)

_SERVER_TIMEOUT_S = 15.0
_FIRST_KEYS: dict[str, Action] = {ADMIN_KEY: "manage", MACHINE_KEY: "state"}


def open_store(settings: Settings) -> ControlStore:
    """The database, brought up to date. Raises ConfigError or EnvironmentProblem."""
    store = ControlStore(settings)
    store.migrate()
    return store


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

    Raises:
        ConfigError, EnvironmentProblem: the database, the address or the certificate cannot be used.
    """
    control = settings.control
    tls = uses_tls(settings.serve)
    if not (tls or is_loopback(control.host)):
        log.warning("%s is reached from elsewhere without TLS: keys can be read on the way", control.host)
    store = await asyncio.to_thread(open_store, settings)
    try:
        await asyncio.to_thread(first_keys, settings, store)
        listener = listen(control.host, control.port, "control")
        config = uvicorn_config(make_control_app(settings, store), settings.serve)
        url = url_of(listener, tls=tls)
        address_file(settings).write_text(url, encoding="utf-8")
        await serve_until(stop, config, listener, lambda: ready(url))
    finally:
        store.close()
