"""Publisher of the ``fast`` extra: confluent-kafka (librdkafka). Its errors are translated here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ingest.errors import BrokerUnavailable
from ingest.kafka.publisher import CONNECT_MS, HELD_BACK, REQUEST_BYTES, Headers, OutcomeQueue, Routes, SendOutcome
from ingest.kafka.topics import topic_limits
from ingest.log.events import LoggedEvent
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.settings import KafkaSettings

logger = logging.getLogger(__name__)
_client_logger = logging.getLogger(f"{__name__}.librdkafka")
_client_logger.addFilter(lambda record: not _expected(record.getMessage()))

_POLL_S = 0.01  # while events are in flight
_IDLE_POLL_S = 1.0  # for the client's other messages
_FINAL = ("INVALID_RECORD", "INVALID_TIMESTAMP", "POLICY_VIOLATION")


class ConfluentPublisher:
    """A :class:`~ingest.kafka.publisher.Publisher` without a Python thread: librdkafka has its own, in C.

    Events are queued in the client on the event loop, and a timer there fetches all outcomes at once. So no Python
    thread has to be woken or waits for a lock.

    ``enable.gapless.guarantee`` makes every failure that would leave a gap fatal to the client: nothing behind it is
    sent, and a new client begins with the failed event.

    Args:
        bootstrap: ``host:port`` of a broker.
        settings: linger and batch size.
        topics: topic by source.
    """

    def __init__(self, bootstrap: str, settings: KafkaSettings, topics: Mapping[str, str]) -> None:
        self._bootstrap = bootstrap
        self._settings = settings
        self._routes = Routes(topics)
        self._headers = Headers()
        self._loop = asyncio.get_running_loop()
        self._outcomes: OutcomeQueue
        self._producer: Any = None
        self._holding = False
        self._in_client = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[LoggedEvent] = []  # for a new client
        self._renewal: asyncio.Task[None] | None = None
        self._closed = False

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        self._outcomes = OutcomeQueue(self._loop, deliver)
        self._connect()
        self._loop.call_soon_threadsafe(self._tick)

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        if self._closed:
            return
        if self._renewal is not None:
            self._waiting += events
        elif afresh and self._holding:
            self._waiting = list(events)
            self._renewal = self._loop.create_task(self._renew())
        else:
            self._send(events)

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self._disconnect(timeout_s)

    # --- sending

    def _send(self, events: Sequence[LoggedEvent]) -> None:
        before = self._in_client
        topics, small, headers_of = self._routes.by_source, self._routes.small_bytes, self._headers.of
        produce, delivered = getattr(self._producer, "produce", None), self._delivered
        for event in events:
            if self._holding or produce is None:
                self._outcomes.put(SendOutcome(event, -1, -1, HELD_BACK))
                continue
            envelope, payload = event.envelope, event.payload
            topic = topics.get(envelope.source)
            if (topic is None or len(payload) > small) and (refusal := self._routes.refusal(event)):
                self._outcomes.put(SendOutcome(event, -1, -1, refusal, final=True))
                continue
            try:
                # topic, value, key, partition (-1: by the key), callback, timestamp (0: now), headers
                produce(topic, payload, event.key, -1, partial(delivered, event), None, 0, headers_of(envelope))
                self._in_client += 1
            except Exception as error:  # noqa: BLE001 - KafkaException, BufferError: any error means sending again
                self._again(event, str(error))
        if before == 0 and self._in_client:
            self._poll_in(_POLL_S)

    def _delivered(self, event: LoggedEvent, error: Any, message: Any) -> None:
        """librdkafka's report, from within poll, flush or purge."""
        self._in_client -= 1
        if error is None:
            self._outcomes.add(SendOutcome(event, message.partition(), message.offset()))
        elif error.name() in _FINAL:
            self._outcomes.add(SendOutcome(event, -1, -1, str(error), final=True))
        else:
            self._again(event, str(error))

    def _again(self, event: LoggedEvent, reason: str) -> None:
        self._holding = True
        self._outcomes.put(SendOutcome(event, -1, -1, reason))

    def _poll_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        if self._producer is None:
            return
        try:
            self._producer.poll(0)
            if self._holding and self._in_client:  # nothing left in the client may be sent
                self._producer.purge()
                self._producer.poll(0)
        finally:  # delivering outcomes may fail; the next poll is due in any case
            self._poll_in(_POLL_S if self._in_client else _IDLE_POLL_S)
            self._outcomes.drain()

    # --- the client

    async def _renew(self) -> None:
        """Replace a failed client; until that succeeds every event must be sent again."""
        try:
            await asyncio.to_thread(self._reconnect)
            self._holding = False
        except BrokerUnavailable as error:
            logger.warning("%s", error)
        waiting, self._waiting = self._waiting, []
        self._renewal = None
        if not self._closed:
            self._send(waiting)
            self._tick()

    def _reconnect(self) -> None:
        self._disconnect(0)
        self._connect()

    def _connect(self) -> None:
        try:
            from confluent_kafka import KafkaException, Producer
        except ImportError:
            raise EnvironmentProblem("confluent-kafka is not installed", "pip install 'millrace[fast]'") from None
        self._routes.limit(topic_limits(self._bootstrap, self._routes.topics, self._settings.security))
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "enable.gapless.guarantee": True,
                "linger.ms": self._settings.linger_ms,
                "batch.size": min(self._settings.batch_bytes, self._routes.smallest_limit),
                "message.max.bytes": REQUEST_BYTES,
                "message.timeout.ms": 0,  # unlimited
                "partitioner": "murmur2_random",  # the same partition for a key as with kafka-python
                "allow.auto.create.topics": False,
                "reconnect.backoff.max.ms": 1_000,
                **self._settings.security.for_librdkafka(),
            },
            logger=_client_logger,
            error_cb=_said,  # otherwise poll raises errors that belong to no event
        )
        try:
            producer.list_topics(timeout=CONNECT_MS / 1000)
        except KafkaException as error:
            raise BrokerUnavailable(self._bootstrap, str(error.args[0])) from None
        self._producer = producer

    def _disconnect(self, timeout_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        left = producer.flush(timeout_s)
        if left:
            logger.warning("Kafka did not take %d events before the end; the log keeps them", left)
            producer.purge()
            producer.flush(1)


def _said(error: Any) -> None:
    """Log an error that belongs to no event, such as a lost broker; librdkafka recovers by itself."""
    logger.warning("the Kafka client: %s", error)


def _expected(text: str) -> bool:
    """Whether a message is harmless: "gapless" is called experimental, and a new broker is not ready at once."""
    return "CONFWARN" in text or ("GETPID" in text and text.endswith("retrying"))
