"""Kafka: the publisher of events, and the topics. The errors of both client libraries are translated here.

confluent-kafka (librdkafka) publishes; kafka-python does everything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import KafkaException, Producer
from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from ingest.errors import BrokerUnavailable
from ingest.log.segments import LoggedEvent
from lakehouse.contract.envelope import EVENT_ID, FINGERPRINT, Envelope
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import PLAINTEXT, ClientSecurity, KafkaSettings

logger = logging.getLogger(__name__)
_client_logger = logging.getLogger(f"{__name__}.librdkafka")
_client_logger.addFilter(lambda record: not _expected(record.getMessage()))

CONNECT_MS = 5_000
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.2, 5.0
HELD_BACK = "held back behind an event that is sent again"
WARN, ALARM = "warn", "alarm"

_REQUEST_BYTES = 64 * 1024 * 1024  # above the broker's limit: what it refuses goes to the failed store
_BATCH_BYTES = 262_144  # of a producer; larger batches gain nothing measurable
_HEADER_BYTES = 8_192  # more than key and headers have
_BATCH_OVERHEAD = 100  # of a batch (61 bytes) and of its record
_POLL_S = 0.01  # while events are in flight
_IDLE_POLL_S = 1.0  # for the client's other messages
_FINAL = ("INVALID_RECORD", "INVALID_TIMESTAMP", "POLICY_VIOLATION")
_LIMIT = "max.message.bytes"
_DENIED = "a topic is absent or the user may not use it; an administrator runs: millrace kafka apply"


@dataclass(slots=True)
class SendOutcome:
    """What became of one event. Not frozen: freezing would triple the cost of making one.

    Attributes:
        partition, offset: its place in Kafka; -1 if it has none.
        error: why Kafka does not have it, or empty.
        final: Kafka will never take it; otherwise it may be sent again, and Kafka may have it already.
    """

    event: LoggedEvent
    partition: int
    offset: int
    error: str = ""
    final: bool = False


Deliver = Callable[[Sequence[SendOutcome]], None]


class KafkaPublisher:
    """Sends events to their topics in order, with ``acks=all`` and idempotence.

    The order within a key holds even if a batch fails: with ``enable.gapless.guarantee`` every failure that would leave
    a gap is fatal to the client. Nothing behind it is sent, all later events get an outcome that is not final, and a
    new client sends them again in order.

    No Python thread takes part, because librdkafka has its own: events are queued in the client on the event loop, and
    a timer there fetches all outcomes at once. Make a publisher on the event loop.

    Args:
        topics: topic by source; the caller may change it.
    """

    def __init__(self, settings: KafkaSettings, topics: Mapping[str, str]) -> None:
        self._bootstrap = settings.bootstrap
        self._settings = settings
        self._topics = topics
        self._limits: Mapping[str, int] = {}  # max.message.bytes by topic
        self._small_bytes = 0  # a payload of this size fits into every topic with any headers
        self._headers = Headers()
        self._loop = asyncio.get_running_loop()
        self._deliver: Deliver = lambda _: None
        self._outcomes: deque[SendOutcome] = deque()  # added on any thread
        self._woken = False
        self._producer: Any = None
        self._holding = False
        self._in_client = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[LoggedEvent] = []  # for a new client
        self._renewal: asyncio.Task[None] | None = None
        self._closed = False

    def start(self, deliver: Deliver) -> None:
        """Connect. Blocks. Raises BrokerUnavailable: no broker answers; ``start`` may be called again.

        Args:
            deliver: called on the event loop with every outcome, in batches.
        """
        self._deliver = deliver
        self._connect()
        self._loop.call_soon_threadsafe(self._tick)

    async def start_when_available(self, deliver: Deliver, sources: Sequence[Source]) -> None:
        """Create absent topics of these sources and start; retry with back-off until Kafka is available."""
        pause = BACKOFF_FIRST_S
        while True:
            try:
                await asyncio.to_thread(ensure_topics, self._bootstrap, sources, self._settings.security)
                await asyncio.to_thread(self.start, deliver)
                if pause > BACKOFF_FIRST_S:
                    logger.info("Kafka at %s is available", self._bootstrap)
                return
            except BrokerUnavailable as error:
                if pause == BACKOFF_FIRST_S:  # once, not at each attempt
                    logger.warning("%s; trying until it is", error)
                await asyncio.sleep(pause)
                pause = min(BACKOFF_MAX_S, pause * 2)

    def send(self, events: Sequence[LoggedEvent], *, afresh: bool = False) -> None:
        """Hand events over, on the event loop; returns at once.

        After an outcome that is not final, later events are held back with such an outcome too, which keeps the order
        when they are sent again.

        Args:
            events: in the order of the log.
            afresh: all earlier events have their outcomes; stop holding back.
        """
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
        """Flush for at most ``timeout_s`` and close. Blocks. Unacknowledged events stay in the log."""
        self._closed = True
        self._disconnect(timeout_s)

    # --- sending

    def _send(self, events: Sequence[LoggedEvent]) -> None:
        before = self._in_client
        topics, small, headers_of = self._topics, self._small_bytes, self._headers.of
        produce, delivered = getattr(self._producer, "produce", None), self._delivered
        for event in events:
            if self._holding or produce is None:
                self._fail(event, HELD_BACK)
                continue
            envelope, payload = event.envelope, event.payload
            topic = topics.get(envelope.source)
            if (topic is None or len(payload) > small) and (refusal := self._refusal(event, topic)):
                self._fail(event, refusal, final=True)
                continue
            try:
                # topic, value, key, partition (-1: by the key), callback, timestamp (0: now), headers
                produce(topic, payload, event.key, -1, partial(delivered, event), None, 0, headers_of(envelope))
                self._in_client += 1
            except Exception as error:  # noqa: BLE001 - KafkaException, BufferError: any error means sending again
                self._fail(event, str(error))
        if before == 0 and self._in_client:
            self._poll_in(_POLL_S)

    def _refusal(self, event: LoggedEvent, topic: str | None) -> str:
        """Why Kafka would never take the event, or empty."""
        if topic is None:
            return f"the pipeline has no source {event.envelope.source!r} any more"
        limit = self._limits.get(topic, _REQUEST_BYTES)
        if len(event.payload) + _HEADER_BYTES > limit:
            headers = sum(len(name) + len(value) + 10 for name, value in event.envelope.to_headers())
            size = _BATCH_OVERHEAD + len(event.key) + len(event.payload) + headers  # an upper bound
            if size > limit:
                return f"the record has about {size} bytes, more than the {limit} that its topic takes"
        return ""

    def _delivered(self, event: LoggedEvent, error: Any, message: Any) -> None:
        """librdkafka's report, from within poll, flush or purge."""
        self._in_client -= 1
        if error is None:
            self._outcomes.append(SendOutcome(event, message.partition(), message.offset()))
        else:
            self._fail(event, str(error), final=error.name() in _FINAL)

    def _fail(self, event: LoggedEvent, reason: str, *, final: bool = False) -> None:
        if not final:
            self._holding = True
        self._outcomes.append(SendOutcome(event, -1, -1, reason, final))
        if not self._woken:  # set before the wake-up and cleared before the drain, so none is left behind
            self._woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._woken = False
        if self._outcomes:
            self._deliver([self._outcomes.popleft() for _ in range(len(self._outcomes))])

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
            self._drain()

    # --- the client

    async def _renew(self) -> None:
        """Replace a failed client; until that succeeds every event must be sent again."""
        try:
            await asyncio.to_thread(self._connect)
            self._holding = False
        except BrokerUnavailable as error:
            logger.warning("%s", error)
        waiting, self._waiting = self._waiting, []
        self._renewal = None
        if not self._closed:
            self._send(waiting)
            self._tick()

    def _connect(self) -> None:
        self._disconnect(0)
        self._limits = topic_limits(self._bootstrap, set(self._topics.values()), self._settings.security)
        smallest = min(self._limits.values(), default=_REQUEST_BYTES)
        self._small_bytes = smallest - _HEADER_BYTES
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "enable.gapless.guarantee": True,
                "linger.ms": self._settings.linger_ms,
                "batch.size": min(_BATCH_BYTES, smallest),  # a larger batch fails with all its events
                "message.max.bytes": _REQUEST_BYTES,
                "message.timeout.ms": 0,  # unlimited
                "partitioner": "murmur2_random",  # the same partition for a key as with the Java clients
                "allow.auto.create.topics": False,
                "reconnect.backoff.max.ms": 1_000,
                **self._settings.security.for_librdkafka(),
            },
            logger=_client_logger,
            # Otherwise poll raises errors that belong to no event, such as a lost broker; it recovers by itself.
            error_cb=lambda error: logger.warning("the Kafka client: %s", error),
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


def _expected(text: str) -> bool:
    """Whether a message is harmless: "gapless" is called experimental, and a new broker is not ready at once."""
    return "CONFWARN" in text or ("GETPID" in text and text.endswith("retrying"))


# --- topics


@dataclass(frozen=True, slots=True)
class TopicRemark:
    """A difference between a topic and its declaration.

    Attributes:
        severity: ``warn``, or ``alarm`` if events would be lost or never taken.
    """

    topic: str
    severity: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"topic {self.topic}: {self.problem}. {self.remedy}"


def ensure_topics(bootstrap: str, sources: Sequence[Source], security: ClientSecurity = PLAINTEXT) -> list[TopicRemark]:
    """Create absent topics, wait until every partition has a leader, log and return differences from the declaration.

    Raises:
        BrokerUnavailable: the broker is unreachable or not ready, or topics are absent and cannot be created by this
            user; retry.
        EnvironmentProblem: a topic would lose events or never take any.
    """
    with _admin(bootstrap, security) as admin:
        known = set(admin.list_topics())
        for source in sources:
            for topic, options in _wanted(source):
                if topic not in known:
                    _create(admin, topic, options)
        admin.wait_for_topics([topic for source in sources for topic, _ in _wanted(source)])
        remarks = [remark for source in sources for remark in _compare(admin, source)]
    for remark in remarks:
        logger.log(logging.ERROR if remark.severity == ALARM else logging.WARNING, "%s", remark)
    alarm = next((remark for remark in remarks if remark.severity == ALARM), None)
    if alarm is not None:
        raise EnvironmentProblem(f"topic {alarm.topic}: {alarm.problem}", alarm.remedy)
    return remarks


def check_topics(bootstrap: str, sources: Sequence[Source], security: ClientSecurity = PLAINTEXT) -> list[TopicRemark]:
    """Compare topics with their declaration, without changing anything. Raises BrokerUnavailable."""
    with _admin(bootstrap, security) as admin:
        known = set(admin.list_topics())
        found: list[TopicRemark] = []
        for source in sources:
            absent = [topic for topic, _ in _wanted(source) if topic not in known]
            found += [TopicRemark(name, ALARM, "it is absent", "millrace kafka apply makes it") for name in absent]
            if source.topic in known:
                found += _compare(admin, source)
        return found


def topic_limits(bootstrap: str, topics: Collection[str], security: ClientSecurity = PLAINTEXT) -> dict[str, int]:
    """``max.message.bytes`` by topic. Raises BrokerUnavailable: the broker does not answer."""
    wanted = [ConfigResource(ConfigResourceType.TOPIC, topic, [_LIMIT]) for topic in topics]
    with _admin(bootstrap, security) as admin:
        found = admin.describe_configs(wanted, config_filter="all")["topic"]
        return {topic: int(found[topic][_LIMIT]["value"]) for topic in topics}


def judge(source: Source, partitions: int, replicas: int, configs: Mapping[str, str]) -> list[TopicRemark]:
    """Compare a topic with its source's declaration. More partitions than declared are accepted.

    Args:
        replicas: smallest number of replicas of a partition.
        configs: ``retention.ms``, ``cleanup.policy`` and ``min.insync.replicas`` of the topic.
    """
    found: list[tuple[str, str, str]] = []
    alter = f"kafka-configs.sh --alter --topic {source.topic} --add-config"
    if partitions < source.partitions:
        problem = f"it has {partitions} partitions, {source.partitions} are declared"
        remedy = "Add partitions (the order within a key breaks once), or declare fewer"
        found.append((WARN, problem, remedy))
    retention = int(configs["retention.ms"])
    if 0 <= retention < source.retention_ms:
        problem = f"it keeps events for {retention / 3.6e6:g} h, {source.retention} are declared"
        found.append((WARN, problem, f"{alter} retention.ms={source.retention_ms}"))
    if "compact" in configs["cleanup.policy"]:
        problem = "it is compacted, so that Kafka deletes events that bronze may not have taken"
        found.append((ALARM, problem, f"{alter} cleanup.policy=delete"))
    least = int(configs["min.insync.replicas"])
    if least > replicas:
        problem = f"min.insync.replicas is {least}, but it has {replicas} replicas: no event would ever be acknowledged"
        found.append((ALARM, problem, f"{alter} min.insync.replicas={source.min_isr}"))
    elif least < source.min_isr:
        problem = f"an event is acknowledged once {least} replicas have it, {source.min_isr} are declared"
        found.append((WARN, problem, f"{alter} min.insync.replicas={source.min_isr}"))
    if replicas < source.replicas:
        problem = f"it has {replicas} replicas, {source.replicas} are declared"
        found.append((WARN, problem, "kafka-reassign-partitions.sh adds replicas"))
    return [TopicRemark(source.topic, *item) for item in found]


def _wanted(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topics of a source with their creation options."""
    common = {"num_partitions": source.partitions, "replication_factor": source.replicas}
    least = {"min.insync.replicas": str(source.min_isr)}
    yield source.topic, {**common, "configs": {"retention.ms": str(source.retention_ms), **least}}
    if source.latest_topic:
        compacted = {"cleanup.policy": "compact", "min.compaction.lag.ms": "0", "segment.ms": "600000"}
        yield source.latest, {**common, "configs": compacted | least}


def _compare(admin: KafkaAdminClient, source: Source) -> list[TopicRemark]:
    names = ["retention.ms", "cleanup.policy", "min.insync.replicas"]
    resource = ConfigResource(ConfigResourceType.TOPIC, source.topic, names)
    configs = admin.describe_configs([resource], config_filter="all")["topic"][source.topic]
    partitions = admin.describe_topics([source.topic])[0]["partitions"]
    if not partitions:
        raise kafka_errors.UnknownTopicOrPartitionError(source.topic)
    replicas = min(len(partition["replica_nodes"]) for partition in partitions)
    return judge(source, len(partitions), replicas, {name: configs[name]["value"] for name in names})


def _create(admin: KafkaAdminClient, topic: str, options: dict[str, Any]) -> None:
    try:
        admin.create_topics({topic: options})
        logger.info("created topic %s with %d partitions", topic, options["num_partitions"])
    except kafka_errors.TopicAlreadyExistsError:  # another node was faster
        logger.debug("topic %s is there already", topic)


@contextmanager
def _admin(bootstrap: str, security: ClientSecurity) -> Iterator[KafkaAdminClient]:
    """An admin client; translates its errors."""
    admin = None
    options = security.for_kafka_python()
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap, bootstrap_timeout_ms=CONNECT_MS, **options)
        yield admin
    except (kafka_errors.TopicAuthorizationFailedError, kafka_errors.ClusterAuthorizationFailedError) as error:
        raise BrokerUnavailable(bootstrap, f"{error_text(error)}: {_DENIED}") from None
    except (kafka_errors.InvalidReplicationFactorError, kafka_errors.InvalidPartitionsError) as error:
        remedy = "Change replicas or partitions of the source, or add brokers"
        raise EnvironmentProblem(f"the broker refuses a topic: {error_text(error)}", remedy) from None
    except (kafka_errors.KafkaError, OSError, KeyError) as error:
        raise BrokerUnavailable(bootstrap, error_text(error)) from None
    finally:
        if admin is not None:
            admin.close()


@contextmanager
def broker_errors(bootstrap: str) -> Iterator[None]:
    """Translate the errors of kafka-python into :class:`BrokerUnavailable`."""
    try:
        yield
    except (kafka_errors.KafkaError, OSError) as error:
        raise BrokerUnavailable(bootstrap, error_text(error)) from None


def error_text(error: BaseException) -> str:
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}" if text else name
