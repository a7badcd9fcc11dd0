"""Several server processes on one port: both answer, one that is killed is replaced, Ctrl-C ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.serve.lakes import top_topics, topics, window

PATIENCE_S = 60


def started(root: Path, processes: int = 2, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.cli", "serve", "--lake", str(root), "--set", "serve.port=0"]
    command += ["--set", f"serve.processes={processes}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ})


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_share_a_port(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    top_topics(root).overwrite(topics(0, [5]), [window(0)])
    server = started(root)
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


def test_one_process_ends_without_a_complaint(tmp_path: Path) -> None:
    server = started(tmp_path / "lake", 1)
    assert server.stderr is not None
    assert any("serving at" in line for line in iter(server.stderr.readline, ""))
    server.send_signal(signal.SIGINT)
    _, rest = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert [line for line in rest.splitlines() if " INFO " not in line] == []


async def test_any_process_tells_the_metrics_of_all(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    top_topics(root).overwrite(topics(0, [5]), [window(0)])
    server = started(root)
    assert server.stderr is not None
    try:
        url = server.stderr.readline().split("serving at ")[1].strip()
        async with contextlib.AsyncExitStack() as stack:
            clients: dict[int, httpx.AsyncClient] = {}
            while len(clients) < 2:  # each keeps to one connection, so to one process
                limits = httpx.Limits(max_connections=1)
                client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, limits=limits, timeout=300))
                clients.setdefault((await client.get("/healthz")).json()["process"], client)
            one, other = clients.values()
            assert (await one.post("/v1/sql", json={"sql": "SELECT 1 AS one"})).status_code == 200
            wanted = {f'millrace_serve_subscribers{{process="serve-{n}"}} 0.0' for n in (1, 2)}
            done: list[float] = []
            async with asyncio.timeout(PATIENCE_S):  # each process writes its metrics every second
                while done != [0.0, 1.0]:
                    lines = (await other.get("/metrics")).text.splitlines()
                    ended = [line for line in lines if line.startswith('millrace_serve_sql_total{outcome="done"')]
                    done = sorted(float(line.rpartition(" ")[2]) for line in ended)
                    await asyncio.sleep(0.05)
            assert wanted <= set(lines)
            assert len([line for line in lines if line == "# TYPE millrace_serve_sql_total counter"]) == 1
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE_S)
        server.stderr.close()


def answering(url: str) -> set[int]:
    """Processes that answer, each by its own start time: asked until two have."""
    until, seen = time.monotonic() + PATIENCE_S, set[int]()
    while len(seen) < 2 and time.monotonic() < until:
        try:
            seen.add(httpx.get(f"{url}healthz", timeout=60).json()["process"])
        except httpx.TransportError:
            time.sleep(0.05)
    return seen
