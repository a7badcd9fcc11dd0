"""Server processes as each other's peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from serve.http.peers import Peers, merged_metrics

SECRET = b"s" * 32


def notes(folder: Path) -> list[dict[str, Any]]:
    return [orjson.loads(text) for path in folder.glob("*.json") if (text := path.read_bytes())]


@contextlib.asynccontextmanager
async def running(folder: Path, *names: str, secret: bytes = SECRET) -> AsyncIterator[list[Peers]]:
    async def echo(asked: dict[str, Any]) -> Any:
        return asked

    async def hang(_: dict[str, Any]) -> Any:
        await asyncio.Event().wait()

    made = [Peers(folder, name, secret, {"echo": echo, "hang": hang}) for name in names]
    tasks = [asyncio.create_task(peers.run()) for peers in made]
    try:
        async with asyncio.timeout(60):
            while len(notes(folder)) < len(names):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no failure."""
    monkeypatch.setattr("serve.http.peers._PATIENCE_S", 60.0)


async def test_the_others_answer_by_name(tmp_path: Path) -> None:
    async with running(tmp_path / "peers", "a", "b", "c") as (one, _, _):
        assert (tmp_path / "peers").stat().st_mode & 0o077 == 0
        assert await one.ask("echo", text="ü\n") == {"b": {"text": "ü\n"}, "c": {"text": "ü\n"}}
        assert await one.ask("nothing that they know") == {}
        await asyncio.sleep(0)
    assert not list((tmp_path / "peers").iterdir()), "a note ends with its process"


async def test_one_that_was_killed_or_hangs_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path, "a", "b") as (one, _):
        (tmp_path / "killed-1.json").write_bytes(orjson.dumps({"name": "killed", "port": 1}))
        (tmp_path / "torn-1.json").write_bytes(b"{")
        assert await one.ask("echo") == {"b": {}}
        assert not (tmp_path / "killed-1.json").exists()
        monkeypatch.setattr("serve.http.peers._PATIENCE_S", 0.3)
        assert await one.ask("hang") == {}


async def test_nobody_is_answered_without_the_secret(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b"):
        stranger = Peers(tmp_path, "stranger", b"guessed", {})
        assert await stranger.ask("echo") == {}
        port = next(note["port"] for note in notes(tmp_path) if note["name"] == "a")
        old = Peers(tmp_path, "old", SECRET, {})._signed(orjson.dumps({"ask": "echo", "at": 1.0}))
        for line in (b"\n", b"[]\n", b'{"ask": "echo"}\n', b"x" * 100_000, old):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


def test_metrics_are_one_text() -> None:
    one = '# HELP n_total How many.\n# TYPE n_total counter\nn_total{kind="x"} 1.0\n'
    other = one.replace("1.0", "2.0") + '# HELP g A gauge.\n# TYPE g gauge\ng{a="q\\"\\n"} 3.0\n'
    assert merged_metrics({"serve-1": one, "serve-2": other}).decode() == (
        "# HELP n_total How many.\n# TYPE n_total counter\n"
        'n_total{kind="x",process="serve-1"} 1.0\nn_total{kind="x",process="serve-2"} 2.0\n'
        '# HELP g A gauge.\n# TYPE g gauge\ng{a="q\\"\\n",process="serve-2"} 3.0\n'
    )
