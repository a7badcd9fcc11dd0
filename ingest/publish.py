"""The way to Kafka: one seam, :class:`Publisher`, with two clients behind it. Kafka's errors are translated only here.

A publisher never blocks the event loop: events are handed over in batches to a thread of its own, and outcomes come
back to the loop in batches.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kafka import KafkaAdminClient, KafkaProducer
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from ingest.errors import BrokerUnavailable
from ingest.events import LoggedEvent
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import KafkaSettings

logger = logging.getLogger(__name__)

_FOREVER_MS = 2_147_483_647  # 24 days: the log keeps the event anyway, a shorter time would only send it again
_REQUEST_BYTES = 64 * 1024 * 1024  # no limit of ours: what the broker refuses goes to the failed store with its reason
_CONNECT_MS = 5_000
_LIMIT = "max.message.bytes"
_FIELDS_BYTES = 8_192  # more than key and headers have
_BATCH_OVERHEAD = 100  # of a batch (61 bytes) and of the record in it


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one event.

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
    """Sends events to their topics, in the order they are handed over, with ``acks=all`` and idempotence."""

    def start(self, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        """Connect and begin; blocks, so call it from a thread.

        Args:
            deliver: called on the event loop with every outcome, in batches.

        Raises:
            BrokerUnavailable: no broker answers; ``start`` may be called again.
        """

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        """Hand events over; returns at once.

        After an outcome that is not final, what comes behind that event is held back and has such an outcome too, so
        that order is kept when they are sent again.

        Args:
            events: in the order of the log.
            afresh: everything handed over earlier has its outcome; stop holding back.
        """

    def close(self, timeout_s: float) -> None:
        """Flush for at most ``timeout_s`` and end; blocks. What is not acknowledged by then stays in the log."""


class _Outcomes:
    """Takes outcomes on any thread and gives them to the event loop with one wake-up a batch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._waiting: deque[Outcome] = deque()
        self._woken = False

    def put(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        if not self._woken:  # set before the wake-up and cleared before the drain, so none is left behind
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop has ended; the events are in the log
                logger.debug("an outcome came after the end of the event loop")

    def _drain(self) -> None:
        self._woken = False
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if batch:
            self._deliver(batch)


class _ThreadedPublisher:
    """A thread that takes batches from a queue and gives each event to a client.

    An event that is larger than its topic takes is refused here: sent, it would take its whole batch down with it.
    """

    def __init__(self, bootstrap: str, settings: KafkaSettings, topics: Mapping[str, str]) -> None:
        self._bootstrap = bootstrap
        self._settings = settings
        self._topics = topics
        self._queue: queue.SimpleQueue[tuple[Sequence[LoggedEvent], bool] | None] = queue.SimpleQueue()
        self._holding = False
        self._loop = asyncio.get_running_loop()
        self._outcomes: _Outcomes
        self._limits: dict[str, int] = {}
        self._limits_stale = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self, deliver: Callable[[Sequence[Outcome]], None]) -> None:
        self._outcomes = _Outcomes(self._loop, deliver)
        self._limits = topic_limits(self._bootstrap, set(self._topics.values()))
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
            self._holding = False
        for event in events:
            if self._closing:  # the log keeps the rest
                return
            if self._holding:
                self._again(event, "held back behind an event that is sent again")
            else:
                self._try_one(event)

    def _again(self, event: LoggedEvent, reason: str) -> None:
        self._holding = True
        self._outcomes.put(Outcome(event, -1, -1, reason))

    def _try_one(self, event: LoggedEvent) -> None:
        try:
            if self._limits_stale:
                self._limits_stale = False
                self._limits = topic_limits(self._bootstrap, set(self._topics.values()))
            topic = self._topics.get(event.envelope.source)
            if topic is None:
                reason = f"the pipeline has no source {event.envelope.source!r} any more"
                self._outcomes.put(Outcome(event, -1, -1, reason, final=True))
                return
            limit = self._limits[topic]
            if len(event.payload) + _FIELDS_BYTES > limit and (size := record_bytes(event)) > limit:
                reason = f"the record has about {size} bytes, more than the {limit} that its topic takes"
                self._outcomes.put(Outcome(event, -1, -1, reason, final=True))
            else:
                self._send_one(event)
        except Exception as error:  # whatever it is, the thread must live and the event must be sent again
            logger.exception("the Kafka client failed on event %d", event.seq)
            self._again(event, _text(error))

    def _connect(self) -> None:
        raise NotImplementedError

    def _disconnect(self, timeout_s: float) -> None:
        raise NotImplementedError

    def _send_one(self, event: LoggedEvent) -> None:
        raise NotImplementedError


class KafkaPythonPublisher(_ThreadedPublisher):
    """The default client: kafka-python, no compiled parts.

    Args:
        bootstrap: ``host:port`` of a broker.
        settings: linger and batch size.
        topics: topic of each source.
    """

    _producer: KafkaProducer | None = None

    def _connect(self) -> None:
        try:
            self._producer = KafkaProducer(
                bootstrap_servers=self._bootstrap,
                acks="all",
                enable_idempotence=True,
                linger_ms=self._settings.linger_ms,
                batch_size=self._settings.batch_bytes,
                max_request_size=_REQUEST_BYTES,
                delivery_timeout_ms=_FOREVER_MS,
                reconnect_backoff_max_ms=1_000,
                bootstrap_timeout_ms=_CONNECT_MS,
                allow_auto_create_topics=False,
                max_block_ms=2 * _CONNECT_MS,
                metrics_enabled=False,
            )
            for topic in set(self._topics.values()):
                self._producer.partitions_for(topic)
        except (kafka_errors.KafkaError, OSError) as error:
            self._disconnect(0)
            raise BrokerUnavailable(self._bootstrap, _text(error)) from None

    def _disconnect(self, timeout_s: float) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.close(timeout=timeout_s)
            except kafka_errors.KafkaTimeoutError:
                logger.warning("Kafka did not take everything before the end; the log keeps it")
                producer._sender.force_close()  # close() gives up at its flush and would leave the thread running
                producer.close(timeout=1)

    def _send_one(self, event: LoggedEvent) -> None:
        assert self._producer is not None
        envelope = event.envelope
        try:
            future = self._producer.send(
                self._topics[envelope.source], value=event.payload, key=event.key, headers=envelope.to_headers()
            )
        except kafka_errors.KafkaError as error:
            self._failed(event, error)
            return
        future.add_callback(partial(self._sent, event))
        future.add_errback(partial(self._failed, event))

    def _sent(self, event: LoggedEvent, metadata: Any) -> None:
        self._outcomes.put(Outcome(event, metadata.partition, metadata.offset))

    def _failed(self, event: LoggedEvent, error: BaseException) -> None:
        self._limits_stale |= isinstance(error, _TOO_LARGE)
        if isinstance(error, _FINAL):
            self._outcomes.put(Outcome(event, -1, -1, _text(error), final=True))
        else:
            self._again(event, _text(error))


class ConfluentPublisher(_ThreadedPublisher):
    """The client of the ``fast`` extra: confluent-kafka, about nine times as fast. Same arguments."""

    _producer: Any = None

    def _connect(self) -> None:
        try:
            from confluent_kafka import KafkaException, Producer
        except ImportError:
            raise EnvironmentProblem("confluent-kafka is not installed", "pip install 'millrace[fast]'") from None
        self._producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": self._settings.linger_ms,
                "batch.size": self._settings.batch_bytes,
                "message.max.bytes": _REQUEST_BYTES,
                "message.timeout.ms": 0,  # without end
                "partitioner": "murmur2_random",  # the same partition for a key as with kafka-python
                "allow.auto.create.topics": False,
                "reconnect.backoff.max.ms": 1_000,
            },
            logger=logger,
        )
        try:
            self._producer.list_topics(timeout=_CONNECT_MS / 1000)
        except KafkaException as error:
            self._producer = None
            raise BrokerUnavailable(self._bootstrap, str(error.args[0])) from None

    def _disconnect(self, timeout_s: float) -> None:
        if self._producer is not None:
            left = self._producer.flush(timeout_s)
            if left:
                logger.warning("Kafka did not take %d events before the end; the log keeps them", left)
                self._producer.purge()
                self._producer.flush(1)
            self._producer = None

    def _run(self) -> None:
        while True:
            try:
                batch = self._queue.get(timeout=0.01)
            except queue.Empty:
                self._producer.poll(0)
                continue
            if batch is None:
                return
            self._send_batch(*batch)
            self._producer.poll(0)

    def _send_one(self, event: LoggedEvent) -> None:
        from confluent_kafka import KafkaException

        topic = self._topics[event.envelope.source]
        while True:
            try:
                self._producer.produce(
                    topic,
                    value=event.payload,
                    key=event.key,
                    headers=event.envelope.to_headers(),
                    on_delivery=partial(self._delivered, event),
                )
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:
                self._delivered(event, error.args[0], None)
                return

    def _delivered(self, event: LoggedEvent, error: Any, message: Any) -> None:
        if error is None:
            self._outcomes.put(Outcome(event, message.partition(), message.offset()))
        else:
            self._limits_stale |= error.name() in ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")
            if error.name() == "INVALID_RECORD":
                self._outcomes.put(Outcome(event, -1, -1, str(error), final=True))
            else:
                self._again(event, str(error))


# Said of a batch, and so of its neighbours too: the limit has changed, the events are judged by it one by one.
_TOO_LARGE = (kafka_errors.MessageSizeTooLargeError, kafka_errors.RecordListTooLargeError)
_FINAL = (
    kafka_errors.InvalidRecordError,
    kafka_errors.InvalidTimestampError,
    kafka_errors.PolicyViolationError,
)


def ensure_topics(bootstrap: str, sources: Sequence[Source]) -> None:
    """Create the topics that are absent and wait until every partition has a leader; blocks.

    Raises:
        BrokerUnavailable: the broker cannot be reached or is not ready; try again.
    """
    admin = None
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, bootstrap_timeout_ms=_CONNECT_MS)
        known = set(admin.list_topics())
        for source in sources:
            if source.topic not in known:
                _create(admin, source)
        admin.wait_for_topics([source.topic for source in sources])
    except (kafka_errors.KafkaError, OSError) as error:
        raise BrokerUnavailable(bootstrap, _text(error)) from None
    finally:
        if admin is not None:
            admin.close()


def topic_limits(bootstrap: str, topics: Collection[str]) -> dict[str, int]:
    """``max.message.bytes`` of each topic; blocks.

    Raises:
        BrokerUnavailable: the broker does not answer.
    """
    wanted = [ConfigResource(ConfigResourceType.TOPIC, topic, [_LIMIT]) for topic in topics]
    admin = None
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, bootstrap_timeout_ms=_CONNECT_MS)
        found = admin.describe_configs(wanted, config_filter="all")["topic"]
        return {topic: int(found[topic][_LIMIT]["value"]) for topic in topics}
    except (kafka_errors.KafkaError, OSError, KeyError) as error:
        raise BrokerUnavailable(bootstrap, _text(error)) from None
    finally:
        if admin is not None:
            admin.close()


def record_bytes(event: LoggedEvent) -> int:
    """About the size of a batch with this event alone; never less."""
    headers = sum(len(name) + len(value) + 10 for name, value in event.envelope.to_headers())
    return _BATCH_OVERHEAD + len(event.key) + len(event.payload) + headers


def _create(admin: KafkaAdminClient, source: Source) -> None:
    options = {
        "num_partitions": source.partitions,
        "replication_factor": 1,
        "configs": {"retention.ms": str(source.retention_ms)},
    }
    try:
        admin.create_topics({source.topic: options})
        logger.info("created topic %s with %d partitions", source.topic, source.partitions)
    except kafka_errors.TopicAlreadyExistsError:  # another node was faster
        logger.debug("topic %s is there already", source.topic)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
