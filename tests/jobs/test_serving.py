"""Several server processes on one port: both answer, one that is killed is replaced, Ctrl-C ends them all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.serve.lakes import top_topics, topics, window

PATIENCE_S = 60


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_share_a_port(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    top_topics(root).overwrite(topics(0, [5]), [window(0)])
    command = [sys.executable, "-m", "jobs.cli", "serve", "--lake", str(root), "--port", "0", "--processes", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert "serving at http://127.0.0.1:" in line, line
        url = line.split("serving at ")[1].strip()
        first = children(server.pid)
        assert len(first) == 2
        assert answering(url) == set(first), "the kernel shares connections out"
        os.kill(first[0], signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while len(now := children(server.pid)) < 2 or first[0] in now:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert answering(url) == set(now)
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in now)
    finally:
        server.kill()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()


def answering(url: str) -> set[int]:
    """Processes that answer, each by its own start time: asked until two have."""
    until, seen = time.monotonic() + PATIENCE_S, set[int]()
    while len(seen) < 2 and time.monotonic() < until:
        try:
            seen.add(httpx.get(f"{url}healthz", timeout=10).json()["process"])
        except httpx.TransportError:
            time.sleep(0.05)
    return seen
