"""What a demo found out, as the figures that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.account import Account

WARM_S = 20.0  # events sent later than this after the first count as "after warm-up"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One demo, counted.

    Attributes:
        pipeline: its name.
        sent: events that the player sent; None: nothing was played, so that nothing can be found missing.
        acknowledged: events that the collector acknowledged.
        accounts: one a source.
        arrived: whether everything came through in time.
        pushes: messages that the subscriber got.
        first_result_s: from the start to the first change pushed; None: there was none.
        restarts: by part.
        lake: its folder.
    """

    pipeline: str
    sent: int | None
    acknowledged: int
    accounts: Sequence[Account]
    arrived: bool
    pushes: int
    first_result_s: float | None
    restarts: Mapping[str, int]
    lake: Path

    def figures(self) -> dict[str, Any]:
        """The object that ``millrace demo`` prints."""
        accounts, live = self.accounts, self.sent is None
        latency = np.concatenate([account.latency_ms for account in accounts])
        sent_ms = np.concatenate([account.sent_ms for account in accounts])
        first_ms = sent_ms.min() if len(sent_ms) else 0.0
        in_gold = [account.in_gold for account in accounts]
        return {
            "pipeline": self.pipeline,
            "events_sent": self.sent,
            "events_acknowledged": self.acknowledged,
            "events_in_bronze": sum(account.in_bronze for account in accounts),
            "events_in_gold": None if None in in_gold else sum(count or 0 for count in in_gold),
            "quarantined": sum(account.quarantined for account in accounts),
            "duplicates": None if live else sum(account.duplicates for account in accounts),
            "lost": None if live else sum(account.lost for account in accounts),
            "counted_twice": None if live else sum(account.counted_twice for account in accounts),
            "resent": sum(account.resent for account in accounts),
            "arrived": self.arrived,
            "latency_ms": percentiles(latency),
            "latency_ms_warm": percentiles(latency[sent_ms >= first_ms + WARM_S * 1000]),
            "pushes": self.pushes,
            "first_result_s": None if self.first_result_s is None else round(self.first_result_s, 2),
            "restarts": dict(self.restarts),
            "lake": str(self.lake.resolve()),
        }


def percentiles(values: Any) -> dict[str, float | None]:
    """p50, p90 and p99, rounded; None each where there are no values."""
    if not len(values):
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 90, 99)}
