"""A load: files shared out to worker processes, what they tell gathered, the report kept."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import Queue
from queue import Empty

from lakehouse.feeds.errors import LoaderDied
from lakehouse.feeds.files import FeedFile
from lakehouse.feeds.model import FileReport, Job, Step, Tell
from lakehouse.feeds.worker import FileLoader

log = logging.getLogger(__name__)

GROUP_BYTES = 1 << 24
GROUP_FILES = 200
_TOLD = 1_000  # messages between the workers and us
_LOOK_S = 0.05
_PATIENCE_S = 10.0

_loader: FileLoader | None = None  # of a worker process


def load_files(
    job: Job, files: Sequence[FeedFile], *, workers: int = 1, tell: Tell = lambda _: None
) -> list[FileReport]:
    """Load the files, and report on each.

    Args:
        workers: processes; with one, the work is done in this process.
        tell: hears of progress and of each finished file, in this process, from one thread.

    Raises:
        LoaderDied: a worker process was killed. What it had committed is in.
        CommitFailed: bronze does not take rows. What it had taken before is in.
    """
    reports: list[FileReport] = []

    def heard(message: Step | FileReport) -> None:
        if isinstance(message, FileReport):
            reports.append(message)
        tell(message)

    groups = grouped(files)
    if workers <= 1 or len(groups) <= 1:
        with FileLoader(job, heard) as loader:
            for group in groups:
                loader.load(group)
    else:
        _in_processes(job, groups, min(workers, len(groups)), heard)
    known = {report.name for report in reports}
    for file in files:
        if str(file.path) not in known:
            heard(_unheard_of(file))
    order = {str(file.path): number for number, file in enumerate(files)}
    return sorted(reports, key=lambda report: order.get(report.name, -1))


def grouped(files: Sequence[FeedFile]) -> list[list[FeedFile]]:
    """Files that a worker takes together: a large one alone, many small ones; the largest groups first."""
    groups: list[list[FeedFile]] = []
    size = GROUP_BYTES
    for file in sorted(files, key=lambda file: -file.size):
        if size + file.size > GROUP_BYTES or len(groups[-1]) >= GROUP_FILES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


def _unheard_of(file: FeedFile) -> FileReport:
    reason = "the worker that had it has not reported it; load it again to see whether it is in"
    return FileReport(str(file.path), "", "", file.size, 0, 0, 0, 0.0, "failed", reason)


def _in_processes(job: Job, groups: list[list[FeedFile]], workers: int, tell: Tell) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would share delta-rs's threads, which it must not
    told: Queue[Step | FileReport] = context.Queue(_TOLD)
    listener = _Listener(told, tell)
    pool = ProcessPoolExecutor(workers, context, _start, (job, told, os.getpid()))
    try:
        running: set[Future[None]] = {pool.submit(_load, group) for group in groups}
        while running:
            done, running = wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            listener.check()
            for one in done:
                one.result()
    except BrokenProcessPool:
        raise LoaderDied from None
    finally:
        pool.shutdown(cancel_futures=True)
        listener.finish()
        told.close()
    listener.check()


class _Listener:
    """Hears the workers in a thread of its own: none of them has to wait, whatever the others come to.

    Args:
        told: what they say.
        tell: hears it, in that thread.
    """

    def __init__(self, told: Queue[Step | FileReport], tell: Tell) -> None:
        self._told = told
        self._tell = tell
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="load-listen", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ``tell`` has raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Hear what is left; all workers have ended. One that was killed may have left half a message."""
        self._ended.set()
        self._thread.join(_PATIENCE_S)

    def _listen(self) -> None:
        while True:
            try:
                message = self._told.get(timeout=_LOOK_S)
            except Empty:
                if self._ended.is_set():
                    return
                continue
            if self._error is None:
                try:
                    self._tell(message)
                except BaseException as error:  # noqa: BLE001 - raised where the load was asked for
                    self._error = error


def _start(job: Job, told: Queue[Step | FileReport], parent: int) -> None:
    """In a worker process, once."""
    global _loader
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    _loader = FileLoader(job, told.put)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)  # a loader that was killed must not go on in its workers


def _load(group: list[FeedFile]) -> None:
    assert _loader is not None
    _loader.load(group)
