"""Devices that publish to a collector, and only while somebody is interested (:mod:`ingest.answers.demand`).

There is one for each source that is played. What is due while nobody is interested is never sent, as by a sensor that
rests; publishing goes on at the live point.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from ingest.simulate.player import Player
from ingest.simulate.server import Play, players_of
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Pipeline

logger = logging.getLogger(__name__)

_PATH = "/v1/stream"
_TICK_S = 0.01
_BATCH = 64


class SimulatedDevice:
    """A device of one source.

    Args:
        url: of the collector.
        key: that the collector asks for; empty: none.
        told: called when the device is told whether somebody is interested.

    Attributes:
        sent: events.
        acknowledged: of those.
        refused: of those.
    """

    def __init__(
        self, source: str, player: Player, url: str, key: str, told: Callable[[SimulatedDevice, bool], None]
    ) -> None:
        self.source = source
        self.sent = self.acknowledged = self.refused = 0
        self._player = player
        self._url = url.rstrip("/").replace("http", "ws", 1) + _PATH
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._told = told
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Publish when asked to, until cancelled. It connects again by itself.

        Raises:
            EnvironmentProblem: the collector refuses the device.
        """
        try:
            async for connection in connect(self._url, additional_headers=self._headers):
                try:
                    await self._talk(connection)
                except ConnectionClosed as closed:
                    logger.info("%s: the connection ended, the device connects again: %s", self.source, closed)
                finally:
                    self._wanted.clear()
        except (InvalidHandshake, InvalidURI) as error:
            raise EnvironmentProblem(f"{self._url} refuses devices: {error}", "Check --to and --key") from None

    async def _talk(self, connection: ClientConnection) -> None:
        await connection.send(orjson.dumps({"demand": self.source}), text=True)
        publishing = asyncio.create_task(self._publish(connection))
        try:
            async for message in connection:
                self._hear(orjson.loads(message))
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)

    def _hear(self, said: dict[str, object]) -> None:
        if "ack" in said:
            self.acknowledged += 1
        elif said.get("refused") is not None:
            self.refused += 1
        elif "refused" in said:
            raise EnvironmentProblem(f"{self.source}: {said['detail']}", "Check --to, --key and the pipeline")
        elif said.get("wanted") is True:
            self._wanted.set()
            self._told(self, True)
        elif said.get("wanted") is False:
            self._wanted.clear()
            self._told(self, False)

    async def _publish(self, connection: ClientConnection) -> None:
        while True:
            await self._wanted.wait()
            index = self._player.join()
            while self._wanted.is_set():
                due_in = self._player.due_in(index)
                if due_in is None:
                    return
                if due_in > 0:
                    await asyncio.sleep(max(due_in, _TICK_S))
                for event in self._player.take(index, _BATCH):
                    if not self._wanted.is_set():
                        break
                    head = orjson.dumps({"publish": self.source, "id": self.sent})
                    await connection.send(b'%b,"event":%b}' % (head[:-1], event), text=True)
                    self._player.sent(index, 1)
                    self.sent += 1
                    index += 1


async def run_devices(
    pipeline: Pipeline,
    play: Play,
    url: str,
    key: str,
    told: Callable[[SimulatedDevice, bool], None],
    stop: asyncio.Event,
) -> None:
    """Run a device for each source that is played, until ``stop`` is set.

    Args:
        play: what is played; where does not matter.

    Raises:
        ConfigError: there is neither a recording nor a scene for this pipeline.
        EnvironmentProblem: the file cannot be read, or the collector refuses a device.
    """
    with ExitStack() as held:
        devices = [
            SimulatedDevice(name, player, url, key, told) for name, player in players_of(pipeline, play, held).items()
        ]
        tasks = [asyncio.create_task(device.run()) for device in devices]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [stopped, *tasks]:
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)
