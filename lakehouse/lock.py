"""One writer at a time, among all processes that share a lake.

In a lake of this machine a lock is an advisory lock on a file: the system releases it when the process ends. In an
object store it is an object that names a session. Each process that holds locks has one session, an object that says
until when it lives, and that the process renews. A lock whose session ended :data:`GRACE_S` ago is free.

Clocks of machines may differ by less than the grace. A process that was stopped for longer than its session lives does
not know that another one took its locks. Delta refuses its next commit, because the other one has committed: see
:class:`~lakehouse.bronze.query.BronzeWriter` and :class:`~lakehouse.gold.store.ProductStore`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import LakePath, StorePath
from lakehouse.errors import TableBusy

log = logging.getLogger(__name__)

LIVES_S = 15.0
RENEW_S = 4.0
GRACE_S = 5.0
_AGAIN_S = 0.05
_QUIET_S = 0.5  # between looks at the lock of a process that gives no sign of life
_FORGOTTEN_S = 3_600.0
_MOST_BYTES = 64
_KEPT = 1_000  # objects of earlier holders; twice as many at the most
_STALE_S = 5.0  # in less, nobody takes and releases a lock in a store so often
_RELEASED = ".released"

Advance = Callable[[bytes], bytes]
"""The value that a lock's holder stores with it, of the value that it finds; empty if there is none."""


class Lock(ABC):
    """A lock with a small value, which outlives its holders.

    Attributes:
        sign: the newest sign of life of the holder that was in the way last; a new one proves that it lives.
    """

    sign = 0.0

    @abstractmethod
    def take(self, advance: Advance = bytes) -> bytes | None:
        """Take it and store a value, in one step; returns the value, or None if another process has it."""

    @abstractmethod
    def wait(self, advance: Advance) -> bytes:
        """Take it as soon as no other process has it; returns the value."""

    @abstractmethod
    def release(self) -> None:
        """Let others take it."""

    @contextmanager
    def turn(self, advance: Advance = bytes) -> Iterator[bytes]:
        """Wait for it, and hold it; gives the value."""
        value = self.wait(advance)
        try:
            yield value
        finally:
            self.release()


def lock_at(path: LakePath) -> Lock:
    """The lock at a place in a lake."""
    return _StoreLock(path) if isinstance(path, StorePath) else _FileLock(path)


class _FileLock(Lock):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def take(self, advance: Advance = bytes) -> bytes | None:
        try:
            return self._taken(advance, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.sign += 1.0  # the system has no locks of the dead
            return None

    def wait(self, advance: Advance) -> bytes:
        return self._taken(advance, fcntl.LOCK_EX)  # the system wakes whoever has waited

    def _taken(self, advance: Advance, how: int) -> bytes:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, how)
            found = os.pread(file, _MOST_BYTES, 0)
            value = advance(found)
            if value != found:
                os.pwrite(file, value, 0)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return value

    def release(self) -> None:
        os.close(self._file)


class _StoreLock(Lock):
    """Each holder makes an object of the next number below ``path``, and one beside it when it lets go.

    No object is ever written twice. So it needs no more of a store than Delta does: that of several processes which
    create an object, one succeeds. Who let go last takes it again with one request, unless another one was quicker.
    """

    def __init__(self, path: StorePath) -> None:
        self._path = path
        self._held = 0  # number of the object that this process made last
        self._value = b""  # that it stored there
        self._released_at = -math.inf

    def wait(self, advance: Advance) -> bytes:
        while (value := self.take(advance)) is None:
            time.sleep(_AGAIN_S)
        return value

    def take(self, advance: Advance = bytes) -> bytes | None:
        session = _session(self._path.parent.parent / "sessions")
        since = self._released_at
        if time.monotonic() - since < _STALE_S / 2:
            self._released_at = -math.inf
            if (value := self._taken(session, self._held, self._value, since, advance)) is not None:
                return value
        looked = time.monotonic()
        newest = max(self._numbers(_numbered(self._held - 1) if self._held else ""), default="")
        number, found = 0, b""
        if newest:
            number = int(newest.removesuffix(_RELEASED))
            place = self._path / _numbered(number)
            holder = json.loads(place.read_bytes())
            if not newest.endswith(_RELEASED) and (sign := session.holds(holder["session"], place)):
                self.sign = sign
                return None
            found = bytes.fromhex(holder["value"])
        return self._taken(session, number, found, looked, advance)

    def _taken(self, session: _Session, number: int, found: bytes, since: float, advance: Advance) -> bytes | None:
        """Take it behind a number, which was the newest at a moment (monotonic); None if another one was quicker."""
        value, mine = advance(found), self._path / _numbered(number + 1)
        entry = {"session": session.name, "value": value.hex(), "nonce": secrets.token_hex(4)}
        session.held.add(mine)
        try:
            taken = mine.create(json.dumps(entry).encode())
            if taken and time.monotonic() - since > _STALE_S:
                # Others may have gone on meanwhile, and have removed what stood at this number.
                taken = max(self._numbers()) == mine.name
        except BaseException:
            session.held.discard(mine)
            raise
        if not taken:
            session.held.discard(mine)
            return None
        self._held, self._value = number + 1, value
        if number % _KEPT == 0:
            for name in self._numbers():
                if int(name.removesuffix(_RELEASED)) <= number - _KEPT:
                    (self._path / name).unlink()
        return value

    def release(self) -> None:
        place = self._path / _numbered(self._held)
        _session(self._path.parent.parent / "sessions").held.discard(place)
        try:
            (self._path / f"{place.name}{_RELEASED}").write_bytes(b"")
        except OSError as error:  # this process may take it again; for others it is free when this process ends
            log.debug("%s cannot be let go: %s", place, error)
        else:
            self._released_at = time.monotonic()

    def _numbers(self, after: str = "") -> list[str]:
        # Some servers list an object that is being written, under a name that is longer.
        return [name for name in self._path.names(after) if name.removesuffix(_RELEASED).isdecimal()]


def _numbered(number: int) -> str:
    return f"{number:012d}"


class _Session:
    """This process, to the others that share an object store.

    Attributes:
        held: objects of locks that this process holds.
    """

    def __init__(self, folder: StorePath) -> None:
        self.name = secrets.token_hex(8)
        self.held: set[StorePath] = set()
        self._folder = folder
        self._renew()
        threading.Thread(target=self._keep, name="lock session", daemon=True).start()

    def holds(self, name: str, place: StorePath) -> float:
        """A sign of life of a session's process if that may still hold the lock that it took at a place, else 0."""
        if name == self.name:
            return time.time() if place in self.held else 0.0
        until = self._until(name)
        return until if time.time() < until + GRACE_S else 0.0

    def _until(self, name: str) -> float:
        try:
            return float(json.loads((self._folder / name).read_bytes())["until"])
        except FileNotFoundError:
            return 0.0

    def _renew(self) -> None:
        found: dict[str, Any] = {"until": time.time() + LIVES_S, "host": os.uname().nodename, "pid": os.getpid()}
        (self._folder / self.name).write_bytes(json.dumps(found).encode())

    def _keep(self) -> None:
        try:
            for other in self._folder.iterdir():
                if self._until(other.name) < time.time() - _FORGOTTEN_S:
                    other.unlink()
        except Exception as error:  # noqa: BLE001 - a store's errors have no common base; this is housekeeping
            log.debug("old sessions stay: %s", error)
        while True:
            time.sleep(RENEW_S)
            try:
                self._renew()
            except Exception as error:  # noqa: BLE001 - as above; the next try may succeed
                log.debug("the session of this process's locks cannot be renewed: %s", error)


@cache
def _session(folder: StorePath) -> _Session:
    return _Session(folder)


class WriterLocks:
    """Holds the writer's locks of several tables; a context manager.

    Args:
        patience_s: time to wait for a held lock, which maintenance holds for a moment. In an object store that is until
            its holder has given a sign of life, or the lock of one that gives none is free: at most :data:`LIVES_S` and
            :data:`GRACE_S`. 0: do not wait.
    """

    def __init__(self, lake: Lake, names: Iterable[str], patience_s: float = 0.0) -> None:
        self._folder = lake.shared / "locks"
        self._names = sorted(names)
        self._held = ExitStack()
        self._patience_s = patience_s

    def __enter__(self) -> WriterLocks:
        until = time.monotonic() + self._patience_s
        try:
            for name in self._names:
                path = self._folder / f"{name}.lock"
                self._held.callback(self._taken(name, path, until).release)
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _taken(self, name: str, path: LakePath, until: float) -> Lock:
        lock, sign, pause_s = lock_at(path), math.nan, _AGAIN_S
        while lock.take() is None:
            if math.isnan(sign):
                sign = lock.sign
            if time.monotonic() >= until:
                if lock.sign != sign or not self._patience_s:
                    raise TableBusy(name, path)
                if pause_s == _AGAIN_S:
                    log.info("the process that writes %s gives no sign of life; its lock ends by itself", name)
                pause_s = _QUIET_S
            time.sleep(pause_s)
        return lock
