"""The interface to Kafka, :class:`Publisher`, and what its implementations share. Imports no client library."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.log.events import LoggedEvent
from lakehouse.contract.envelope import EVENT_ID, FINGERPRINT, Envelope

logger = logging.getLogger(__name__)

FOREVER_MS = 2_147_483_647  # 24 days: the log keeps the event, so giving up earlier would only send it again
REQUEST_BYTES = 64 * 1024 * 1024  # above the broker's limit: what it refuses goes to the failed store
CONNECT_MS = 5_000
HELD_BACK = "held back behind an event that is sent again"
_HEADER_BYTES = 8_192  # more than key and headers have
_BATCH_OVERHEAD = 100  # of a batch (61 bytes) and of its record


@dataclass(slots=True)
class SendOutcome:
    """What became of one event. Not frozen: freezing would triple the cost of making one.

    Attributes:
        event: as it was handed over.
        partition, offset: its place in Kafka; -1 if it has none.
        error: why Kafka does not have it, or empty.
        final: Kafka will never take it; otherwise it may be sent again, and Kafka may have it already.
    """

    event: LoggedEvent
    partition: int
    offset: int
    error: str = ""
    final: bool = False


class Publisher(Protocol):
    """Sends events to their topics in order, with ``acks=all`` and idempotence.

    The order within a key holds even if a batch fails: the client is discarded with everything in it before it can send
    later events, all of these get an outcome that is not final, and a new client sends them again in order.
    """

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        """Connect. Blocks.

        Args:
            deliver: called on the event loop with every outcome, in batches.

        Raises:
            BrokerUnavailable: no broker answers; ``start`` may be called again.
        """

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        """Hand events over, on the event loop; returns at once.

        After an outcome that is not final, later events are held back with such an outcome too, which keeps the order
        when they are sent again.

        Args:
            events: in the order of the log.
            afresh: all earlier events have their outcomes; stop holding back.
        """

    def close(self, timeout_s: float) -> None:
        """Flush for at most ``timeout_s`` and close. Blocks. Unacknowledged events stay in the log."""


class OutcomeQueue:
    """Takes outcomes on any thread and delivers them on the event loop, with one wake-up a batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._waiting: deque[SendOutcome] = deque()
        self._added: list[SendOutcome] = []  # on the event loop
        self._woken = False

    def put(self, outcome: SendOutcome) -> None:
        """Take an outcome and wake the event loop."""
        self._waiting.append(outcome)
        if not self._woken:  # set before the wake-up and cleared before the drain, so none is left behind
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self.drain)
            except RuntimeError:  # the loop has ended; the events are in the log
                logger.debug("an outcome came after the end of the event loop")

    def add(self, outcome: SendOutcome) -> None:
        """Take an outcome on the event loop; the caller calls :meth:`drain` soon."""
        self._added.append(outcome)

    def drain(self) -> None:
        """Deliver everything, on the event loop."""
        self._woken = False
        if self._added:
            added, self._added = self._added, []
            self._deliver(added)
        if self._waiting:
            self._deliver([self._waiting.popleft() for _ in range(len(self._waiting))])


class Headers:
    """Makes Kafka headers; consecutive envelopes share what is equal."""

    def __init__(self) -> None:
        self._of: tuple[str, str, int, str] | None = None
        self._shared: list[tuple[str, bytes]] = []

    def of(self, envelope: Envelope) -> list[tuple[str, bytes]]:
        """The same as :meth:`Envelope.to_headers`."""
        if envelope.suspect or envelope.reject is not None or envelope.extra:
            return envelope.to_headers()
        shared = (envelope.source, envelope.tenant, envelope.received_at, envelope.collector)
        if shared != self._of:
            self._of, self._shared = shared, envelope.to_headers()[1:-1]
        return [
            (EVENT_ID, envelope.event_id.encode()), *self._shared, (FINGERPRINT, envelope.fingerprint.encode())
        ]  # fmt: skip


class Routes:
    """Topic of each source, and the size that it takes."""

    def __init__(self, topics: Mapping[str, str]) -> None:
        self._topics = topics
        self._limits: Mapping[str, int] = {}

    @property
    def topics(self) -> set[str]:
        return set(self._topics.values())

    @property
    def by_source(self) -> Mapping[str, str]:
        return self._topics

    def topic(self, source: str) -> str:
        return self._topics[source]

    def limit(self, limits: Mapping[str, int]) -> None:
        """Use these limits (``max.message.bytes`` by topic) from now on."""
        self._limits = limits

    @property
    def small_bytes(self) -> int:
        """A payload of this size fits into every topic with any headers."""
        return self.smallest_limit - _HEADER_BYTES

    @property
    def smallest_limit(self) -> int:
        """The smallest limit; a larger batch would fail with all its events."""
        return min(self._limits.values(), default=REQUEST_BYTES)

    def refusal(self, event: LoggedEvent) -> str:
        """Why Kafka would never take the event, or empty."""
        topic = self._topics.get(event.envelope.source)
        if topic is None:
            return f"the pipeline has no source {event.envelope.source!r} any more"
        limit = self._limits.get(topic, REQUEST_BYTES)
        if len(event.payload) + _HEADER_BYTES > limit and (size := record_bytes(event)) > limit:
            return f"the record has about {size} bytes, more than the {limit} that its topic takes"
        return ""


def record_bytes(event: LoggedEvent) -> int:
    """An upper bound of the size of a batch with this event alone."""
    headers = sum(len(name) + len(value) + 10 for name, value in event.envelope.to_headers())
    return _BATCH_OVERHEAD + len(event.key) + len(event.payload) + headers


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
