"""The serving process, put together: hub, tails, HTTP routes, WebSocket subscribers; one port, one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.applications import Starlette

from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import ServeSettings, Settings
from serve import routes
from serve.hub import Hub
from serve.metrics import HubCollector
from serve.push.codec import WEBSOCKET
from serve.push.http import TimedHttpProtocol
from serve.push.link import Link
from serve.push.websocket import SubscriberProtocol, deliver
from serve.tables import Tables, clock_ms

log = logging.getLogger(__name__)

_BACKLOG = 4_096
_STOP_S = 3


def make_app(settings: Settings) -> Starlette:
    """The ASGI application. Its lifespan runs the tails and the clock, and holds ``hub`` and ``tables`` as state."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        hub = Hub(settings.serve, [WEBSOCKET])
        tables = Tables(Lake(settings.lake), hub, settings.serve, deliver)
        tasks = [asyncio.create_task(tables.run()), asyncio.create_task(_run_clock(hub, settings.serve))]
        try:
            yield {"hub": hub, "tables": tables, "registry": _registry(hub)}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return Starlette(routes=routes.ROUTES, exception_handlers=routes.HANDLERS, lifespan=lifespan)


async def run_server(
    settings: Settings, *, ready: Callable[[str], None] | None = None, stop: asyncio.Event | None = None
) -> None:
    """Serve until ``stop`` is set. Run it in a uvloop loop; subscribers get close code 1001 at the end.

    Args:
        settings: the lake, and ``serve``.
        ready: called with the base URL, e.g. ``http://127.0.0.1:8400``, once connections are taken.
        stop: ends the server; None: only cancelling does.

    Raises:
        EnvironmentProblem: the address cannot be bound.
    """
    listener = _bind(settings.serve)
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        make_app(settings),
        http=TimedHttpProtocol,
        ws=SubscriberProtocol,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_STOP_S,
    )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(config, lambda: ready(url) if ready else None)
    stopper = asyncio.create_task(_stop_when(stop or asyncio.Event(), server))
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()
        listener.close()


class _Server(uvicorn.Server):
    """Uvicorn that leaves signals to whoever runs it, and says when it is up."""

    def __init__(self, config: uvicorn.Config, up: Callable[[], None]) -> None:
        super().__init__(config)
        self._up = up

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up()


async def _stop_when(stop: asyncio.Event, server: uvicorn.Server) -> None:
    await stop.wait()
    server.should_exit = True


def _bind(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            "Stop what holds the port, or set MILLRACE_SERVE_PORT to another (0: any free one)",
        ) from None
    listener.setblocking(False)
    return listener


def _registry(hub: Hub) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    registry.register(HubCollector(hub))
    return registry


async def _run_clock(hub: Hub, settings: ServeSettings) -> None:
    """Ticks; and tells the hub whose buffer has shrunk, because a slow reader may take long to drain it."""
    pause = max(0.02, min(settings.heartbeat_ms, settings.slow_after_ms, settings.cut_after_ms) / 5_000)
    buffered: dict[Link, int] = {}
    while True:
        await asyncio.sleep(pause)
        now = clock_ms()
        sizes = {subscriber: subscriber.link.buffered() for subscriber in hub.waiting()}
        for subscriber, size in sizes.items():
            if size < buffered.get(subscriber.link, 0):
                hub.heard_from(subscriber, now)
        buffered = {subscriber.link: size for subscriber, size in sizes.items()}
        deliver(hub.tick(now, int(time.time() * 1000)))
