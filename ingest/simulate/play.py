"""Playing for a pipeline's source: what ``millrace simulate`` runs."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from ingest.simulate.generator import RsvpGenerator
from ingest.simulate.lines import FileLines, GeneratedLines, Lines, renew_rsvp
from ingest.simulate.player import Player
from ingest.simulate.server import run_player
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source

logger = logging.getLogger(__name__)


async def play_source(
    source: Source,
    *,
    input: Path | None = None,
    rate: float = 100.0,
    loop: bool = False,
    count: int | None = None,
    seed: int = 1,
    host: str = "127.0.0.1",
    port: int = 8402,
    ready: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Play a recording, or made-up RSVPs, until ``stop`` is set. SIGUSR1 makes what is due by then the end.

    Args:
        source: its ``event_id`` is what ``/ids`` tells.
        input: JSON-lines file, also gzipped; None: made-up RSVPs without end.
        rate: events a second.
        loop: play the file again and again, with new ids (of RSVPs; other events come again as they are).
        count: end after so many events.
        seed: of the made-up RSVPs.
        host: address to bind.
        port: port to bind; 0: any free one.
        ready: called with the base URL once clients can connect.
        stop: ends it.

    Raises:
        EnvironmentProblem: the file cannot be read or the port is taken.
    """
    if loop and input is not None and "rsvp_id" not in source.event_id:
        logger.warning("only RSVPs get new ids: further rounds repeat the ids of the first")
    lines = _open(input, seed, rate)
    player = Player(lines, rate, loop=loop, renew=renew_rsvp, event_id=source.event_id_template, limit=count)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, player.halt)

    def told(bound: int) -> None:
        if ready is not None:
            ready(f"http://{host}:{bound}")

    try:
        await run_player(player, host=host, port=port, ready=told, stop=stop)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise EnvironmentProblem(f"port {port} is taken", "Stop what listens there, or choose another port") from None
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        if isinstance(lines, FileLines):
            lines.close()


def _open(input: Path | None, seed: int, rate: float) -> Lines:
    if input is None:
        return GeneratedLines(RsvpGenerator(seed, rate=rate))
    try:
        return FileLines(input)
    except OSError as error:
        raise EnvironmentProblem(f"{input} cannot be read: {error.strerror or error}", "Check the path") from None
