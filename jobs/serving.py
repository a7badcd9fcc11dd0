"""Several server processes on one port: this process holds the port's number and keeps the others running.

Each of them binds the port with SO_REUSEPORT, and the kernel shares connections out. None of them keeps anything that
the others lack: positions, tickets and webhooks are the lake's. Where the parent ends, they end.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

from jobs.supervise import Child, Supervisor
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings

_TEND_S = 0.2
_READY_S = 60.0


async def serve_many(
    settings: Settings, arguments: list[str], *, ready: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Run ``serve.processes`` servers until ``stop`` is set.

    Args:
        settings: of all of them.
        arguments: that each is started with, beside the port.
        ready: called with the base URL once every one of them takes connections.
        stop: ends them.

    Raises:
        EnvironmentProblem: the port is taken, or they do not start.
    """
    from serve.security.gate import check_start

    await asyncio.to_thread(check_start, settings)
    holder = _hold(settings)
    port = holder.getsockname()[1]
    lake = Lake(settings.lake)
    folder = lake.state / "run"
    folder.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor()
    marks = {f"serve-{number}": folder / f"serve-{number}.json" for number in range(1, settings.serve.processes + 1)}
    try:
        for name, mark in marks.items():
            mark.unlink(missing_ok=True)
            command = ["serve", *arguments, "--port", str(port), "--processes", "1", "--mark", str(mark)]
            supervisor.start(Child(name, command, lake.state / "logs" / f"{name}.log"))
        url = await _up(supervisor, marks, stop)
        if url and not stop.is_set():
            ready(url)
        while not stop.is_set():
            supervisor.tend()  # here: a child that a passing thread started would be told of that thread's end
            await asyncio.sleep(_TEND_S)
    finally:
        await asyncio.to_thread(supervisor.stop)
        for mark in marks.values():
            mark.unlink(missing_ok=True)
        holder.close()


async def _up(supervisor: Supervisor, marks: dict[str, Path], stop: asyncio.Event) -> str:
    loop = asyncio.get_running_loop()
    until = loop.time() + _READY_S
    while not all(mark.is_file() for mark in marks.values()):
        if stop.is_set():
            return ""
        supervisor.tend()
        if loop.time() > until:
            name = next(name for name, mark in marks.items() if not mark.is_file())
            raise EnvironmentProblem(f"{name} did not start: {supervisor.last_words(name)}", "See its log")
        await asyncio.sleep(0.05)
    return str(json.loads(next(iter(marks.values())).read_text(encoding="utf-8"))["url"])


def _hold(settings: Settings) -> socket.socket:
    """Bind the port without listening: it gets no connections, and nobody else gets the number."""
    host = settings.serve.host
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, settings.serve.port))
    except OSError as error:
        holder.close()
        raise EnvironmentProblem(
            f"cannot listen on {host}:{settings.serve.port}: {error.strerror}",
            "Stop what holds the port, or set MILLRACE_SERVE_PORT to another (0: any free one)",
        ) from None
    return holder
