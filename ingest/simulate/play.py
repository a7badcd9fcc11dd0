"""Playing for a pipeline's sources: what ``millrace simulate`` runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ingest.simulate.generator import RsvpGenerator
from ingest.simulate.lines import FileLines, GeneratedLines, Lines, SceneLines, renew_rsvp
from ingest.simulate.player import Player
from ingest.simulate.scenes import SCENES, Scene
from ingest.simulate.server import run_player
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.pipeline import Pipeline, Source

logger = logging.getLogger(__name__)

RSVPS = "rsvps"  # the source that the generator of Meetup's RSVPs is for
_SAMPLE = 2_000  # events of a scene that tell the shares of its sources


@dataclass(frozen=True, slots=True)
class Play:
    """What is played, and where.

    Attributes:
        input: JSON-lines file, also gzipped; None: made-up events without end.
        rate: events a second, of all sources together.
        loop: play the file again and again, with new ids (of RSVPs; other events come again as they are).
        count: end after so many events, of all sources together.
        seed: of made-up events.
        host: address to bind.
        port: port to bind; 0: any free one.
    """

    input: Path | None = None
    rate: float = 100.0
    loop: bool = False
    count: int | None = None
    seed: int = 1
    host: str = "127.0.0.1"
    port: int = 8402


Ready = Callable[[str], None]


async def play_pipeline(
    pipeline: Pipeline, play: Play, *, ready: Ready | None = None, stop: asyncio.Event | None = None
) -> None:
    """Play a recording for the first source, or made-up events for all of them, until ``stop`` is set.

    SIGUSR1 makes what is due by then the end.

    Args:
        pipeline: the ``event_id`` of its sources is what ``/ids`` tells.
        play: what, and where.
        ready: called with the base URL once clients can connect.
        stop: ends it.

    Raises:
        ConfigError: there is no recording, and nobody knows how to make up events for this pipeline.
        EnvironmentProblem: the file cannot be read or the port is taken.
    """
    first = next(iter(pipeline.sources.values()))
    if play.input is not None or (pipeline.name not in SCENES and first.name == RSVPS):
        await play_source(first, play, ready=ready, stop=stop)
        return
    scene = SCENES.get(pipeline.name)
    if scene is None:
        raise ConfigError(
            f"there is no scene for the pipeline {pipeline.name!r}",
            key="pipeline",
            remedy=f"Give a recording with --input; scenes: {', '.join(sorted([*SCENES, 'meetup']))}",
        )
    players = scene_players(scene, pipeline, rate=play.rate, count=play.count, seed=play.seed)
    await _run(players, play, ready, stop)


def scene_players(
    scene: Scene, pipeline: Pipeline, *, rate: float, count: int | None, seed: int, start_ms: int | None = None
) -> dict[str, Player]:
    """A player for each source that the scene has events of; their rates are as the scene mixes them.

    Raises:
        ConfigError: the scene has events of a source that the pipeline has not.
    """
    start_ms = int(time.time() * 1000) if start_ms is None else start_ms
    mix = Counter(source for source, _ in islice(scene(seed, start_ms), _SAMPLE))
    unknown = mix.keys() - pipeline.sources.keys()
    if unknown:
        raise ConfigError(
            f"the scene has events of {min(unknown)!r}",
            key="sources",
            remedy=f"Sources of {pipeline.name}: {', '.join(pipeline.sources)}",
            file=pipeline.path,
        )
    players = {}
    for name in (name for name in pipeline.sources if name in mix):
        share = mix[name] / mix.total()
        limit = None if count is None else max(1, round(count * share))
        lines = SceneLines(scene, name, seed, start_ms)
        template = pipeline.sources[name].event_id_template
        players[name] = Player(lines, rate * share, event_id=template, limit=limit)
    return players


async def play_source(
    source: Source, play: Play, *, ready: Ready | None = None, stop: asyncio.Event | None = None
) -> None:
    """Play a recording, or made-up RSVPs, for one source; as :func:`play_pipeline`.

    Raises:
        EnvironmentProblem: the file cannot be read or the port is taken.
    """
    if play.loop and play.input is not None and "rsvp_id" not in source.event_id:
        logger.warning("only RSVPs get new ids: further rounds repeat the ids of the first")
    lines = _open(play)
    player = Player(
        lines, play.rate, loop=play.loop, renew=renew_rsvp, event_id=source.event_id_template, limit=play.count
    )
    try:
        await _run({source.name: player}, play, ready, stop)
    finally:
        if isinstance(lines, FileLines):
            lines.close()


async def _run(players: Mapping[str, Player], play: Play, ready: Ready | None, stop: asyncio.Event | None) -> None:
    def halt() -> None:
        for player in players.values():
            player.halt()

    def told(bound: int) -> None:
        if ready is not None:
            ready(f"http://{play.host}:{bound}")

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, halt)
    try:
        await run_player(players, host=play.host, port=play.port, ready=told, stop=stop)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        problem = f"port {play.port} is taken"
        raise EnvironmentProblem(problem, "Stop what listens there, or choose another port") from None
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


def _open(play: Play) -> Lines:
    if play.input is None:
        return GeneratedLines(RsvpGenerator(play.seed, rate=play.rate))
    try:
        return FileLines(play.input)
    except OSError as error:
        problem = f"{play.input} cannot be read: {error.strerror or error}"
        raise EnvironmentProblem(problem, "Check the path") from None
