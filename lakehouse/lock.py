"""One writer a table: an advisory lock on a file in the lake. The system releases it when the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from lakehouse.contract.lake import Lake
from lakehouse.errors import TableBusy


class WriterLocks:
    """Holds the writer's locks of several tables; a context manager.

    Args:
        lake: lake of the tables.
        names: of the tables.
        patience_s: time to wait for a held lock, which maintenance holds for a moment.
    """

    def __init__(self, lake: Lake, names: Iterable[str], patience_s: float = 0.0) -> None:
        self._folder = lake.state / "locks"
        self._names = sorted(names)
        self._held = ExitStack()
        self._patience_s = patience_s

    def __enter__(self) -> WriterLocks:
        until = time.monotonic() + self._patience_s
        try:
            for name in self._names:
                self._take(name, self._folder / f"{name}.lock", until)
        except BaseException:
            self._held.close()
            raise
        return self

    def _take(self, name: str, path: Path, until: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held.callback(os.close, file)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TableBusy(name, path) from None
            time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()
