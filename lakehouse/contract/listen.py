"""A bound socket, and Uvicorn on it in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from lakehouse.contract.errors import port_taken
from lakehouse.contract.settings import ServeSettings

_BACKLOG = 4_096  # clients may connect before Uvicorn accepts
_STOP_S = 3


def bind(host: str, port: int, section: str, *, shared: bool = False) -> socket.socket:
    """A socket that holds the address, and does not listen yet.

    Args:
        section: of the settings that name the port.
        shared: other processes use the port too.

    Raises:
        EnvironmentProblem: the address cannot be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise port_taken(host, port, f"MILLRACE_{section.upper()}_PORT", error) from None
    return bound


def listen(host: str, port: int, section: str, *, shared: bool = False) -> socket.socket:
    """:func:`bind`, and listen."""
    listener = bind(host, port, section, shared=shared)
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def uvicorn_config(app: Starlette, serve: ServeSettings, **options: Any) -> uvicorn.Config:
    """Uvicorn with the certificate of ``serve``, without logs of its own."""
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_STOP_S,
        ssl_certfile=serve.tls_cert or None,
        ssl_keyfile=serve.tls_key or None,
        **options,
    )


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Base URL of what listens there, e.g. ``http://127.0.0.1:8400``."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def is_utf8(text: bytes) -> bool:
    """Whether the bytes are UTF-8, as a text message of a WebSocket has to be (RFC 6455, section 8.1)."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


async def serve_until(
    stop: asyncio.Event, config: uvicorn.Config, listener: socket.socket, up: Callable[[], None]
) -> None:
    """Serve until ``stop`` is set, and close the socket. ``up`` is called once connections are taken."""
    server = QuietServer(config, up)
    stopper = asyncio.create_task(_stop_when(stop, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()
        listener.close()


class QuietServer(uvicorn.Server):
    """Uvicorn without its own signal handlers."""

    def __init__(self, config: uvicorn.Config, up: Callable[[], None] = lambda: None) -> None:
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
