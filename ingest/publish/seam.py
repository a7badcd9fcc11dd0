"""The way to Kafka: one seam, :class:`Publisher`, behind which a client library stands. No client is imported here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.events import LoggedEvent
from lakehouse.contract.envelope import EVENT_ID, FINGERPRINT, Envelope

logger = logging.getLogger(__name__)

FOREVER_MS = 2_147_483_647  # 24 days: the log keeps the event anyway, a shorter time would only send it again
REQUEST_BYTES = 64 * 1024 * 1024  # no limit of ours: what the broker refuses goes to the failed store with its reason
CONNECT_MS = 5_000
HELD_BACK = "held back behind an event that is sent again"
_FIELDS_BYTES = 8_192  # more than key and headers have
_BATCH_OVERHEAD = 100  # of a batch (61 bytes) and of the record in it


@dataclass(slots=True)
class Outcome:
    """What became of one event. (Not frozen: one is made for each event, and freezing triples what that costs.)

    Attributes:
        event: as it was handed over.
        partition: where it is; -1 if it is not.
        offset: where it is; -1 if it is not.
        error: why it is not in Kafka, or empty.
        final: Kafka will never take it; else it may be sent again (and may be in Kafka already).
    """

    event: LoggedEvent
    partition: int
    offset: int
    error: str = ""
    final: bool = False


class Publisher(Protocol):
    """Sends events to their topics, in the order they are handed over, with ``acks=all`` and idempotence.

    Order within a key holds also where a batch fails: then the client is given up with everything in it before it can
    send what comes behind, all of that has an outcome that is not final, and a new client sends it again in order.
    """

    def start(self, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        """Connect and begin; blocks, so call it from a thread.

        Args:
            deliver: called on the event loop with every outcome, in batches.

        Raises:
            BrokerUnavailable: no broker answers; ``start`` may be called again.
        """

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        """Hand events over, on the event loop; returns at once.

        After an outcome that is not final, what comes behind that event is held back and has such an outcome too, so
        that order is kept when they are sent again.

        Args:
            events: in the order of the log.
            afresh: everything handed over earlier has its outcome; stop holding back.
        """

    def close(self, timeout_s: float) -> None:
        """Flush for at most ``timeout_s`` and end; blocks. What is not acknowledged by then stays in the log."""


class Outcomes:
    """Takes outcomes on any thread and gives them to the event loop with one wake-up a batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._waiting: deque[Outcome] = deque()
        self._added: list[Outcome] = []  # on the event loop
        self._woken = False

    def put(self, outcome: Outcome) -> None:
        """Take one; the event loop is woken."""
        self._waiting.append(outcome)
        if not self._woken:  # set before the wake-up and cleared before the drain, so none is left behind
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self.drain)
            except RuntimeError:  # the loop has ended; the events are in the log
                logger.debug("an outcome came after the end of the event loop")

    def add(self, outcome: Outcome) -> None:
        """Take one on the event loop, where somebody calls :meth:`drain` soon."""
        self._added.append(outcome)

    def drain(self) -> None:
        """Deliver what waits; on the event loop."""
        self._woken = False
        if self._added:
            added, self._added = self._added, []
            self._deliver(added)
        if self._waiting:
            self._deliver([self._waiting.popleft() for _ in range(len(self._waiting))])


class Headers:
    """Kafka headers of one envelope after the other; what they share with the one before is made once."""

    def __init__(self) -> None:
        self._of: tuple[str, str, int, str] | None = None
        self._shared: list[tuple[str, bytes]] = []

    def of(self, envelope: Envelope) -> list[tuple[str, bytes]]:
        """Those of :meth:`Envelope.to_headers`, in that order."""
        if envelope.suspect or envelope.reject is not None or envelope.extra:
            return envelope.to_headers()
        shared = (envelope.source, envelope.tenant, envelope.received_at, envelope.collector)
        if shared != self._of:
            self._of, self._shared = shared, envelope.to_headers()[1:-1]
        return [
            (EVENT_ID, envelope.event_id.encode()), *self._shared, (FINGERPRINT, envelope.fingerprint.encode())
        ]  # fmt: skip


class Routes:
    """Where each source's events go, and whether they may.

    Args:
        topics: topic of each source.
    """

    def __init__(self, topics: Mapping[str, str]) -> None:
        self._topics = topics
        self._limits: Mapping[str, int] = {}

    @property
    def topics(self) -> set[str]:
        """All of them."""
        return set(self._topics.values())

    @property
    def by_source(self) -> Mapping[str, str]:
        """Topic of each source, as it is now."""
        return self._topics

    def topic(self, source: str) -> str:
        """The source's."""
        return self._topics[source]

    def limit(self, limits: Mapping[str, int]) -> None:
        """Judge by these limits (``max.message.bytes`` by topic) from now on."""
        self._limits = limits

    @property
    def small_bytes(self) -> int:
        """A payload up to here fits into every topic, whatever is around it."""
        return self.smallest_limit - _FIELDS_BYTES

    @property
    def smallest_limit(self) -> int:
        """Of all topics: no batch may be larger, or it would take its events down with it."""
        return min(self._limits.values(), default=REQUEST_BYTES)

    def refusal(self, event: LoggedEvent) -> str:
        """Why Kafka would never take the event; empty where it would."""
        topic = self._topics.get(event.envelope.source)
        if topic is None:
            return f"the pipeline has no source {event.envelope.source!r} any more"
        limit = self._limits.get(topic, REQUEST_BYTES)
        if len(event.payload) + _FIELDS_BYTES > limit and (size := record_bytes(event)) > limit:
            return f"the record has about {size} bytes, more than the {limit} that its topic takes"
        return ""


def record_bytes(event: LoggedEvent) -> int:
    """About the size of a batch with this event alone; never less."""
    headers = sum(len(name) + len(value) + 10 for name, value in event.envelope.to_headers())
    return _BATCH_OVERHEAD + len(event.key) + len(event.payload) + headers


def error_text(error: BaseException) -> str:
    """The error's class, and what it says."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
