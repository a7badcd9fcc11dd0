"""One name for an event from the socket to the products: its ``event_id``.

The collector gives it (or takes it from the payload), the acknowledgement answers it, Kafka's header ``id`` and bronze
carry it, and every log line about a single event bears it, as a field of its own where lines are JSON.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FIELDS = ("event_id", "source", "tenant")
"""Fields of a log record that is about one event."""


def about(event_id: str, source: str, tenant: str) -> dict[str, str]:
    """The ``extra`` of a log call about one event."""
    return dict(zip(FIELDS, (event_id, source, tenant), strict=True))


class EventLines:
    """Writes log lines about single events, so many a second: a flood of bad events must not become one of lines.

    Args:
        logger: that writes them.
        most: lines a second; what is beyond them is counted, and the count told with the next line.
        now: seconds.
    """

    def __init__(self, logger: logging.Logger, most: int = 20, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._most = most
        self._now = now
        self._since = 0.0
        self._said = 0
        self._left_out = 0

    def say(self, level: int, what: str, reason: str, *, event_id: str, source: str, tenant: str) -> None:
        """Write "event ID of SOURCE WHAT: REASON", or count it."""
        now = self._now()
        if now - self._since >= 1.0:
            self._since, self._said = now, 0
        if self._said >= self._most:
            self._left_out += 1
            return
        self._said += 1
        text, left_out = "event %s of %s %s: %s", self._left_out
        if left_out:
            self._left_out, text = 0, f"{text} (and {left_out} others before it)"
        self._logger.log(level, text, event_id, source, what, reason, extra=about(event_id, source, tenant))
