"""``make chaos SEED=7 MINUTES=3``: the whole product under load while a seeded agent hurts it, and the verdict.

Senders post, and publish on WebSockets; files come into a watched folder; WebSockets, SSE and webhooks follow a
product. When the time is over everything is left in peace until all of it has arrived, or for ten minutes. The last
line is one JSON object; ``dist/chaos/seed-N.txt`` and ``.html`` tell the rest. Exit status 1: something was lost,
counted twice, out of order or left behind. ``--keep`` copies the lake and its logs for whoever looks for the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deltalake.exceptions import DeltaError
from kafka.errors import KafkaError

from tests.chaos.agent import Agent
from tests.chaos.installation import ROOT, SOURCE, TABLE, Installation
from tests.chaos.report import Round, write_report
from tests.chaos.rig import Senders
from tests.chaos.subscribers import Hook, Mirror, by_sse, by_websocket
from tests.chaos.verdict import Inputs, Verdict, judge, kafka_ends
from tests.ingest.conftest import event

SETTLE_S = 600.0
FIRST_OF_FILES = 1_000_000_000
log = logging.getLogger("chaos")


class Load:
    """Senders, files and subscribers of an installation.

    Attributes:
        inputs: what went in by files; :meth:`all_inputs` adds what senders know.
        mirrors: what each subscriber was told.
    """

    def __init__(self, installation: Installation, seed: int) -> None:
        self._installation = installation
        self._chance = random.Random(f"load {seed}")
        self.senders = Senders(installation.ports["senders"], pause_s=0.2)
        self.inputs = Inputs()
        self.mirrors = [Mirror(f"{way} {number}", "n") for way in ("websocket", "sse", "webhook") for number in (1, 2)]
        self.hooks = [Hook(mirror, random.Random(f"{mirror.name} {seed}")) for mirror in self.mirrors[4:]]

    @contextlib.asynccontextmanager
    async def subscribed(self) -> AsyncIterator[None]:
        """All subscribers, until the end of the block."""
        port = self._installation.ports["readers"]
        work = [by_websocket(mirror, port, TABLE) for mirror in self.mirrors[:2]]
        work += [by_sse(mirror, port, TABLE) for mirror in self.mirrors[2:4]]
        work += [hook.run(port, TABLE) for hook in self.hooks]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
            yield
            for one in running:
                one.cancel()

    async def put_files(self) -> None:
        """Put a file into the watched folder every few seconds, for ever: new events, copies, a broken line."""
        first, number = FIRST_OF_FILES, 0
        while True:
            count = self._chance.randint(50, 800)
            numbers = list(range(first, first + count))
            numbers += self._chance.choices(self.senders.acknowledged, k=count // 10)
            self._chance.shuffle(numbers)
            broken = f'{{"id": broken in file {number}'.encode()
            draft = self._installation.inbox / f"{number}.jsonl.part"
            draft.write_bytes(b"\n".join([*(event(n) for n in numbers), broken, b""]))
            draft.replace(draft.with_suffix(""))
            self.inputs.rows.update(numbers)
            self.inputs.broken.append(broken)
            first, number = first + count, number + 1
            await asyncio.sleep(self._chance.uniform(1, 6))

    def all_inputs(self, damaged: set[int]) -> Inputs:
        """Of the collector and of the loader."""
        self.inputs.acknowledged, self.inputs.sent = set(self.senders.acknowledged), self.senders.sent
        self.inputs.damaged = damaged
        return self.inputs


async def play(seed: int, minutes: float, folder: Path, keep: Path | None) -> Round:
    """One round."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
    installation = Installation(folder)
    agent, load = Agent(installation, random.Random(seed)), Load(installation, seed)
    began = time.monotonic()
    async with installation.running(keep):
        await installation.ready()
        async with load.subscribed():
            async with load.senders.sending():
                while not all(mirror.position for mirror in load.mirrors):  # noqa: ASYNC110 - filled by their tasks
                    await asyncio.sleep(0.1)
                log.info("ready after %.0f s; harm for %.0f s", time.monotonic() - began, minutes * 60)
                files = asyncio.create_task(load.put_files())
                await agent.run(minutes * 60)
                files.cancel()
            log.info("%d harms; waiting until everything has arrived", len(agent.harms))
            verdict, settled_s = await settle(installation, load, agent.damaged)
    for what in installation.left:
        verdict.find("leaks", 1, what)
    found = Round(seed, minutes, agent.harms, agent.left_out, verdict, settled_s, installation.starts)
    found.count(load.senders, load.mirrors, load.hooks)
    return found


async def settle(installation: Installation, load: Load, damaged: set[int]) -> tuple[Verdict, float]:
    """The verdict as soon as there is nothing to find, or after :data:`SETTLE_S`; and how long that took."""
    inputs, began = load.all_inputs(damaged), time.monotonic()
    while True:
        try:
            ends = await asyncio.to_thread(kafka_ends, installation.bootstrap, SOURCE)
            verdict = await asyncio.to_thread(judge, installation.lake, inputs, load.mirrors, ends)
        except (DeltaError, KafkaError, OSError) as error:
            verdict = Verdict(findings=[f"tables or topic cannot be read: {error}"], lost=1)
        took_s = time.monotonic() - began
        if not verdict.findings or took_s > SETTLE_S:
            return verdict, took_s
        await asyncio.sleep(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31), help="of the harms")
    parser.add_argument("--minutes", type=float, default=3.0, help="of harm")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="copy lake and logs there")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    for noisy in ("httpx", "kafka", "websockets"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    log.info("seed %d", options.seed)
    with tempfile.TemporaryDirectory(prefix="millrace-chaos-") as folder:
        found = asyncio.run(play(options.seed, options.minutes, Path(folder) / "all", options.keep))
    write_report(found, ROOT / "dist" / "chaos")
    sys.stdout.write(json.dumps(found.summary()) + "\n")
    return 1 if found.verdict.findings else 0


if __name__ == "__main__":
    sys.exit(main())
