"""``millrace demo``: everything on free loopback ports, a Meetup stream played into it, its results shown live.

What it reports at the end is counted from the tables (:mod:`jobs.account`) and measured at two real sockets: when the
player sent an event, and when a subscriber of ``top_topics`` got the first message that contains it.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from jobs.account import Account, Push, take_account
from jobs.board import Board, Figures
from jobs.supervise import Child
from jobs.up import Stack, free_port, get_json
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, load_pipeline
from lakehouse.contract.settings import Settings
from serve.client import Snapshot, subscribe

log = logging.getLogger(__name__)

TABLE = "top_topics"
READY_S = 180.0
DRAIN_S = 120.0
WARM_S = 20.0  # events sent later than this after the first count as "after warm-up"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        seconds: how long to play; None: until the input ends, or for ever.
        rate: events/s.
        input: JSON-lines file of RSVPs; None: the generator.
        seed: of the generator.
        loop: play the input again and again, each round with new ids.
        browser: open the dashboard.
        quiet: no live board.
    """

    seconds: float | None = None
    rate: float = 500.0
    input: Path | None = None
    seed: int = 1
    loop: bool = False
    browser: bool = True
    quiet: bool = False


@dataclass
class _Run:
    """What the demo has seen so far."""

    began: float = field(default_factory=time.time)
    pushes: list[Push] = field(default_factory=list)
    first_result_s: float | None = None
    stopping: bool = False


async def run_demo(settings: Settings, options: Options, console: Console) -> dict[str, Any]:
    """Run the demo to its end; returns its figures.

    Raises:
        EnvironmentProblem: a part did not get ready.
    """
    settings = dataclasses.replace(
        settings,
        serve=dataclasses.replace(settings.serve, port=0),
        collect=dataclasses.replace(settings.collect, port=0),
    )
    pipeline = load_pipeline(settings.pipeline_folder())
    player = f"http://127.0.0.1:{free_port()}"
    # Each demo plays a stream of its own, and a restarted collector goes on in it.
    stack = Stack(settings, upstream=f"{player.replace('http', 'ws')}/stream?play={secrets.token_hex(8)}")
    run = _Run()
    with _signals(run):
        try:
            with console.status("Starting broker, Spark, server and collector …"):
                await asyncio.to_thread(stack.start)
                await _until_ready(stack, run)
            return await _play(settings, options, pipeline, stack, player, run, console)
        finally:
            with console.status("Stopping …"):
                await asyncio.to_thread(stack.stop)


async def _play(
    settings: Settings,
    options: Options,
    pipeline: Pipeline,
    stack: Stack,
    player: str,
    run: _Run,
    console: Console,
) -> dict[str, Any]:
    source = next(iter(pipeline.sources.values()))
    lake = Lake(settings.lake)
    since_us = int(time.time() * 1e6)
    before = _source_stats(stack, source.name)
    console.print(f"Dashboard [bold link={stack.address.serve}/]{stack.address.serve}/[/]   lake {settings.lake}")
    board = Board(console, quiet=options.quiet)
    async with subscribe(stack.address.serve, TABLE) as topics:
        reader = asyncio.create_task(_follow(topics.reader(), run, board))
        stack.supervisor.start(Child("player", _player_command(settings, options, player), stack.log_file("player")))
        if options.browser:
            await asyncio.to_thread(webbrowser.open, f"{stack.address.serve}/")
        try:
            with board:
                status = await _until_played(stack, player, options, run, board, source.name, before)
                status = await _halt(stack, player) or status
                arrived = await _until_arrived(stack, lake, player, source.name, pipeline, run)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
    with console.status("Counting …"):
        sent, times = await asyncio.to_thread(_sent, player, int(status["sent"]))
        acknowledged = _source_stats(stack, source.name).get("acknowledged", 0) - before.get("acknowledged", 0)
        account = await asyncio.to_thread(
            take_account, lake, pipeline, source, sent, times, run.pushes, since_us=since_us
        )
    return _result(settings, run, status, acknowledged, account, times, arrived, stack)


async def _until_ready(stack: Stack, run: _Run) -> None:
    deadline = time.monotonic() + READY_S
    while waiting := await asyncio.to_thread(stack.waiting_for):
        if run.stopping:
            raise EnvironmentProblem("stopped while starting")
        if time.monotonic() > deadline or max(stack.supervisor.restarts.values(), default=0) >= 4:
            raise EnvironmentProblem(
                f"not ready: {', '.join(waiting)}", f"See {stack.log_file('lakehouse').parent}, or run: millrace doctor"
            )
        await asyncio.to_thread(stack.tend)
        await asyncio.sleep(0.1)


async def _follow(reader: Any, run: _Run, board: Board) -> None:
    async for message in reader:
        now = time.time() * 1000
        run.pushes.append(Push(now, dict(message.through or {})))
        rows = message.rows if isinstance(message, Snapshot) else message.upserts
        if rows and run.first_result_s is None and not isinstance(message, Snapshot):
            run.first_result_s = time.time() - run.began
        board.pushed(message, now)


async def _until_played(
    stack: Stack,
    player: str,
    options: Options,
    run: _Run,
    board: Board,
    source: str,
    before: dict[str, int],
) -> dict[str, Any]:
    """Tend the parts until the input is played, the time is over, or Ctrl-C; returns the player's last status."""
    status: dict[str, Any] = {"sent": 0, "done": False}
    began = None
    while not run.stopping:
        await asyncio.to_thread(stack.tend)
        status = await asyncio.to_thread(get_json, f"{player}/status") or status
        if began is None and status["sent"]:
            began = time.monotonic()
        stats = await asyncio.to_thread(_source_stats, stack, source)
        board.show(
            Figures(
                int(status["sent"]),
                stats.get("acknowledged", 0) - before.get("acknowledged", 0),
                stats.get("in_log", 0),
            )
        )
        if status["done"]:
            break
        if options.seconds is not None and began is not None and time.monotonic() - began >= options.seconds:
            break
        await asyncio.sleep(0.25)
    return status


async def _until_arrived(stack: Stack, lake: Lake, player: str, source: str, pipeline: Pipeline, run: _Run) -> bool:
    """Wait until all that was sent has reached the subscriber; False if it did not in time."""
    run.stopping = False
    deadline = time.monotonic() + DRAIN_S
    topic = pipeline.sources[source].topic
    while time.monotonic() < deadline and not run.stopping:
        await asyncio.to_thread(stack.tend)
        status = await asyncio.to_thread(get_json, f"{player}/status")
        stats = await asyncio.to_thread(_source_stats, stack, source)
        at_rest = status and stats and stats["upstream"] >= int(status["sent"]) and stats["in_log"] == 0
        if at_rest:
            ends = await asyncio.to_thread(_end_offsets, stack.address.kafka, topic)
            if ends is not None and _all_tables_through(lake, pipeline, source, ends) and _pushed(run, ends):
                return True
        await asyncio.sleep(0.1)
    return False


def _pushed(run: _Run, ends: dict[str, int]) -> bool:
    through = run.pushes[-1].through if run.pushes else {}
    return all(through.get(place, 0) >= end for place, end in ends.items())


def _all_tables_through(lake: Lake, pipeline: Pipeline, source: str, ends: dict[str, int]) -> bool:
    from lakehouse.gold.store import ProductStore

    for product in pipeline.products_of(source):
        mark = ProductStore(product, lake.table(product.layer, product.name), pipeline.name).mark()
        if mark is None or any(mark.through.get(place, 0) < end for place, end in ends.items()):
            return False
    return True


def _end_offsets(bootstrap: str, topic: str) -> dict[str, int] | None:
    """``TOPIC/PARTITION`` to the offset behind the last event; None while the broker is away."""
    from kafka import KafkaConsumer, TopicPartition
    from kafka.errors import KafkaError

    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
        try:
            partitions = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
            return {f"{p.topic}/{p.partition}": end for p, end in consumer.end_offsets(partitions).items() if end}
        finally:
            consumer.close()
    except (KafkaError, OSError):
        return None


def _source_stats(stack: Stack, source: str) -> dict[str, int]:
    """The collector's counts of a source; empty while it is away."""
    document = get_json(f"{stack.address.collect}/v1/stats")
    found = document["sources"].get(source, {}) if document else {}
    counts = {name: value for name, value in found.items() if isinstance(value, int)}
    if counts:
        counts["upstream"] = max((u["position"] or 0 for u in found.get("upstreams", [])), default=0)
    return counts


def _player_command(settings: Settings, options: Options, player: str) -> list[str]:
    command = ["simulate", "--pipeline", settings.pipeline, "--rate", str(options.rate), "--seed", str(options.seed)]
    command += ["--port", player.rpartition(":")[2]]
    if options.input is not None:
        command += ["--input", str(options.input)]
    return [*command, "--loop"] if options.loop else command


async def _halt(stack: Stack, player: str) -> dict[str, Any] | None:
    """Tell the player to end where it is; returns its status once it has sent what was due."""
    pid = stack.supervisor.pid("player")
    if pid is not None:
        os.kill(pid, signal.SIGUSR1)
    status: dict[str, Any] | None = None
    for _ in range(50):
        status = await asyncio.to_thread(get_json, f"{player}/status")
        if status is None or status["done"]:
            break
        await asyncio.sleep(0.1)
    return status


def _sent(player: str, count: int) -> tuple[list[str | None], list[float]]:
    """Ids and times of all that the player sent."""
    ids: list[str | None] = []
    times: list[float] = []
    for path, key, into in (("ids", "ids", ids), ("times", "at_ms", times)):
        while len(into) < count:
            query = urllib.parse.urlencode({"from": len(into), "limit": min(50_000, count - len(into))})
            document = get_json(f"{player}/{path}?{query}", timeout_s=60.0)
            if not document or not document[key]:
                break
            into.extend(document[key])
    return ids, times


def _result(
    settings: Settings,
    run: _Run,
    status: dict[str, Any],
    acknowledged: int,
    account: Account,
    times: list[float],
    arrived: bool,
    stack: Stack,
) -> dict[str, Any]:
    warm = account.latency_ms[account.sent_ms >= times[0] + WARM_S * 1000] if times else account.latency_ms
    return {
        "events_sent": int(status["sent"]),
        "events_acknowledged": acknowledged,
        "events_in_bronze": account.in_bronze,
        "events_in_gold": account.in_gold,
        "quarantined": account.quarantined,
        "duplicates": account.duplicates,
        "lost": account.lost,
        "counted_twice": account.counted_twice,
        "resent": account.resent,
        "arrived": arrived,
        "latency_ms": percentiles(account.latency_ms),
        "latency_ms_warm": percentiles(warm),
        "pushes": len(run.pushes),
        "first_result_s": None if run.first_result_s is None else round(run.first_result_s, 2),
        "restarts": {**stack.supervisor.restarts, "broker": stack.restarts_of_broker},
        "lake": str(settings.lake.resolve()),
    }


def percentiles(values: Any) -> dict[str, float | None]:
    """p50, p90 and p99, rounded; None each where there are no values."""
    if not len(values):
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 90, 99)}


@contextlib.contextmanager
def _signals(run: _Run) -> Iterator[None]:
    """Ctrl-C ends the playing; a second one, during the wait for the last events, ends that."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        run.stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def demo(settings: Settings, options: Options) -> int:
    """The command: board and messages on standard error, one JSON object as the last line of standard output."""
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("serve.client").setLevel(logging.ERROR)  # the board says how old results are
    result = asyncio.run(run_demo(settings, options, console))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    return 0 if result["lost"] == 0 and result["counted_twice"] == 0 and result["arrived"] else 1
