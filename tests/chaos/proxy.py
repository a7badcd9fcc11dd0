"""A TCP proxy of the test's own between a collector and its broker: it cuts, delays and half-closes."""

from __future__ import annotations

import asyncio
import contextlib


class Link:
    """Listens on ``port`` and carries everything to ``target``, as well as it is told to.

    Attributes:
        delay_s: that each piece waits.
        up: whether connections are taken.
    """

    def __init__(self, port: int, target: int) -> None:
        self.delay_s = 0.0
        self.up = True
        self._port = port
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.carried = 0

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, in the middle of whatever it carries."""
        for writer in list(self._writers):
            writer.transport.abort()

    def half_close(self) -> None:
        """Say on every connection that nothing more comes, and go on listening."""
        for writer in list(self._writers):
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not self.up:
            writer.transport.abort()
            return
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward[1]}
        try:
            await asyncio.gather(self._carry(reader, onward[1]), self._carry(onward[0], writer))
        finally:
            for end in (writer, onward[1]):
                end.transport.abort()
                self._writers.discard(end)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while piece := await reader.read(65_536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                self.carried += len(piece)
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
