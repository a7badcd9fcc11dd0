"""One writer a table: an advisory lock on a file in the lake, released by the system when its process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from lakehouse.contract.lake import Lake
from lakehouse.errors import TableBusy


class WriterLocks:
    """Holds the writer's locks of several tables; a context manager."""

    def __init__(self, lake: Lake, names: Iterable[str]) -> None:
        self._folder = lake.state / "locks"
        self._names = sorted(names)
        self._held = ExitStack()

    def __enter__(self) -> WriterLocks:
        try:
            for name in self._names:
                self._take(name, self._folder / f"{name}.lock")
        except BaseException:
            self._held.close()
            raise
        return self

    def _take(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held.callback(os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TableBusy(name, path) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
