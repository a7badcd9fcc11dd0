"""Load shedding: while too much waits for Kafka, part of a source's events is not taken at all.

Shedding happens at the border, before the log: an acknowledged event is never shed, and a shed event is never
acknowledged. The verdict depends on the event id alone, so a repeated event gets the same one while shedding is on.
Events taken meanwhile carry a *weight*, 1 / (1 - share), the number of events that each stands for. So ``sum(weight)``
estimates what ``count(*)`` would have been. Events that could not have been shed weigh 1.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lakehouse.contract.envelope import WEIGHT
from lakehouse.contract.pipeline.source import ShedSpec

logger = logging.getLogger(__name__)

LOOK_S = 0.05  # between two checks of what waits
_SPACE = 2**64


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for Kafka.

    Attributes:
        events: of the source, in the log.
        bytes: of the node's log.
        oldest_at: ``received_at`` of the node's oldest unacknowledged event, microseconds since the epoch; 0 if none.
    """

    events: int
    bytes: int
    oldest_at: int


@dataclass(frozen=True, slots=True)
class ShedVerdict:
    """Whether an event is shed, and the extra headers of one that is not."""

    shed: bool
    extra: tuple[tuple[str, str], ...] = ()


TAKEN, SHED = ShedVerdict(shed=False), ShedVerdict(shed=True)


class Shedder:
    """Sheds the events of one source while too much waits.

    Args:
        now: seconds, monotonic.
        clock: nanoseconds since the epoch, as in ``received_at``.

    Attributes:
        count: events shed since the node started.
    """

    def __init__(
        self,
        name: str,
        spec: ShedSpec,
        waiting: Callable[[], Waiting],
        *,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._name = name
        self._spec = spec
        self._waiting = waiting
        self._now = now
        self._clock = clock
        self._looked = float("-inf")
        self._calm_since: float | None = None
        self._least = int(spec.share * _SPACE)
        self._weighed = ShedVerdict(shed=False, extra=((WEIGHT, repr(round(1 / (1 - spec.share), 9))),))
        self.on = False
        self.count = 0

    @property
    def share(self) -> float:
        """The share of events in force now; 0 while shedding is off."""
        self._look()
        return self._spec.share if self.on else 0.0

    def judge(self, event_id: str, fields: Mapping[str, Any]) -> ShedVerdict:
        """The verdict on a valid event with this dedupe key and payload."""
        self._look()
        if not self.on or any(test.holds(fields) for test in self._spec.tests):
            return TAKEN
        digest = hashlib.blake2b(event_id.encode(), digest_size=8, person=b"millrace-shed").digest()
        if int.from_bytes(digest, "big") >= self._least:
            return self._weighed
        self.count += 1
        return SHED

    def _look(self) -> None:
        now = self._now()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        pressure = self._pressure(self._waiting())
        if pressure >= 1:
            if not self.on:
                logger.warning(
                    "source %s: too much waits for Kafka; shedding %.0f %%", self._name, 100 * self._spec.share
                )
            self.on, self._calm_since = True, None
        elif self.on and pressure >= self._spec.off:
            self._calm_since = None
        elif self.on:
            self._calm_since = now if self._calm_since is None else self._calm_since
            if now - self._calm_since >= self._spec.hold_ms / 1000:
                logger.warning("source %s: shedding stopped after %d events", self._name, self.count)
                self.on, self._calm_since = False, None

    def _pressure(self, waiting: Waiting) -> float:
        """How near the nearest limit is; 1 is reached."""
        spec = self._spec
        parts = [0.0]
        if spec.on_events:
            parts.append(waiting.events / spec.on_events)
        if spec.on_bytes:
            parts.append(waiting.bytes / spec.on_bytes)
        if spec.on_age_ms and waiting.oldest_at:
            parts.append((self._clock() / 1e6 - waiting.oldest_at / 1e3) / spec.on_age_ms)
        return max(parts)
