"""Where a subscription's position is kept between runs."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Protocol

import orjson

from serve.client.messages import ClientError


class PositionStore(Protocol):
    """Keeps one subscription's position.

    Where possible, keep it with the application's result in one transaction: then each message takes effect exactly
    once.
    """

    async def load(self) -> str | None:
        """The position stored last; None: none yet."""

    async def save(self, position: str) -> None:
        """Returns when the position is durable."""


class MemoryStore:
    """Keeps the position as long as the process lives, for several subscriptions in turn."""

    def __init__(self, position: str | None = None) -> None:
        self.position = position

    async def load(self) -> str | None:
        return self.position

    async def save(self, position: str) -> None:
        self.position = position


class FileStore:
    """Keeps the position in a file, replaced as a whole and synced: after a crash it holds the old or the new
    position."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    async def load(self) -> str | None:
        """The position in the file; None if there is no file. Raises ClientError if the content is not a position."""
        return await asyncio.to_thread(self._load)

    async def save(self, position: str) -> None:
        await asyncio.to_thread(self._save, position)

    def _load(self) -> str | None:
        try:
            content = orjson.loads(self.path.read_bytes())
            return str(content["position"])
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ClientError(f"{self.path} holds no position; remove it to start with a snapshot") from None

    def _save(self, position: str) -> None:
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(orjson.dumps({"position": position}))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
