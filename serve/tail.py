"""The tail: follows one table's log, one for any number of subscribers, and tells what each commit changed.

A tick is two `stat` calls in the event loop: is there a next version, and is the log still the same folder (a table
that was dropped and built again starts over under the same name). Files are read off the loop; the state is changed on
it, so whoever reads the state on the loop sees whole versions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lakehouse.contract.deltalog import Commit, LogFollower, TableGone
from serve.model import Change
from serve.reader import TableReader
from serve.state import Step, TableState

log = logging.getLogger(__name__)

_GAP_CHECK_S = 2.0  # how often a missing next version is looked at: not yet written, or cleaned up?
_HALF_WRITTEN_TRIES = 40
_AGAIN_S = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Opened:
    """The table is there: its state, which the tail goes on changing. Also said again after the table was replaced.

    Attributes:
        state: rows at the version where following starts.
        detail: why earlier positions are void; empty the first time.
    """

    state: TableState
    detail: str = ""


class Tail:
    """Follows the table in ``folder``.

    Args:
        folder: the table's folder; need not exist yet.
        poll_ms: pause between two looks for a next version.
        warm: versions before the newest to start from where the log has them, so that a process that just started
            already has the last changes for those who come back to it.
        executor: where files are read.
    """

    def __init__(self, folder: Path, *, poll_ms: int, warm: int = 0, executor: Executor | None = None) -> None:
        self.folder = folder
        self._poll = poll_ms / 1000
        self._warm = warm
        self._executor = executor
        self._reader = TableReader(folder)
        self._follower = LogFollower(folder)

    async def follow(self) -> AsyncIterator[Opened | Change]:
        """First :class:`Opened`, then a change a commit, in order, without end.

        Raises:
            TableUnreadable: the table cannot be pushed.
        """
        detail = ""
        try:
            while True:
                await self._wait_for_log()
                state = await self._open()
                self._warm = 0  # a second opening follows a break: what lies before it is void
                yield Opened(state, detail)
                try:
                    while True:
                        yield state.apply(await self._next_step(state))
                except TableGone as gone:
                    detail = str(gone)
                    log.warning("tail starts over: %s", gone)
        finally:
            self._follower.close()

    async def _wait_for_log(self) -> None:
        while True:
            if await self._call(self._follower.open):
                return
            await asyncio.sleep(max(self._poll, 0.1))

    async def _open(self) -> TableState:
        while True:
            try:
                return await self._call(self._load)
            except TableGone as gone:  # being built or dropped at this moment
                log.info("waiting for a table: %s", gone)
                await asyncio.sleep(max(self._poll, 0.1))
                await self._wait_for_log()

    def _load(self) -> TableState:
        if self._warm:
            known = self._follower.log.versions()
            start = known[-1] - self._warm if known else 0
            if start > 0 and known[-self._warm - 1 :][0] == start:
                with contextlib.suppress(TableGone):
                    return self._reader.load(start)
        return self._reader.load()

    async def _next_step(self, state: TableState) -> Step:
        """Waits for the next commit. What the operating system refuses for a moment, a file descriptor say, is tried
        again: nothing has been lost by it."""
        while True:
            try:
                commit = await self._next_commit(state.version + 1)
                return await self._call(self._reader.prepare, state, commit)
            except OSError as error:
                log.warning("%s: version %d cannot be read yet: %s", self.folder.name, state.version + 1, error)
                await asyncio.sleep(_AGAIN_S)

    async def _next_commit(self, version: int) -> Commit:
        """Waits for the version's log file.

        Raises:
            TableGone: the log has been replaced, or cleaned up beyond this version.
        """
        follower = self._follower
        loop = asyncio.get_running_loop()
        look_at = loop.time() + _GAP_CHECK_S
        tries = 0
        while True:
            if follower.log.has(version):
                try:
                    return await self._call(follower.read, version)
                except ValueError:  # a file system that shows a file before its end is written
                    tries += 1
                    if tries > _HALF_WRITTEN_TRIES:
                        raise TableGone(self.folder.name, f"version {version} in the log is not JSON") from None
            follower.check()
            await asyncio.sleep(to_next_beat(loop.time(), self._poll))
            if loop.time() > look_at:
                look_at = loop.time() + _GAP_CHECK_S
                await self._call(follower.check_gap, version)

    async def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def to_next_beat(now: float, pause: float) -> float:
    """Seconds to the next multiple of ``pause``, or to the one after where that is too close.

    All tails of a process look at the same moments, so that it is woken as often for twenty tables as for one: being
    woken is most of what a look costs.
    """
    left = pause - now % pause
    return left if left > 0.2 * pause else left + pause
