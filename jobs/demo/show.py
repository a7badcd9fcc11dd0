"""``millrace demo``: everything on this machine, a stream played into it, its results shown live.

:mod:`jobs.demo.account` counts the final figures from the tables. Latency is measured at two real sockets: when the
player sent an event, and when a subscriber of a product got the first message that contains it. With ``live`` nothing
is played: the pipeline's own upstreams are read, and there is nothing to compare the tables with.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import signal
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from jobs.demo.account import (
    Account,
    DemoResult,
    Push,
    covers,
    end_offsets,
    followed,
    percentiles,
    tables_through,
    take_account,
)
from jobs.demo.board import Board, Figures
from jobs.demo.playing import DemoOptions, Playing, PlayProgress, source_stats, upstream_problems
from jobs.local.machine import is_free
from jobs.local.stack import Stack, free_port
from jobs.local.supervise import Child
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.contract.settings import Settings
from serve.client import ClientOptions, Snapshot, subscribe

READY_S = 180.0
CONNECT_S = 30.0
DRAIN_S = 120.0
RETRY_S = 0.3  # pause before a reconnect at most: both ends are ours, and are about to come


@dataclass
class DemoRecord:
    """What the demo has seen so far."""

    began: float = field(default_factory=time.time)
    pushes: dict[str, list[Push]] = field(default_factory=dict)
    first_result_s: float | None = None
    stopping: bool = False


class Show:
    """One demo.

    Attributes:
        watched: the product whose pushes are timed, by source.
        shown: the product on the board.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, options: DemoOptions, console: Console) -> None:
        self.settings = settings
        self.pipeline = pipeline
        self.options = options
        self.console = console
        self.playing = None if options.live else Playing(pipeline, settings.pipeline, options)
        self.stack = Stack(settings, upstreams=self.playing.upstreams() if self.playing else {})
        self.watched = followed(pipeline)
        if not self.watched:
            raise ConfigError("no product of the pipeline has a channel", key="products", file=pipeline.path)
        self.shown: Product = next(iter(self.watched.values()))
        self.sources = self.playing.sources if self.playing else list(pipeline.sources)
        self.seen = DemoRecord()
        self.before: dict[str, dict[str, int]] = {}

    async def play(self) -> dict[str, Any]:
        """Play, wait until everything has arrived, count."""
        lake, stack = Lake.of(self.settings), self.stack
        since_us = int(time.time() * 1e6)
        self.before = {name: source_stats(stack, name) for name in self.sources}
        url = f"{stack.address.serve}/"
        self.console.print(f"Dashboard [bold link={url}]{url}[/]   lake {self.settings.lake}")
        board = Board(self.console, self.shown, url, quiet=self.options.quiet)
        readers = [asyncio.create_task(self._follow(name, board)) for name in {p.name for p in self.watched.values()}]
        if self.playing is not None:
            stack.supervisor.start(Child("player", self.playing.command(), stack.log_file("player")))
        if self.options.browser:
            await asyncio.to_thread(webbrowser.open, url)
        try:
            with board:
                progress = await self._until_played(board)
                counts = {name: source_stats(stack, name) for name in self.sources}
                arrived = await self._until_arrived(lake, progress)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        with self.console.status("Counting …"):
            if self.playing is not None:
                counts = {name: source_stats(stack, name) for name in self.sources}
            accounts = await asyncio.to_thread(self._accounts, lake, progress, since_us)
        acknowledged = sum(
            found.get("acknowledged", 0) - self.before[name].get("acknowledged", 0) for name, found in counts.items()
        )
        return DemoResult(
            self.pipeline.name,
            None if self.playing is None else progress.total,
            acknowledged,
            accounts,
            arrived=arrived,
            pushes=sum(map(len, self.seen.pushes.values())),
            first_result_s=self.seen.first_result_s,
            restarts={**stack.supervisor.restarts, "broker": stack.restarts_of_broker},
            lake=self.settings.lake,
        ).figures()

    async def until_ready(self) -> None:
        """Wait until every part is ready. Raises EnvironmentProblem: one did not get ready."""
        stack, deadline = self.stack, time.monotonic() + READY_S
        while waiting := await asyncio.to_thread(stack.waiting_for):
            if self.seen.stopping:
                raise EnvironmentProblem("stopped while starting")
            if time.monotonic() > deadline or max(stack.supervisor.restarts.values(), default=0) >= 4:
                folder = stack.log_file("lakehouse").parent
                raise EnvironmentProblem(f"not ready: {', '.join(waiting)}", f"See {folder}, or run: millrace doctor")
            await asyncio.to_thread(stack.tend)
            await asyncio.sleep(0.1)

    async def until_connected(self) -> None:
        """Wait until every live upstream is connected. Raises EnvironmentProblem: one is not reached."""
        deadline = time.monotonic() + CONNECT_S
        while problems := await asyncio.to_thread(upstream_problems, self.stack):
            if time.monotonic() > deadline or self.seen.stopping:
                url, reason = next(iter(problems.items()))
                raise EnvironmentProblem(
                    f"{url} is not reached ({reason})",
                    "Check the network and HTTPS_PROXY; without --live made-up events are played",
                )
            await asyncio.sleep(0.2)

    async def _follow(self, table: str, board: Board) -> None:
        pushes = self.seen.pushes.setdefault(table, [])
        options = ClientOptions(wait_for_table=True, longest_s=RETRY_S)
        async with subscribe(self.stack.address.serve, table, options=options) as subscription:
            async for message in subscription.reader():
                now = time.time() * 1000
                pushes.append(Push(now, dict(message.through or {})))
                is_first = self.seen.first_result_s is None and not isinstance(message, Snapshot)
                if is_first and not isinstance(message, Snapshot) and message.upserts:
                    self.seen.first_result_s = time.time() - self.seen.began
                if table == self.shown.name:
                    board.pushed(message, now)

    async def _until_played(self, board: Board) -> PlayProgress:
        """Tend the parts until the input is played, the time is over, or Ctrl-C; how far it is then."""
        progress = PlayProgress()
        began = None
        while not self.seen.stopping:
            await asyncio.to_thread(self.stack.tend)
            found = {name: await asyncio.to_thread(source_stats, self.stack, name) for name in self.sources}
            new = sum(s.get("acknowledged", 0) - self.before[n].get("acknowledged", 0) for n, s in found.items() if s)
            if self.playing is not None:
                told = await asyncio.to_thread(self.playing.progress)
                progress = told if told is not None else progress
            else:
                progress = PlayProgress({"": new})
            if began is None and progress.total:
                began = time.monotonic()
            board.show(Figures(progress.total, new, sum(s.get("in_log", 0) for s in found.values())))
            if progress.done:
                break
            seconds = self.options.seconds
            if seconds is not None and began is not None and time.monotonic() - began >= seconds:
                break
            await asyncio.sleep(0.25)
        if self.playing is not None:
            return await self.playing.halt(self.stack) or progress
        return progress

    async def _until_arrived(self, lake: Lake, progress: PlayProgress) -> bool:
        """Wait until all that was sent has reached the subscriber; False if it did not in time."""
        if self.playing is None:  # nobody tells a live stream to end, so reading ends
            await asyncio.to_thread(self.stack.supervisor.stop, "collect")
        self.seen.stopping = False
        deadline = time.monotonic() + DRAIN_S
        topics = [self.pipeline.sources[name].topic for name in self.sources]
        while time.monotonic() < deadline and not self.seen.stopping:
            await asyncio.to_thread(self.stack.tend)
            if await self._at_rest():
                ends = await asyncio.to_thread(end_offsets, self.stack.address.kafka, topics, self.stack.security())
                through = ends is not None and await asyncio.to_thread(tables_through, lake, self.pipeline, ends)
                if ends is not None and through and self._pushed(ends):
                    return True
            await asyncio.sleep(0.1)
        return False

    async def _at_rest(self) -> bool:
        """Whether Kafka has everything that the player sent."""
        if self.playing is None:
            return True
        progress = await asyncio.to_thread(self.playing.progress)
        if progress is None:
            return False
        for name in self.sources:
            stats = await asyncio.to_thread(source_stats, self.stack, name)
            if not stats or stats["upstream"] < progress.sent[name] or stats["in_log"]:
                return False
        return True

    def _pushed(self, ends: Mapping[str, int]) -> bool:
        for name in self.sources:
            if name in self.watched:
                pushes = self.seen.pushes.get(self.watched[name].name, [])
                topic = self.pipeline.sources[name].topic
                mine = {place: end for place, end in ends.items() if place.rpartition("/")[0] == topic}
                if not covers(pushes[-1].through if pushes else {}, mine):
                    return False
        return True

    def _accounts(self, lake: Lake, progress: PlayProgress, since_us: int) -> list[Account]:
        """The account of each source."""
        found = []
        for name in self.sources:
            sent: tuple[list[str | None], list[float]] = ([], [])
            if self.playing is not None:
                sent = self.playing.sent(name, progress.sent.get(name, 0))
            watched = self.watched.get(name)
            pushes = self.seen.pushes.get(watched.name, []) if watched else []
            source = self.pipeline.sources[name]
            found.append(take_account(lake, self.pipeline, source, *sent, pushes, since_us=since_us))
        return found


__all__ = ["DemoOptions", "demo", "percentiles", "run_demo"]


async def run_demo(settings: Settings, options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo to its end; returns its figures.

    Raises:
        EnvironmentProblem: a part did not get ready, or a live upstream is not reached.
        ConfigError: there is nothing to play for the pipeline.
    """
    serve, collect = settings.serve, settings.collect
    settings = dataclasses.replace(
        settings,
        serve=dataclasses.replace(serve, port=free_or_other("the dashboard", serve.host, serve.port, console)),
        collect=dataclasses.replace(collect, port=free_or_other("the collector", collect.host, collect.port, console)),
    )
    shown = Show(settings, declared_pipeline(settings), options, console)
    with _signals(shown.seen):
        try:
            with console.status("Starting broker, Spark, server and collector …"):
                await asyncio.to_thread(shown.stack.start)
                await shown.until_ready()
                if options.live:
                    await shown.until_connected()
            return await shown.play()
        finally:
            with console.status("Stopping …"):
                await asyncio.to_thread(shown.stack.stop)


def free_or_other(what: str, host: str, port: int, console: Console) -> int:
    """The port, or any free one where another program has it; a line says so."""
    if port and is_free(host, port):
        return port
    other = free_port()
    if port:
        console.print(f"port {port} is taken, so {what} is at port {other}")
    return other


@contextlib.contextmanager
def _signals(seen: DemoRecord) -> Iterator[None]:
    """Ctrl-C ends the playing; a second one, during the wait for the last events, ends that."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        seen.stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def demo(settings: Settings, options: DemoOptions) -> int:
    """The command: board and messages on standard error, one JSON object as the last line of standard output."""
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("serve.client").setLevel(logging.ERROR)  # the board says how old results are
    result = asyncio.run(run_demo(settings, options, console))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0 if not result["lost"] and not result["counted_twice"] and result["arrived"] else 1
