"""The HTTP face of a collecting node (composition only)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from uvicorn.server import ServerState

from ingest.acks import RecentEvents, ack_state
from ingest.collectors.door import Door, presented_key
from ingest.collectors.http import EventsEndpoint, Responds, problem, refuse, unavailable
from ingest.collectors.timed import Connections, TimedHttpProtocol
from ingest.collectors.wire import WireProtocol
from ingest.errors import BadToken, EventRefused
from ingest.keys import KeyRing
from ingest.lakestate import LakeState
from ingest.limits import Gate
from ingest.stats import NodeStats
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline
from lakehouse.contract.settings import CollectSettings

_BACKLOG = 2_048


def make_app(
    *,
    door: Door,
    stats: NodeStats,
    recent: RecentEvents,
    pipeline: Pipeline,
    lake_root: Path,
    progress: Callable[[], Mapping[str, Any]] = dict,
    routes: Sequence[BaseRoute] = (),
    responder: Responds | None = None,
) -> Starlette:
    """The ASGI application.

    Args:
        door: what requests with events go through.
        stats: of the node.
        recent: events whose senders may ask for them.
        pipeline: what is collected.
        lake_root: where the tables are.
        progress: what ``/readyz`` says beside the reason while the node is not ready.
        routes: that others bring along; they go before the ones here.
        responder: answers the events of sources that say so.
    """
    lake = LakeState(Lake(lake_root))

    async def healthz(_: Request) -> Response:
        return _json({"alive": True})

    async def readyz(_: Request) -> Response:
        reason = door.not_ready()
        return unavailable(reason, **progress()) if reason else _json({"ready": True})

    async def metrics(request: Request) -> Response:
        _guard(request, door.gate)
        return Response(generate_latest(stats.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_stats(request: Request) -> Response:
        _guard(request, door.gate)
        return _json(stats.stats())

    async def ack(request: Request) -> Response:
        token = door.signer.open(request.path_params["token"])
        products = [product.name for product in pipeline.products_of(token.source)]
        state = await asyncio.to_thread(ack_state, token, recent, lake, products)
        found = {name: value for name, value in dataclasses.asdict(state).items() if value is not None}
        found |= found.pop("coordinates", {})
        return _json({"event_id": token.event_id, "source": token.source, **found})

    return Starlette(
        routes=[
            *routes,
            Route("/v1/stats", show_stats, methods=["GET"]),
            Route("/v1/acks/{token}", ack, methods=["GET"]),
            Route("/v1/{source}", EventsEndpoint(door, responder)),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ],
        exception_handlers={EventRefused: _refused, BadToken: _bad_token},
    )


def _guard(request: Request, gate: Gate) -> None:
    """Where senders need keys, what the node counts is for keys and for its own machine only."""
    if not gate.keys_required or (request.client is not None and is_loopback(request.client.host)):
        return
    shown = [presented_key(name, value) for name, value in request.headers.raw]
    gate.key(next((key for key in shown if key), None))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, EventRefused)
    return refuse(error)


async def _bad_token(_: Request, error: Exception) -> Response:
    return problem(400, str(error), code="bad-token")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def is_loopback(host: str) -> bool:
    """Whether this address, or ``localhost``, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(settings: CollectSettings, keys: KeyRing) -> None:
    """Do not listen to everybody without keys.

    Raises:
        ConfigError: the address is no loopback one, and there are no keys.
    """
    if not (is_loopback(settings.host) or keys.required or settings.allow_anonymous):
        raise ConfigError(
            f"{settings.host} is reached from elsewhere, and there are no API keys",
            key="collect.host",
            remedy="Make one with `millrace keys new`, or set collect.allow_anonymous = true",
        )


class HttpServer:
    """uvicorn on a socket that is bound already, in the running event loop; signals stay with the caller.

    Args:
        app: for everything but plain requests with events.
        door: for these.
        settings: address and limits.
        ws: makes the protocol of a connection that asks for a WebSocket; None: there are none.
    """

    def __init__(self, app: Starlette, door: Door, settings: CollectSettings, *, ws: Any = None) -> None:
        self._socket = _bind(settings.host, settings.port)
        self.connections = Connections(door.gate, settings.request_timeout_s, settings.idle_timeout_s)
        self._door = door
        config = uvicorn.Config(
            app,
            http=self._protocol,  # type: ignore[arg-type]
            ws=ws or "none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)

    def _protocol(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], **options: Any
    ) -> WireProtocol:
        def fallback() -> TimedHttpProtocol:
            return TimedHttpProtocol(config, server_state, app_state, timed=self.connections, **options)

        return WireProtocol(self._door, self.connections, fallback, server_state.connections)

    @property
    def url(self) -> str:
        """Base of its addresses."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self) -> None:
        """Serve until :meth:`stop`."""
        watch = asyncio.create_task(self.connections.watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watch.cancel()

    def stop(self) -> None:
        """Take no more requests, finish those there are."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)  # whoever is told the address may connect, even before uvicorn looks
    except OSError as error:
        bound.close()
        raise EnvironmentProblem(
            f"{host}:{port} cannot be bound: {error.strerror}",
            "Stop what uses it, or set MILLRACE_COLLECT_PORT",
        ) from None
    return bound
