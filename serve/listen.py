"""A listening socket, and Uvicorn on it in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from lakehouse.contract.errors import EnvironmentProblem

BACKLOG = 4_096


def listen(host: str, port: int, section: str, *, shared: bool = False) -> socket.socket:
    """A socket that listens.

    Args:
        section: of the settings that name the port.
        shared: other processes listen on the port too.

    Raises:
        EnvironmentProblem: the address cannot be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{port}: {error.strerror}",
            f"Stop what holds the port, or set MILLRACE_{section.upper()}_PORT to another (0: any free one)",
        ) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Base URL of what listens there, e.g. ``http://127.0.0.1:8400``."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


async def serve_until(
    stop: asyncio.Event, config: uvicorn.Config, listener: socket.socket, up: Callable[[], None]
) -> None:
    """Serve until ``stop`` is set, and close the socket. ``up`` is called once connections are taken."""
    server = _QuietServer(config, up)
    stopper = asyncio.create_task(_stop_when(stop, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        stopper.cancel()
        listener.close()


class _QuietServer(uvicorn.Server):
    """Uvicorn without its own signal handlers."""

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
