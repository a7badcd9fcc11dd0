"""The HTTP face of a collecting node (composition only)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import orjson
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ingest.acks import RecentEvents, Token, ack_state
from ingest.collectors.http import EventsEndpoint, problem, unavailable
from ingest.errors import BadToken
from ingest.lakestate import LakeState
from ingest.source import Intake
from ingest.stats import NodeStats
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline


def make_app(
    *,
    intakes: Mapping[str, Intake],
    stats: NodeStats,
    recent: RecentEvents,
    pipeline: Pipeline,
    lake_root: Path,
    not_ready: Callable[[], str],
) -> Starlette:
    """The ASGI application.

    Args:
        intakes: by source, for those that take events by HTTP.
        stats: of the node.
        recent: events whose senders may ask for them.
        pipeline: what is collected.
        lake_root: where the tables are.
        not_ready: why the node takes no events now; empty: it does.
    """
    lake = LakeState(Lake(lake_root))

    async def healthz(_: Request) -> Response:
        return _json({"alive": True})

    async def readyz(_: Request) -> Response:
        reason = not_ready()
        return unavailable(reason) if reason else _json({"ready": True})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(stats.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def show_stats(_: Request) -> Response:
        return _json(stats.stats())

    async def ack(request: Request) -> Response:
        try:
            token = Token.decode(request.path_params["token"])
        except BadToken as error:
            return problem(400, str(error))
        products = [product.name for product in pipeline.products_of(token.source)]
        state = await asyncio.to_thread(ack_state, token, recent, lake, products)
        found = {name: value for name, value in dataclasses.asdict(state).items() if value is not None}
        found |= found.pop("coordinates", {})
        return _json({"event_id": token.event_id, "source": token.source, **found})

    return Starlette(
        routes=[
            Route("/v1/stats", show_stats, methods=["GET"]),
            Route("/v1/acks/{token}", ack, methods=["GET"]),
            Route("/v1/{source}", EventsEndpoint(intakes, lambda: not not_ready())),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


class HttpServer:
    """uvicorn on a socket that is bound already, in the running event loop; signals stay with the caller."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config)

    @property
    def url(self) -> str:
        """Base of its addresses."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve(self) -> None:
        """Serve until :meth:`stop`."""
        await self._server.serve(sockets=[self._socket])

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
    except OSError as error:
        bound.close()
        raise EnvironmentProblem(
            f"{host}:{port} cannot be bound: {error.strerror}",
            "Stop what uses it, or set MILLRACE_COLLECT_PORT",
        ) from None
    return bound
