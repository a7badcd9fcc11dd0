"""Where a client keeps what has to outlive it: a file for a position, a SQLite database for positions and logs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import orjson

from lakehouse.contract.storage import write_whole
from serve.client.transports import ClientError

_T = TypeVar("_T")
_BUSY_S = 30.0  # wait for another process that writes


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
        content = orjson.dumps({"position": position})
        await asyncio.to_thread(write_whole, self.path, content, 0o600, durable=True)

    def _load(self) -> str | None:
        try:
            content = orjson.loads(self.path.read_bytes())
            return str(content["position"])
        except FileNotFoundError:
            return None
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise ClientError(f"{self.path} holds no position; remove it to start with a snapshot") from None


class ClientDatabase:
    """A SQLite database of the client's own. Each piece of work is one transaction, durable when it returns.

    Several objects and processes may use one file. Work is done in a thread.

    Args:
        path: the file; created if absent.
        schema: SQL that creates what is absent.
    """

    def __init__(self, path: Path | str, schema: str) -> None:
        self.path = Path(path)
        self._schema = schema
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """The result of ``work``. Raises ClientError if the file cannot be used; then nothing has changed."""
        return await asyncio.shield(asyncio.to_thread(self._run, work))  # a thread cannot be cancelled half way

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._lock:
            try:
                connection = self._connection = self._connection or self._open()
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    return work(connection)
            except (sqlite3.Error, OSError) as error:
                raise ClientError(f"{self.path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        # Payloads are nobody else's. A file that exists is not opened here: closing it would end SQLite's locks on it.
        with suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, _BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            with closing(connection.cursor()) as cursor:
                cursor.execute("PRAGMA journal_mode = WAL")
                cursor.execute("PRAGMA synchronous = FULL")  # a commit is on the disk
                cursor.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection


class SqliteStore:
    """Keeps positions in a SQLite database, one for each name.

    Args:
        path: the file; the log of a publisher, or of :class:`~serve.client.ExactlyOnce`, may be in it too.
    """

    def __init__(self, path: Path | str, name: str = "") -> None:
        schema = "CREATE TABLE IF NOT EXISTS positions (name TEXT PRIMARY KEY, position TEXT NOT NULL) WITHOUT ROWID"
        self._database = ClientDatabase(path, schema)
        self._name = name

    async def load(self) -> str | None:
        """Raises ClientError if the file is no such database."""
        asked = "SELECT position FROM positions WHERE name = ?"
        found = await self._database.run(lambda database: database.execute(asked, [self._name]).fetchone())
        return None if found is None else str(found[0])

    async def save(self, position: str) -> None:
        row = (self._name, position)
        await self._database.run(lambda database: database.execute("REPLACE INTO positions VALUES (?, ?)", row))

    def close(self) -> None:
        self._database.close()
