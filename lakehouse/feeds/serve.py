"""The loader as a service: a watched folder, and feeds fetched on a schedule. Each gives its loads one by one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lakehouse.contract.feed import FeedSpec, metrics_file
from lakehouse.feeds.errors import PullFailed
from lakehouse.feeds.files import SUFFIXES, FeedFile
from lakehouse.feeds.inbox import Inbox
from lakehouse.feeds.load import Load, load
from lakehouse.feeds.metrics import LoaderMetrics
from lakehouse.feeds.model import Job
from lakehouse.feeds.pull import Pulled, Puller

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_FILES_AT_ONCE = 5_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of looking at a feed.

    Attributes:
        feed: its name.
        load: of the file that was new, or None.
        problem: why nothing came; empty: nothing is new, or it was loaded.
    """

    feed: str
    load: Load | None = None
    problem: str = ""


def watch_inbox(
    job: Job,
    inbox: Inbox,
    stop: threading.Event,
    *,
    workers: int = 1,
    allowed_s: float | None = None,
    once: bool = False,
    metrics: LoaderMetrics | None = None,
) -> Iterator[Load]:
    """Load what arrives until ``stop`` is set; a file's deadline counts from its being found finished.

    Args:
        once: end when all that is there now is loaded; files must be still for the inbox's time all the same.
        metrics: that count, beside the file of them.
    """
    metrics = metrics or LoaderMetrics()
    tried: set[FeedFile] = set()  # of a trial, or files that cannot be moved away
    left = inbox.paths()
    while not stop.is_set():
        ready = [file for file in inbox.look() if file not in tried][:_FILES_AT_ONCE]
        if ready:
            done = load(job, ready, workers=workers, allowed_s=allowed_s, metrics=metrics)
            left -= {file.path for file in ready}
            if job.trial:
                tried.update(ready)
            else:
                left |= inbox.put_away(done.reports)
            _write(metrics, job)
            yield done
        if once:
            left &= inbox.paths()  # others may be taken away
            if not left:
                return
        stop.wait(_LOOK_S)


def run_feeds(
    jobs: Sequence[Job],
    stop: threading.Event,
    *,
    workers: int = 1,
    once: bool = False,
    metrics: LoaderMetrics | None = None,
) -> Iterator[Outcome]:
    """Look at every feed when it is due, and load what is new, until ``stop`` is set.

    Args:
        once: look at each feed now, whether it is due or not, and end.
        metrics: as of :func:`watch_inbox`.
    """
    metrics = metrics or LoaderMetrics()
    pullers = {job.source.name: Puller(job.lake, job.source.name, stop=stop) for job in jobs}
    while not stop.is_set():
        for job in jobs:
            for feed in job.source.feeds:
                puller = pullers[job.source.name]
                if not stop.is_set() and (once or puller.due(feed) <= 0):
                    yield _look(job, puller, feed, workers, metrics)
                    _write(metrics, job)
        if once:
            return
        stop.wait(_LOOK_S)


def _look(job: Job, puller: Puller, feed: FeedSpec, workers: int, metrics: LoaderMetrics) -> Outcome:
    try:
        pulled = puller.fetch(feed)
    except PullFailed as error:
        log.warning("%s", error)
        return Outcome(feed.name, problem=error.problem)
    if pulled is None:
        return Outcome(feed.name)
    job = replace(job, kind=feed.format if feed.format != "auto" else _kind_of(feed, job))
    done = load(job, [_file(pulled)], workers=workers, allowed_s=_left(feed, pulled), metrics=metrics)
    if done.ok or all(report.state in ("failed", "refused") for report in done.reports):
        # A file that cannot be read is not fetched again until it changes.
        puller.loaded(feed, pulled)
    return Outcome(feed.name, done, "" if done.ok else done.reports[0].reason)


def _kind_of(feed: FeedSpec, job: Job) -> str:
    """By the address, since the file has another name here."""
    path = Path(feed.url.partition("?")[0].lower().removesuffix(".gz"))
    return SUFFIXES.get(path.suffix, job.kind)


def _file(pulled: Pulled) -> FeedFile:
    return FeedFile(pulled.path, pulled.path.stat().st_size)


def _left(feed: FeedSpec, pulled: Pulled) -> float | None:
    """What the download has left of the SLA."""
    return None if feed.sla_s is None else feed.sla_s - (time.time() - pulled.met_at)


def _write(metrics: LoaderMetrics, job: Job) -> None:
    if not job.trial:
        metrics.write(job.lake.state / "run" / metrics_file(job.node))
