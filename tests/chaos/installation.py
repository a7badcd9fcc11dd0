"""The whole product on a lake of its own: a broker behind a link, and ``millrace up``, which is kept running.

Ports are chosen once. Senders and subscribers go through links of their own, so that these can be cut too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from ingest.broker import EmbeddedBroker
from jobs.local.stack import free_port
from tests.chaos.clock import WallClock
from tests.chaos.proxy import Link
from tests.chaos.rig import PIPELINE

ROOT = Path(__file__).parents[2]
DISK_MB = 1_024
AGAIN_S = 1.0
SOURCE = "clicks"
TABLE = "per_who"
VISITS = """
[products.visits]
layer = "gold"
source = "clicks"
operator = "sessions"
by = ["who"]
time = "event_time"
gap = "1 seconds"

[products.visits.aggregates]
n = "count(*)"
total = "sum(id)"
"""


class Advertising(EmbeddedBroker):
    """A broker that tells its clients another port than its own: that of a link."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, heap_mb=192, die_with_parent=True)
        self._outer = port

    def _write_properties(self, identity: object) -> None:
        super()._write_properties(identity)  # type: ignore[arg-type]
        path = self.folder / "server.properties"
        lines = path.read_text().splitlines()
        lines = [
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{self._outer}" if line.startswith("advertised.") else line
            for line in lines
        ]
        path.write_text("\n".join(lines) + "\n")


class Installation:
    """Broker, supervisor and all parts.

    Attributes:
        folder: of everything; the lake is below ``disk``, which is a small file system where one may be mounted.
        clock: the wall clock of all but the broker, which is another machine.
        links: by name: ``kafka``, ``senders``, ``readers``.
        starts: of the supervisor.
        left: processes that were there after the end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.lake = self.disk / "lake"
        self.inbox = folder / "inbox"
        self.serve, self.collect, self._kafka = free_port(), free_port(), free_port()
        self.clock = WallClock(folder / "clock")
        self.broker = Advertising(folder / "kafka", self._kafka)
        self.bootstrap = f"127.0.0.1:{self._kafka}"
        inner = int(self.broker.settle().rpartition(":")[2])
        targets = {"kafka": (self._kafka, inner), "senders": (free_port(), self.collect)}
        targets["readers"] = (free_port(), self.serve)
        self.ports = {name: outer for name, (outer, _) in targets.items()}
        self.links = {name: Link(outer, target) for name, (outer, target) in targets.items()}
        self.small_disk = False
        self.starts = 0
        self.left: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.asynccontextmanager
    async def running(self, keep: Path | None = None) -> AsyncIterator[None]:
        """Everything, until the end of the block; then all of it is stopped in order, and copied if asked for."""
        async with contextlib.AsyncExitStack() as stack:
            self._make_folders(stack)
            if keep is not None:
                stack.callback(shutil.copytree, self.folder, keep, ignore=shutil.ignore_patterns("ballast-*", "*.lock"))
            for link in self.links.values():
                await stack.enter_async_context(link)
            stack.callback(self.broker.kill)
            await asyncio.to_thread(self.broker.start, 180)
            keeper = asyncio.create_task(self._keep_up())
            try:
                yield
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                await asyncio.to_thread(self._stop)
                self.left = list(self._leftovers())

    async def ready(self) -> None:
        """Return when collector, server and driver work."""
        async with asyncio.timeout(600):
            while not (self._answers(self.collect) and self._answers(self.serve) and self._driver_runs()):  # noqa: ASYNC110
                await asyncio.sleep(0.3)

    def pid(self, part: str) -> int | None:
        """Of a part, which leads a process group; ``up`` is the supervisor."""
        if part == "up":
            return self._process.pid if self._process is not None and self._process.poll() is None else None
        try:
            found = json.loads((self.lake / "_millrace" / "run" / "parts.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return found.get(part)

    def _leftovers(self) -> Iterator[str]:
        """Processes that name the lake."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if entry.name.isdigit() and str(self.lake) in command:
                    yield f"process {entry.name}: {command}"

    def _make_folders(self, stack: contextlib.AsyncExitStack) -> None:
        for folder in (self.disk, self.inbox, self.folder / "pipeline"):
            folder.mkdir(parents=True)
        (self.folder / "pipeline" / "pipeline.toml").write_text(
            PIPELINE.replace("TOPIC", SOURCE) + VISITS, encoding="utf-8"
        )
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(self.disk)]
        with contextlib.suppress(FileNotFoundError):
            self.small_disk = subprocess.run(command, capture_output=True, check=False).returncode == 0
        if self.small_disk:
            stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)

    async def _keep_up(self) -> None:
        """What systemd would do."""
        environment = os.environ | self.clock.environment
        while True:
            self.starts += 1
            with (self.folder / "up.log").open("ab") as output:
                self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork of milliseconds
                    self._command(), cwd=ROOT, env=environment, stdout=output, stderr=output
                )
            while self._process.poll() is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
            await asyncio.sleep(AGAIN_S)

    def _command(self) -> list[str]:
        chosen = {
            "kafka.bootstrap": self.bootstrap,
            "serve.port": self.serve,
            "collect.port": self.collect,
            "serve.webhook_private": "true",
            "serve.webhook_backoff_ms": 200,
            "spark.rehearse": "false",
        }
        settings = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "jobs.cli", "up", "--inbox", f"{SOURCE}={self.inbox}"]
        return [*command, "--lake", str(self.lake), "--pipeline", str(self.folder / "pipeline"), *settings]

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(120)
            if self._process.poll() is None:
                self._process.kill()

    def _driver_runs(self) -> bool:
        return (self.lake / "_millrace" / "run" / "lakehouse.json").is_file()

    def _answers(self, port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                return True
        except (urllib.error.URLError, OSError, ValueError):
            return False


def group(pid: int, number: int) -> None:
    """Signal a part with all that it started; nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def only(pid: int, number: int) -> None:
    """Signal one process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int, found: Callable[[str], bool]) -> list[int]:
    """Processes below this one whose name is the one looked for."""
    pids, below = [pid], []
    for one in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
            if one != pid and found(Path(f"/proc/{one}/comm").read_text().strip()):
                below.append(one)
    return below
