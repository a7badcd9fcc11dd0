"""Child processes kept running: restarted with back-off, stopped together, none left behind.

A child leads a process group of its own. When it ends unasked, the rest of its group (a JVM, say) is killed and waited
for before the child is started again, so that a table never has two writers. When the supervisor itself is killed, its
children are told by the system (``PR_SET_PDEATHSIG``) and end cleanly.

:func:`serve_many` keeps several server processes on one port: this process holds the port's number, each child binds it
with SO_REUSEPORT, and the kernel shares connections out. Positions, tickets and webhooks are in the lake, so each child
can serve every subscriber.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lakehouse.contract.errors import EnvironmentProblem, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.settings import Settings, child_arguments

log = logging.getLogger(__name__)

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
HEALTHY_S = 30.0  # a child that ran this long starts its back-off anew
STOP_S = 20.0
PARENT_VARIABLE = "MILLRACE_PARENT"
REFUSED = 78
"""Exit status of a part that a restart does not help (EX_CONFIG of sysexits.h)."""
LACKING = 69
"""Exit status of a part that the machine lacks something for (EX_UNAVAILABLE): a restart may help later."""
MARK_VARIABLE = "MILLRACE_MARK"
_TEND_S = 0.2
_READY_S = 60.0


class PartRefused(MillraceError):
    """A part ended with a configuration error, whose message this is."""

    is_configuration = True


@dataclass(frozen=True, slots=True)
class Child:
    """One part to be kept running.

    Attributes:
        command: arguments of the ``millrace`` command.
        environment: variables added to ours.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """Keeps children running. Drive it by calling :meth:`tend` a few times a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._children: list[Child] = []
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._since: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self.restarts: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def start(self, child: Child) -> None:
        """Start a child and keep it running from now on."""
        self._children.append(child)
        self.restarts[child.name] = 0
        self._failures[child.name] = 0
        self._launch(child)

    def pid(self, name: str) -> int | None:
        """Process id of a child, or None while it does not run."""
        process = self._running.get(name)
        return process.pid if process is not None and process.poll() is None else None

    def tend(self) -> None:
        """Look after every child once: notice ends, start what is due.

        Raises:
            PartRefused: a child ended with a configuration error, so that starting it again is of no use.
            EnvironmentProblem: the machine lacks something for a child, which has not worked here yet. A child that
                worked before is started again: the trouble may pass, and the other parts go on meanwhile.
        """
        for child in self._children:
            process = self._running.get(child.name)
            if process is not None and process.poll() is not None:
                self._ended(child, process)
            if child.name not in self._running and self._now() >= self._due.get(child.name, 0.0):
                self.restarts[child.name] += 1
                self._launch(child)

    def stop(self, *names: str) -> None:
        """Stop the named children, or all, in reverse order of their start; returns when they and theirs are gone."""
        chosen = [c for c in reversed(self._children) if not names or c.name in names]
        self._children = [c for c in self._children if c not in chosen]
        for child in chosen:
            process = self._running.pop(child.name, None)
            if process is not None:
                _stop(child.name, process)

    def last_words(self, name: str) -> str:
        """The last line a child printed."""
        child = next((c for c in self._children if c.name == name), None)
        if child is None or not child.log.is_file():
            return ""
        lines = child.log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return lines[-1] if lines else ""

    def _error_of(self, child: Child) -> str:
        return self.last_words(child.name).removeprefix("error: ") or f"{child.name} refused to start"

    def _launch(self, child: Child) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)
        with child.log.open("ab") as out:
            self._running[child.name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "jobs.cli", *child.command],  # -P: a user's folder may hold a `jobs` too
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **_same_code(), **child.environment, PARENT_VARIABLE: str(os.getpid())},
            )
        self._since[child.name] = self._now()

    def _ended(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        del self._running[child.name]
        _clear_group(process.pid)
        if process.returncode == REFUSED:
            raise PartRefused(self._error_of(child))
        healthy = self._now() - self._since[child.name] >= HEALTHY_S
        if process.returncode == LACKING and not self.restarts[child.name] and not healthy:
            raise EnvironmentProblem(self._error_of(child))
        if healthy:
            self._failures[child.name] = 0
        pause = BACKOFF_S[min(self._failures[child.name], len(BACKOFF_S) - 1)]
        self._failures[child.name] += 1
        self._due[child.name] = self._now() + pause
        log.warning("%s ended (%s); again in %.1f s. See %s", child.name, _how(process.returncode), pause, child.log)


def _same_code() -> dict[str, str]:
    """Where a child finds its modules: where this process found them."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def follow_parent() -> None:
    """End this process, cleanly, when the supervisor that started it ends; without one, nothing happens."""
    global _supervised
    parent = os.environ.pop(PARENT_VARIABLE, "")
    _supervised = bool(parent)
    if not parent or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        raise SystemExit("the supervisor ended while this part was starting")


_supervised = False


def is_supervised() -> bool:
    """Whether a supervisor started this process."""
    return _supervised


def exit_status(error: MillraceError) -> int:
    """The status that this process ends with, from which its supervisor, if it has one, knows what to do."""
    if not _supervised:
        return 1
    if error.is_configuration:
        return REFUSED
    return LACKING if isinstance(error, EnvironmentProblem) else 1


def _stop(name: str, process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within %.0f s; killing it", name, STOP_S)
    _clear_group(process.pid)
    process.wait()


def _clear_group(group: int, timeout_s: float = 10.0) -> None:
    """Kill what is left of a process group and wait until it is gone."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        if not _alive(group):
            return
        time.sleep(0.02)


def _alive(group: int) -> bool:
    """Whether a process of the group lives; zombies that wait for their parent do not count."""
    proc = Path("/proc")
    if not (proc / "self").exists():
        return True
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(pgrp) == group and state != "Z":
                return True
    return False


def _how(code: int | None) -> str:
    if code is None:
        return "unknown"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def mark_of_child() -> Path | None:
    """File that this process writes when it serves, if it is one of several servers."""
    mark = os.environ.pop(MARK_VARIABLE, "")
    return Path(mark) if mark else None


async def serve_many(settings: Settings, *, ready: Callable[[str], None], stop: asyncio.Event) -> None:
    """Run ``serve.processes`` servers until ``stop`` is set.

    Args:
        ready: called with the base URL once all of them take connections.

    Raises:
        EnvironmentProblem: the port is taken, or a server does not start.
    """
    from lakehouse.contract.listen import bind
    from serve.access import check_start

    await asyncio.to_thread(check_start, settings)
    # Bound without listening: it gets no connections, and nobody else gets the number.
    holder = bind(settings.serve.host, settings.serve.port, "serve", shared=True)
    one = dataclasses.replace(settings.serve, port=holder.getsockname()[1], processes=1)
    arguments = child_arguments(dataclasses.replace(settings, serve=one))
    lake = Lake.of(settings)
    folder = lake.state / "run"
    folder.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor()
    marks = {f"serve-{number}": folder / f"serve-{number}.json" for number in range(1, settings.serve.processes + 1)}
    try:
        for name, mark in marks.items():
            mark.unlink(missing_ok=True)
            log_file = lake.state / "logs" / f"{name}.log"
            supervisor.start(Child(name, ["serve", *arguments], log_file, {MARK_VARIABLE: str(mark)}))
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
