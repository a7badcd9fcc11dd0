"""``millrace demo``: everything on this machine, a stream played into it, its results shown live.

:mod:`jobs.account` counts the final figures from the tables. Latency is measured at two real sockets: when the
player sent an event, and when a subscriber of a product got the first message that contains it. With ``live`` nothing
is played: the pipeline's own upstreams are read, and there is nothing to compare the tables with.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import signal
import sys
import time
import urllib.parse
import webbrowser
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ingest.simulate.scenes import SCENES
from jobs.account import (
    WARM_S,
    Account,
    Push,
    covers,
    end_offsets,
    followed,
    percentiles,
    tables_through,
    take_account,
)
from jobs.local.machine import is_free
from jobs.local.stack import Stack, free_port, get_json
from jobs.local.supervise import Child
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Product, Source
from lakehouse.contract.pipeline.folder import declared_pipeline
from lakehouse.contract.pipeline.source import STREAM_KINDS
from lakehouse.contract.settings import Settings
from serve.client import Change, ClientOptions, Message, Snapshot, TableView, subscribe

READY_S = 180.0
CONNECT_S = 30.0
DRAIN_S = 120.0
RETRY_S = 0.3  # pause before a reconnect at most: both ends are ours, and are about to come
_BAR = 32
_ROWS, _COLUMNS = 10, 6
_PLAIN_EVERY_S = 5.0


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


def demo(settings: Settings, options: DemoOptions) -> int:
    """The command: board and messages on standard error, one JSON object as the last line of standard output.

    Raises:
        EnvironmentProblem: a part did not get ready, or a live upstream is not reached.
        ConfigError: there is nothing to play for the pipeline.
    """
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("serve.client").setLevel(logging.ERROR)  # the board says how old results are
    serve, collect = settings.serve, settings.collect
    settings = dataclasses.replace(
        settings,
        serve=dataclasses.replace(serve, port=free_or_other("the dashboard", serve.host, serve.port, console)),
        collect=dataclasses.replace(collect, port=free_or_other("the collector", collect.host, collect.port, console)),
    )
    result = asyncio.run(Show(settings, declared_pipeline(settings), options, console).run())
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0 if not result["lost"] and not result["counted_twice"] and result["arrived"] else 1


def free_or_other(what: str, host: str, port: int, console: Console) -> int:
    """The port, or any free one where another program has it; a line says so."""
    if port and is_free(host, port):
        return port
    other = free_port()
    if port:
        console.print(f"port {port} is taken, so {what} is at port {other}")
    return other


class Board:
    """A product's newest rows, rates and latency, a few times a second; plain lines where there is no terminal.

    Args:
        product: whose rows are shown, best ten of a ``top_n`` with bars.
        url: of the dashboard; it stays on the screen.
    """

    def __init__(self, console: Console, product: Product, url: str, *, quiet: bool = False) -> None:
        self._product = product
        self._url = url
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._quiet = quiet
        self._view = TableView()
        self._history: deque[tuple[float, int]] = deque(maxlen=40)
        self._ages: deque[float] = deque(maxlen=60)
        self._events = 0
        self._printed = 0.0

    def __enter__(self) -> Board:
        if self._live is not None and not self._quiet:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def pushed(self, message: Message, now_ms: float) -> None:
        """Take one message of the subscription."""
        self._view.apply(message)
        if isinstance(message, Change):
            self._events += message.events or 0
            if message.oldest_at is not None and message.newest_at is not None:
                self._ages.append(now_ms - (message.oldest_at + message.newest_at) / 2)

    def show(self, sent: int, acknowledged: int, in_log: int) -> None:
        """Redraw with new counts; ``in_log`` are the events that Kafka has not acknowledged yet."""
        self._history.append((time.monotonic(), sent))
        if self._quiet:
            return
        ages = sorted(self._ages)
        age = f"{ages[len(ages) // 2]:,.0f} ms" if ages else "–"
        line = (
            f"sent {sent:,} ({self._rate():,.0f}/s)   acknowledged {acknowledged:,}   "
            f"in the log {in_log:,}   in gold {self._events:,}   receipt to dashboard {age} (median)"
        )
        if self._live is not None:
            self._live.update(self._render(line))
        elif time.monotonic() - self._printed >= _PLAIN_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(line)

    def _rate(self) -> float:
        (t0, n0), (t1, n1) = self._history[0], self._history[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def _render(self, line: str) -> RenderableType:
        rows = list(self._view.rows.values())
        newest = max((str(row.get("window_start", "")) for row in rows), default="")
        rows = [row for row in rows if str(row.get("window_start", "")) == newest]
        window = rows[0].get("window_start") if rows else None
        when = f", {window[11:19]} UTC" if isinstance(window, str) else "" if rows else ": waiting for the first result"
        title = Text(f"{self._product.name.replace('_', ' ').capitalize()}{when}", style="bold")
        table = _ranking(rows) if self._product.operator == "top_n" else _plain(rows)
        address = Text.assemble("Dashboard ", (self._url, f"bold link {self._url}"))
        return Group(address, title, table, Text(line, style="dim"))


def _ranking(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(justify="right", style="dim")
    table.add_column(max_width=34, overflow="ellipsis", no_wrap=True)
    table.add_column(justify="right", style="bold")
    table.add_column(style="cyan", no_wrap=True)
    most = max((row["count"] for row in rows), default=1)
    for row in sorted(rows, key=lambda row: row["rank"]):
        bar = "█" * max(1, round(_BAR * row["count"] / most))
        table.add_row(str(row["rank"]), Text(str(row["item"])), f"{row['count']:,}", bar)
    return table


def _plain(rows: list[Mapping[str, Any]]) -> Table:
    names = [name for name in (rows[0] if rows else {}) if not name.startswith("window_")][:_COLUMNS]
    numbers = [name for name in names if isinstance(rows[0][name], int | float)]
    if numbers:
        rows = sorted(rows, key=lambda row: -(row[numbers[0]] or 0))
    table = Table(*names, box=None, padding=(0, 1))
    for row in rows[:_ROWS]:
        table.add_row(*[Text(f"{row[n]:,}" if isinstance(row[n], int) else str(row[n])) for n in names])
    return table


@dataclass(frozen=True, slots=True)
class PlayProgress:
    """How far a playing is.

    Attributes:
        sent: events by source.
        done: everything has been sent that will be.
    """

    sent: Mapping[str, int] = field(default_factory=dict)
    done: bool = False

    @property
    def total(self) -> int:
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
        # Each demo plays a stream of its own, and a restarted collector goes on in it.
        self._play = secrets.token_hex(8)
        self.sources = _played(pipeline, options)
        self.base = f"http://127.0.0.1:{self._port}"

    def upstreams(self) -> dict[str, str]:
        """Address of the played stream, by source."""
        return {name: self._upstream(self._pipeline.sources[name]) for name in self.sources}

    def command(self) -> list[str]:
        """Arguments of ``millrace`` for the player."""
        options = self._options
        command = ["simulate", "--pipeline", self._name, "--rate", str(options.rate), "--port", str(self._port)]
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


def _stats(stack: Stack) -> dict[str, Any]:
    """What the collector says of each source; empty while it is away."""
    document = get_json(f"{stack.where['collect']}/v1/stats")
    return dict(document["sources"]) if document else {}


def source_counts(stack: Stack, source: str) -> dict[str, int]:
    """The collector's counts of a source; ``upstream``: messages read of its upstream; empty while it is away."""
    found = _stats(stack).get(source, {})
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    if counts:
        counts["upstream"] = max((_place(upstream) for upstream in found.get("upstreams", [])), default=0)
    return counts


def _place(upstream: Mapping[str, Any]) -> int:
    """Index of the next message: the position, or (of our player's SSE, whose ids are indexes) one past the id."""
    if upstream["position"] is not None:
        return int(upstream["position"])
    cursor = str(upstream.get("cursor") or "")
    return int(cursor) + 1 if cursor.isdecimal() else 0


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
        self.before: dict[str, dict[str, int]] = {}
        self.began = time.time()
        self.pushes: dict[str, list[Push]] = {}
        self.first_result_s: float | None = None
        self.stopping = False

    async def run(self) -> dict[str, Any]:
        """Run the demo to its end; returns its figures."""
        with self._signals():
            try:
                with self.console.status("Starting broker, Spark, server and collector …"):
                    await asyncio.to_thread(self.stack.start)
                    await self._until_ready()
                    if self.options.live:
                        await self._until_connected()
                return await self._play()
            finally:
                with self.console.status("Stopping …"):
                    await asyncio.to_thread(self.stack.stop)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C ends the playing; a second one, during the wait for the last events, ends that."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            self.stopping = True

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _play(self) -> dict[str, Any]:
        """Play, wait until everything has arrived, count."""
        lake, stack = Lake.of(self.settings), self.stack
        since_us = int(time.time() * 1e6)
        self.before = {name: source_counts(stack, name) for name in self.sources}
        url = f"{stack.where['serve']}/"
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
                counts = {name: source_counts(stack, name) for name in self.sources}
                arrived = await self._until_arrived(lake, progress)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        with self.console.status("Counting …"):
            if self.playing is not None:
                counts = {name: source_counts(stack, name) for name in self.sources}
            accounts = await asyncio.to_thread(self._accounts, lake, progress, since_us)
        acknowledged = sum(
            found.get("acknowledged", 0) - self.before[name].get("acknowledged", 0) for name, found in counts.items()
        )
        return self._figures(accounts, progress, acknowledged, arrived)

    def _figures(
        self, accounts: list[Account], progress: PlayProgress, acknowledged: int, arrived: bool
    ) -> dict[str, Any]:
        """The object that ``millrace demo`` prints; what is live has no end to compare the tables with."""
        live, lake = self.playing is None, self.settings.lake
        latency = np.concatenate([account.latency_ms for account in accounts])
        sent_ms = np.concatenate([account.sent_ms for account in accounts])
        first_ms = sent_ms.min() if len(sent_ms) else 0.0
        in_gold = [account.in_gold for account in accounts]
        return {
            "pipeline": self.pipeline.name,
            "events_sent": None if live else progress.total,
            "events_acknowledged": acknowledged,
            "events_in_bronze": sum(account.in_bronze for account in accounts),
            "events_in_gold": None if None in in_gold else sum(count or 0 for count in in_gold),
            "quarantined": sum(account.quarantined for account in accounts),
            "duplicates": None if live else sum(account.duplicates for account in accounts),
            "lost": None if live else sum(account.lost for account in accounts),
            "counted_twice": None if live else sum(account.counted_twice for account in accounts),
            "resent": sum(account.resent for account in accounts),
            "arrived": arrived,
            "latency_ms": percentiles(latency),
            "latency_ms_warm": percentiles(latency[sent_ms >= first_ms + WARM_S * 1000]),
            "pushes": sum(map(len, self.pushes.values())),
            "first_result_s": None if self.first_result_s is None else round(self.first_result_s, 2),
            "restarts": {**self.stack.supervisor.restarts, "broker": self.stack.restarts_of_broker},
            "lake": str(lake.resolve() if isinstance(lake, Path) else lake),
        }

    async def _until_ready(self) -> None:
        """Wait until every part is ready. Raises EnvironmentProblem: one did not get ready."""
        stack, deadline = self.stack, time.monotonic() + READY_S
        while waiting := await asyncio.to_thread(stack.waiting_for):
            if self.stopping:
                raise EnvironmentProblem("stopped while starting")
            if time.monotonic() > deadline or max(stack.supervisor.restarts.values(), default=0) >= 4:
                folder = stack.log_file("lakehouse").parent
                raise EnvironmentProblem(f"not ready: {', '.join(waiting)}", f"See {folder}, or run: millrace check")
            await asyncio.to_thread(stack.tend)
            await asyncio.sleep(0.1)

    async def _until_connected(self) -> None:
        """Wait until every live upstream is connected. Raises EnvironmentProblem: one is not reached."""
        deadline = time.monotonic() + CONNECT_S
        while away := await asyncio.to_thread(self._unconnected):
            if time.monotonic() > deadline or self.stopping:
                raise EnvironmentProblem(
                    f"{away[0]['url']} is not reached ({away[0].get('ended', '')})",
                    "Check the network and HTTPS_PROXY; without --live made-up events are played",
                )
            await asyncio.sleep(0.2)

    def _unconnected(self) -> list[dict[str, Any]]:
        upstreams = [upstream for source in _stats(self.stack).values() for upstream in source.get("upstreams", [])]
        return [upstream for upstream in upstreams if not upstream["connected"]]

    async def _follow(self, table: str, board: Board) -> None:
        pushes = self.pushes.setdefault(table, [])
        options = ClientOptions(wait_for_table=True, longest_s=RETRY_S)
        async with subscribe(self.stack.where["serve"], table, options=options) as subscription:
            async for message in subscription.reader():
                now = time.time() * 1000
                pushes.append(Push(now, dict(message.through or {})))
                if self.first_result_s is None and not isinstance(message, Snapshot) and message.upserts:
                    self.first_result_s = time.time() - self.began
                if table == self.shown.name:
                    board.pushed(message, now)

    async def _until_played(self, board: Board) -> PlayProgress:
        """Tend the parts until the input is played, the time is over, or Ctrl-C; how far it is then."""
        progress = PlayProgress()
        began = None
        while not self.stopping:
            await asyncio.to_thread(self.stack.tend)
            found = {name: await asyncio.to_thread(source_counts, self.stack, name) for name in self.sources}
            new = sum(s.get("acknowledged", 0) - self.before[n].get("acknowledged", 0) for n, s in found.items() if s)
            if self.playing is not None:
                told = await asyncio.to_thread(self.playing.progress)
                progress = told if told is not None else progress
            else:
                progress = PlayProgress({"": new})
            if began is None and progress.total:
                began = time.monotonic()
            board.show(progress.total, new, sum(s.get("in_log", 0) for s in found.values()))
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
        self.stopping = False
        deadline = time.monotonic() + DRAIN_S
        topics = [self.pipeline.sources[name].topic for name in self.sources]
        while time.monotonic() < deadline and not self.stopping:
            await asyncio.to_thread(self.stack.tend)
            if await self._at_rest():
                ends = await asyncio.to_thread(end_offsets, self.stack.where["broker"], topics, self.stack.security())
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
            stats = await asyncio.to_thread(source_counts, self.stack, name)
            if not stats or stats["upstream"] < progress.sent[name] or stats["in_log"]:
                return False
        return True

    def _pushed(self, ends: Mapping[str, int]) -> bool:
        for name in self.sources:
            if name in self.watched:
                pushes = self.pushes.get(self.watched[name].name, [])
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
            pushes = self.pushes.get(watched.name, []) if watched else []
            source = self.pipeline.sources[name]
            found.append(take_account(lake, self.pipeline, source, *sent, pushes, since_us=since_us))
        return found
