"""Records of the topics that bronze has not taken, and how soon the topics' retention removes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Gauge

from lakehouse.bronze.table import Progress, progress
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Source

log = logging.getLogger(__name__)

OK, WARN, ALARM = "ok", "warn", "alarm"
# Shares of a retention from which on it is reported, before records are lost.
WARN_SHARE, ALARM_SHARE = 0.5, 0.8
WATCH_EVERY_S = 600.0

RETENTION_SHARE = Gauge(
    "millrace_lakehouse_retention_share",
    "Age of the oldest record that bronze has not taken, as a share of its topic's retention",
    ["source"],
    registry=None,
)


def span(seconds: float) -> str:
    """A length of time for people."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def health_of(age_s: float, retention_s: float) -> str:
    """Health of an age against a retention, which is unlimited if it is not positive."""
    share = age_s / retention_s if retention_s > 0 else 0.0
    return ALARM if share >= ALARM_SHARE else WARN if share >= WARN_SHARE else OK


def worst(remarks: Iterable[tuple[str, str]]) -> str:
    """The worst health of some remarks."""
    found = [health for health, _ in remarks]
    return ALARM if ALARM in found else WARN if found else OK


@dataclass(frozen=True, slots=True)
class Backlog:
    """Records of a topic that bronze has not taken.

    Attributes:
        oldest_s: age of the oldest, seconds.
        lost: records that the topic no longer holds and bronze never took.
        retention_s: retention of the topic, seconds.
        anew: the topic began anew, so bronze's offsets do not apply to it: all of its records wait.
    """

    records: int
    oldest_s: float
    lost: int
    retention_s: float
    anew: bool = False

    @property
    def share(self) -> float:
        """Age of the oldest record as a share of the retention; 0 if the retention is unlimited."""
        return self.oldest_s / self.retention_s if self.retention_s > 0 else 0.0

    @property
    def health(self) -> str:
        return worst(self.remarks())

    def remarks(self) -> Iterator[tuple[str, str]]:
        """Problems: how bad each is, and what to do."""
        if self.lost:
            yield ALARM, f"the topic no longer holds {self.lost} records that bronze never took"
        if self.anew:
            yield ALARM, "the topic began anew, and bronze has taken another: the pipeline will not start; it says why"
        if (health := health_of(self.oldest_s, self.retention_s)) != OK:
            kept = span(self.retention_s)
            waited = f"records have waited {span(self.oldest_s)} in the topic, which keeps them for {kept}"
            yield health, f"{waited}: run the pipeline"


Ask = Callable[[Source, Progress], Backlog | None]
"""The backlog of a source whose bronze table has this progress; None if no broker answers."""


class RetentionWatch:
    """Reports the backlog of each source to the log and to Prometheus, every ten minutes.

    Args:
        now: monotonic seconds.

    Attributes:
        sources: by name; others may be set at any time.
    """

    def __init__(self, lake: Lake, ask: Ask, now: Callable[[], float] = time.monotonic) -> None:
        self.sources: Mapping[str, Source] = {}
        self._lake = lake
        self._ask = ask
        self._now = now
        self._looked: float | None = None

    def turn(self) -> None:
        """Look, if ten minutes have passed."""
        if self._looked is not None and self._now() - self._looked < WATCH_EVERY_S:
            return
        self._looked = self._now()
        found = {s.name: self._ask(s, progress(self._lake.bronze(s.name))) for s in self.sources.values()}
        RETENTION_SHARE.clear()  # a source without an answer has no value
        for name, backlog in found.items():
            if backlog is None:
                continue
            RETENTION_SHARE.labels(name).set(backlog.share)
            for health, remark in backlog.remarks():
                level = logging.ERROR if health == ALARM else logging.WARNING
                log.log(level, "%s: source %s: %s", health, name, remark)
