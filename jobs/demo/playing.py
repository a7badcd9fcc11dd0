"""What a demo plays and how far it is: the player's process, and the collector's own counts."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingest.simulate.scenes import SCENES
from jobs.local.stack import Stack, free_port, get_json
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.pipeline.source import STREAM_KINDS


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for.

    Attributes:
        seconds: how long to play; None: until the input ends, or for ever.
        rate: events/s.
        input: JSON-lines file of events; None: made-up ones.
        quiet: no live board.
        live: play nothing; read the upstreams that the pipeline names.
    """

    seconds: float | None = None
    rate: float = 500.0
    input: Path | None = None
    browser: bool = True
    quiet: bool = False
    live: bool = False


@dataclass(frozen=True, slots=True)
class PlayProgress:
    """How far a playing is.

    Attributes:
        done: everything has been sent that will be.
    """

    sent: Mapping[str, int] = field(default_factory=dict)
    done: bool = False

    @property
    def total(self) -> int:
        """Events of all sources."""
        return sum(self.sent.values())


class Playing:
    """One player for a pipeline.

    Args:
        settings_pipeline: its name or path, as the commands take it.
    """

    def __init__(self, pipeline: Pipeline, settings_pipeline: str, options: DemoOptions) -> None:
        self._pipeline = pipeline
        self._name = settings_pipeline
        self._options = options
        self._port = free_port()
        self._play = secrets.token_hex(
            8
        )  # each demo plays a stream of its own, and a restarted collector goes on in it
        self.sources = list(_played(pipeline, options))
        self.base = f"http://127.0.0.1:{self._port}"

    def upstreams(self) -> dict[str, str]:
        """Address of the played stream, by source."""
        return {name: self._upstream(self._pipeline.sources[name]) for name in self.sources}

    def command(self) -> list[str]:
        """Arguments of ``millrace`` for the player."""
        options = self._options
        command = ["simulate", "--pipeline", self._name, "--rate", str(options.rate)]
        command += ["--port", str(self._port)]
        if options.input is not None:
            command += ["--input", str(options.input)]
        return command

    def progress(self) -> PlayProgress | None:
        """How far the player is; None while it does not answer."""
        sent: dict[str, int] = {}
        done = True
        for name in self.sources:
            status = get_json(f"{self.base}/status?source={name}")
            if status is None:
                return None
            sent[name] = int(status["sent"])
            done = done and bool(status["done"])
        return PlayProgress(sent, done)

    async def halt(self, stack: Stack) -> PlayProgress | None:
        """Tell the player to end where it is; how far it is once it has sent what was due."""
        told = False
        progress: PlayProgress | None = None
        for _ in range(150):
            progress = await asyncio.to_thread(self.progress)
            if progress.done if progress is not None else told:
                break
            pid = stack.supervisor.pid("player")
            if progress is not None and pid is not None and not told:
                os.kill(pid, signal.SIGUSR1)  # not before it answers: a player that still starts would die of it
                told = True
            await asyncio.sleep(0.1)
        return progress

    def sent(self, source: str, count: int) -> tuple[list[str | None], list[float]]:
        """Ids and times of all that the player sent for a source."""
        ids: list[str | None] = []
        times: list[float] = []
        for path, key, into in (("ids", "ids", ids), ("times", "at_ms", times)):
            while len(into) < count:
                limit = min(50_000, count - len(into))
                query = urllib.parse.urlencode({"from": len(into), "limit": limit, "source": source})
                document = get_json(f"{self.base}/{path}?{query}", timeout_s=60.0)
                if not document or not document[key]:
                    break
                into.extend(document[key])
        return ids, times

    def _upstream(self, source: Source) -> str:
        kind = next((spec.kind for spec in source.collectors if spec.kind in STREAM_KINDS), "websocket")
        path = {"websocket": "stream", "sse": "sse", "lines": "lines"}[kind]
        base = self.base.replace("http", "ws") if kind == "websocket" else self.base
        start = "&from=0" if kind == "sse" else ""  # an SSE client without an id would begin at the live point
        return f"{base}/{path}?play={self._play}&source={source.name}{start}"


def _played(pipeline: Pipeline, options: DemoOptions) -> list[str]:
    """Sources that the player plays: the first, or those of the scene."""
    first = next(iter(pipeline.sources))
    scene = SCENES.get(pipeline.name)
    if options.input is not None or scene is None:
        return [first]
    from ingest.simulate.player import scene_players

    return list(scene_players(scene, pipeline, rate=1.0, seed=1))


def source_stats(stack: Stack, source: str) -> dict[str, int]:
    """The collector's counts of a source; ``upstream``: messages read of its upstream; empty while it is away."""
    document = get_json(f"{stack.address.collect}/v1/stats")
    found = document["sources"].get(source, {}) if document else {}
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    if counts:
        counts["upstream"] = max((_place(upstream) for upstream in found.get("upstreams", [])), default=0)
    return counts


def upstream_problems(stack: Stack) -> dict[str, str]:
    """Upstreams that are not connected, with the reason; None of them: an empty dictionary."""
    document = get_json(f"{stack.address.collect}/v1/stats") or {"sources": {}}
    upstreams = [upstream for source in document["sources"].values() for upstream in source.get("upstreams", [])]
    return {upstream["url"]: str(upstream.get("ended", "")) for upstream in upstreams if not upstream["connected"]}


def _place(upstream: Mapping[str, Any]) -> int:
    """Index of the next message: the position, or (of our player's SSE, whose ids are indexes) one past the id."""
    if upstream["position"] is not None:
        return int(upstream["position"])
    cursor = str(upstream.get("cursor") or "")
    return int(cursor) + 1 if cursor.isdecimal() else 0
