"""What the ``simulate`` command does: a file, or made-up RSVPs, played on the network."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from ingest.simulate.generator import RsvpGenerator
from ingest.simulate.lines import FileLines, GeneratedLines, Lines, renew_rsvp
from ingest.simulate.player import Player
from ingest.simulate.server import run_player
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source


async def play_source(
    source: Source,
    *,
    input: Path | None,
    rate: float,
    loop: bool,
    count: int | None,
    seed: int,
    port: int,
    ready: Callable[[str], None],
    stop: asyncio.Event,
) -> None:
    """Play until ``stop`` is set. SIGUSR1 halts the playing; the player then still answers what it has sent.

    Args:
        source: whose event ids the player tells.
        input: JSON-lines file, also gzipped; None: RSVPs of the generator.
        rate: events/s.
        loop: play the file again and again, each round with new ids.
        count: events at most.
        seed: of the generator.
        port: on the loopback address; 0: any free one.
        ready: called with the base URL once clients can connect.

    Raises:
        EnvironmentProblem: the port is taken, or the file cannot be read.
    """
    try:
        lines: Lines = (
            GeneratedLines(RsvpGenerator(seed, int(time.time() * 1000), rate)) if input is None else FileLines(input)
        )
    except OSError as error:
        raise EnvironmentProblem(f"{input} cannot be read: {error.strerror}") from None
    renew = renew_rsvp if loop else None
    player = Player(lines, rate, loop=loop, renew=renew, event_id=source.event_id_template, limit=count)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, player.halt)
    try:
        await run_player(player, port=port, ready=lambda bound: ready(f"http://127.0.0.1:{bound}"), stop=stop)
    except OSError as error:
        raise EnvironmentProblem(f"port {port} cannot be bound: {error.strerror}", "Give another with --port") from None
