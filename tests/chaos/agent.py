"""The seeded agent that hurts an installation: one harm after another, some of them at the same time.

What a seed decides is which harms come, in which order, whom they hit and how long they last. When exactly an event
passes meanwhile, nobody decides: a seed is repeated to get the same kind of trouble, not the same run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom

from tests.chaos.installation import SOURCE, Installation, descendants, group, only

PAUSE_S = (0.5, 6.0)
LASTS_S = (0.5, 8.0)
FRAME = b"\xa7MR\x9e"  # begins each record of the message log, as its file format says
ID = re.compile(rb'"id":(\d+)')
MOVED_S = 70.0
PARTS = {"collect": 3, "serve": 3, "lakehouse": 2, f"inbox-{SOURCE}": 2}


def dice(name: str) -> Random:
    """What a test draws from; CHAOS_SEED repeats a round."""
    seed = int(os.environ.get("CHAOS_SEED", "0")) or SystemRandom().randrange(1, 1 << 31)
    print(json.dumps({"test": name, "CHAOS_SEED": seed}))
    return Random(seed)


@dataclass
class Harm:
    """One thing that was done.

    Attributes:
        at: seconds since the agent began.
        kind: what.
        target: to whom, with what is to be said.
        seconds: how long.
    """

    at: float
    kind: str
    target: str
    seconds: float = 0.0


@dataclass
class Agent:
    """Harms an installation until it is told to stop.

    Attributes:
        harms: in their order.
        damaged: numbers of events whose records in the message log it destroyed: if Kafka had not taken one yet, it
            is gone by right.
        left_out: harms that this machine does not allow, with the reason.
    """

    installation: Installation
    chance: Random
    harms: list[Harm] = field(default_factory=list)
    damaged: set[int] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._log_is_hurt = asyncio.Lock()
        self._broker_is_hurt = asyncio.Lock()
        self._clock_is_moved = asyncio.Lock()
        self._kinds: dict[Callable[[Random], Awaitable[str]], int] = {
            self.kill: 5,
            self.stop: 4,
            self.end: 2,
            self.starve: 3,
            self.kill_jvm: 1,
            self.kill_supervisor: 1,
            self.end_supervisor: 1,
            self.kill_broker: 2,
            self.stop_broker: 2,
            self.cut_link: 5,
            self.take_link: 3,
            self.delay_link: 2,
            self.fill_disk: 3,
            self.cut_log: 2,
            self.corrupt_log: 2,
            self.move_clock: 2,
        }

    async def run(self, seconds: float) -> None:
        """Do harm for so long; returns when everything is as it was, except for what was destroyed."""
        self._began = time.monotonic()
        if not self.installation.small_disk:
            del self._kinds[self.fill_disk]
            self.left_out.append("full disk: a small file system cannot be mounted here")
        if missing := self.installation.clock.missing:
            del self._kinds[self.move_clock]
            self.left_out.append(f"moved clocks: {missing}")
        under_way: set[asyncio.Task[None]] = set()
        while (at := time.monotonic() - self._began) < seconds:
            [kind] = self.chance.choices(list(self._kinds), list(self._kinds.values()))
            task = asyncio.create_task(self._do(kind, at, Random(self.chance.random())))
            under_way.add(task)
            await asyncio.sleep(self.chance.uniform(*PAUSE_S))
        await asyncio.gather(*under_way)

    async def _do(self, kind: Callable[[Random], Awaitable[str]], at: float, chance: Random) -> None:
        harm = Harm(round(at, 1), kind.__name__, "")
        self.harms.append(harm)
        harm.target = await kind(chance)
        harm.seconds = round(max(0.0, time.monotonic() - self._began - harm.at), 1)

    # Processes

    def _part(self, chance: Random) -> tuple[str, int]:
        [part] = chance.choices(list(PARTS), list(PARTS.values()))
        return part, self.installation.pid(part) or 0

    async def kill(self, chance: Random) -> str:
        """A part, with what it started."""
        part, pid = self._part(chance)
        if pid:
            group(pid, signal.SIGKILL)
        return part

    async def end(self, chance: Random) -> str:
        """A part is told to end."""
        part, pid = self._part(chance)
        if pid:
            only(pid, signal.SIGTERM)
        return part

    async def stop(self, chance: Random) -> str:
        """A part stands still."""
        part, pid = self._part(chance)
        if pid:
            group(pid, signal.SIGSTOP)
            await asyncio.sleep(lasting(chance))
            group(pid, signal.SIGCONT)
        return part

    async def starve(self, chance: Random) -> str:
        """A part has a tenth of the processor."""
        part, pid = self._part(chance)
        until = time.monotonic() + lasting(chance)
        while pid and time.monotonic() < until:
            group(pid, signal.SIGSTOP)
            await asyncio.sleep(0.18)
            group(pid, signal.SIGCONT)
            await asyncio.sleep(0.02)
        return part

    async def kill_jvm(self, _: Random) -> str:
        """The driver's JVM alone."""
        pid = self.installation.pid("lakehouse")
        for jvm in descendants(pid, "java".__eq__) if pid else []:
            only(jvm, signal.SIGKILL)
        return "lakehouse"

    async def kill_supervisor(self, _: Random) -> str:
        """Its parts end by themselves, and another one starts a second later."""
        if pid := self.installation.pid("up"):
            only(pid, signal.SIGKILL)
        return "up"

    async def end_supervisor(self, _: Random) -> str:
        """Everything is stopped in order, and started again."""
        if pid := self.installation.pid("up"):
            only(pid, signal.SIGTERM)
        return "up"

    async def kill_broker(self, chance: Random) -> str:
        """And start it again later."""
        async with self._broker_is_hurt:
            await asyncio.to_thread(self.installation.broker.kill)
            await asyncio.sleep(lasting(chance))
            await asyncio.to_thread(self.installation.broker.start, 180)
        return "broker"

    async def stop_broker(self, chance: Random) -> str:
        """It stands still."""
        async with self._broker_is_hurt:
            pid = self.installation.broker.pid
            if pid:
                only(pid, signal.SIGSTOP)
                await asyncio.sleep(lasting(chance))
                only(pid, signal.SIGCONT)
        return "broker"

    # Links

    def _link(self, chance: Random) -> str:
        return chance.choice(list(self.installation.links))

    async def cut_link(self, chance: Random) -> str:
        """Reset every connection, or half-close it."""
        name, half = self._link(chance), chance.random() < 0.5
        link = self.installation.links[name]
        (link.half_close if half else link.cut)()
        return f"{name}, half-closed" if half else name

    async def take_link(self, chance: Random) -> str:
        """Nobody gets through."""
        name = self._link(chance)
        link = self.installation.links[name]
        link.up = False
        link.cut()
        await asyncio.sleep(lasting(chance))
        link.up = True
        return name

    async def delay_link(self, chance: Random) -> str:
        """Each piece is late."""
        name, delay_s = self._link(chance), chance.choice([0.05, 0.2])
        self.installation.links[name].delay_s = delay_s
        await asyncio.sleep(lasting(chance))
        self.installation.links[name].delay_s = 0.0
        return f"{name}, {delay_s * 1000:.0f} ms"

    # Disk

    async def fill_disk(self, chance: Random) -> str:
        """The lake's file system has no byte left."""
        ballast = self.installation.disk / f"ballast-{len(self.harms)}"
        await asyncio.to_thread(fill, ballast)
        await asyncio.sleep(lasting(chance))
        ballast.unlink()
        return "lake"

    # The wall clock

    async def move_clock(self, chance: Random) -> str:
        """Of the whole machine; the broker's is another one. Then it is right again."""
        seconds = chance.uniform(-MOVED_S, MOVED_S)
        async with self._clock_is_moved:
            self.installation.clock.move(seconds)
            await asyncio.sleep(lasting(chance))
            self.installation.clock.move(0)
        return f"by {seconds:+.1f} s"

    # The message log

    async def cut_log(self, chance: Random) -> str:
        """Cut bytes off its end."""
        return await self._hurt_log(lambda log: len(log) - chance.randint(1, min(2_000, len(log) // 2)), b"")

    async def corrupt_log(self, chance: Random) -> str:
        """Overwrite three bytes in the midst."""
        return await self._hurt_log(lambda log: chance.randrange(8, len(log) - 3), b"\xff\x00\xff")

    async def _hurt_log(self, where: Callable[[bytes], int], instead: bytes) -> str:
        """The collector is killed, and is not started again before its newest segment is damaged."""
        pid, supervisor = self.installation.pid("collect"), self.installation.pid("up")
        if not pid or not supervisor or self._log_is_hurt.locked():
            return "not running"
        async with self._log_is_hurt:
            only(supervisor, signal.SIGSTOP)
            try:
                group(pid, signal.SIGKILL)
                await asyncio.sleep(0.2)
                return self._damage(where, instead)
            finally:
                only(supervisor, signal.SIGCONT)

    def _damage(self, where: Callable[[bytes], int], instead: bytes) -> str:
        files = sorted((self.installation.lake / "_millrace" / "log" / "collector-1").glob("*.seg"))
        log = files[-1].read_bytes() if files else b""
        if len(log) < 64:
            return "empty"
        at = where(log)
        end = at + len(instead) if instead else len(log)
        lost = {int(number) for number in ID.findall(records(log, at, end))}
        self.damaged |= lost
        with contextlib.suppress(OSError), files[-1].open("r+b") as file:
            if instead:
                file.seek(at)
                file.write(instead)
            else:
                file.truncate(at)
        return f"{files[-1].name} at {at} of {len(log)}, {len(lost)} events"


def lasting(chance: Random) -> float:
    """Seconds of a harm that passes."""
    return chance.uniform(*LASTS_S)


def records(log: bytes, start: int, end: int) -> bytes:
    """The whole records of a log that have a byte in this range."""
    begin = max(log.rfind(FRAME, 0, start + len(FRAME)), 0)
    beyond = log.find(FRAME, end)
    return log[begin : beyond if beyond >= 0 else len(log)]


def fill(path: Path) -> None:
    """Write until nothing more goes."""
    with path.open("wb", buffering=0) as ballast:
        for size in (1 << 20, 65_536, 4_096, 64):
            with contextlib.suppress(OSError):
                while shutil.disk_usage(path.parent).free and ballast.write(bytes(size)):
                    pass
