"""Publisher without compiled parts: kafka-python in a thread of its own. Its errors are translated here."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from ingest.errors import BrokerUnavailable
from ingest.kafka.publisher import (
    CONNECT_MS,
    FOREVER_MS,
    HELD_BACK,
    REQUEST_BYTES,
    Headers,
    OutcomeQueue,
    Routes,
    SendOutcome,
    error_text,
)
from ingest.kafka.topics import topic_limits
from ingest.log.events import LoggedEvent
from lakehouse.contract.settings import KafkaSettings

logger = logging.getLogger(__name__)

# The record itself is invalid.
FINAL = (
    kafka_errors.InvalidRecordError,
    kafka_errors.InvalidTimestampError,
    kafka_errors.PolicyViolationError,
)
# A batch is too large because the topic's limit has changed: its events are judged again, one by one.
TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)


class KafkaPythonPublisher:
    """A :class:`~ingest.kafka.publisher.Publisher`; its thread takes batches from a queue and gives them to the client.

    One request is in flight to a broker at a time. With more, a retried batch that overtakes another is answered with
    OutOfOrderSequenceNumber, and kafka-python fails that batch and continues behind it.

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
        self._queue: queue.SimpleQueue[tuple[Sequence[LoggedEvent], bool] | None] = queue.SimpleQueue()
        self._holding = False
        self._loop = asyncio.get_running_loop()
        self._outcomes: OutcomeQueue
        self._closing = False
        self._producer: KafkaProducer | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self, deliver: Callable[[Sequence[SendOutcome]], None]) -> None:
        self._outcomes = OutcomeQueue(self._loop, deliver)
        self._connect()
        self._thread.start()

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        self._queue.put((events, afresh))

    def close(self, timeout_s: float) -> None:
        if self._thread.is_alive():
            self._closing = True
            self._queue.put(None)
            self._thread.join(timeout_s)
        self._disconnect(timeout_s)

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            self._send_batch(*batch)

    def _send_batch(self, events: Sequence[LoggedEvent], afresh: bool) -> None:
        if afresh:
            self._start_over()
        for event in events:
            if self._closing:  # the log keeps the rest
                return
            if self._holding:
                self._outcomes.put(SendOutcome(event, -1, -1, HELD_BACK))
                continue
            try:
                if refusal := self._routes.refusal(event):
                    self._outcomes.put(SendOutcome(event, -1, -1, refusal, final=True))
                else:
                    self._send_one(event)
            except Exception as error:  # the thread must survive and the event must be sent again
                logger.exception("the Kafka client failed on event %d", event.seq)
                self._again(event, error_text(error))

    def _send_one(self, event: LoggedEvent) -> None:
        assert self._producer is not None
        envelope = event.envelope
        try:
            future = self._producer.send(
                self._routes.topic(envelope.source),
                value=event.payload,
                key=event.key,
                headers=self._headers.of(envelope),
            )
        except kafka_errors.KafkaError as error:
            self._failed(event, error)
            return
        future.add_callback(partial(self._sent, event))
        future.add_errback(partial(self._failed, event))

    def _sent(self, event: LoggedEvent, metadata: Any) -> None:
        self._outcomes.put(SendOutcome(event, metadata.partition, metadata.offset))

    def _failed(self, event: LoggedEvent, error: BaseException) -> None:
        if isinstance(error, FINAL):
            self._outcomes.put(SendOutcome(event, -1, -1, error_text(error), final=True))
        else:
            self._again(event, error_text(error))

    def _again(self, event: LoggedEvent, reason: str) -> None:
        """Stop the client at once: it must not send the batches behind the one that has just failed."""
        self._holding = True
        if self._producer is not None:
            self._producer._sender.force_close()  # fails all it has; each event comes here
        self._outcomes.put(SendOutcome(event, -1, -1, reason))

    def _start_over(self) -> None:
        """Replace a failed client; until that succeeds everything is held back."""
        try:
            if self._holding or self._producer is None:
                self._disconnect(1.0)
                self._connect()
            self._holding = False
        except BrokerUnavailable as error:
            logger.warning("%s", error)

    def _connect(self) -> None:
        self._routes.limit(topic_limits(self._bootstrap, self._routes.topics, self._settings.security))
        try:
            self._producer = KafkaProducer(
                bootstrap_servers=self._bootstrap,
                acks="all",
                enable_idempotence=True,
                max_in_flight_requests_per_connection=1,
                linger_ms=self._settings.linger_ms,
                batch_size=min(self._settings.batch_bytes, self._routes.smallest_limit),
                max_request_size=REQUEST_BYTES,
                delivery_timeout_ms=FOREVER_MS,
                reconnect_backoff_max_ms=1_000,
                bootstrap_timeout_ms=CONNECT_MS,
                allow_auto_create_topics=False,
                max_block_ms=2 * CONNECT_MS,
                metrics_enabled=False,
                **self._settings.security.for_kafka_python(),
            )
            for topic in self._routes.topics:
                self._producer.partitions_for(topic)
        except (kafka_errors.KafkaError, OSError) as error:
            self._disconnect(0)
            raise BrokerUnavailable(self._bootstrap, error_text(error)) from None

    def _disconnect(self, timeout_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.close(timeout=timeout_s)
        except kafka_errors.KafkaTimeoutError:
            logger.warning("Kafka did not take everything before the end; the log keeps it")
            producer._sender.force_close()  # close() gave up at its flush and left its thread running
            producer.close(timeout=1)
