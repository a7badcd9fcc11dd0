"""A compacted topic as reference data: its newest value by key, read from the start and followed."""

from __future__ import annotations

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors

from ingest.errors import BrokerUnavailable
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity

_POLL_MS = 500
_MOST = 5_000


class TopicReader:
    """Reads every partition of a topic from its start, in no consumer group. Blocks: use it from a thread.

    Args:
        bootstrap: ``host:port`` of a broker.
        topic: to read.
        security: how to log in.

    Attributes:
        complete: it has read what was there when it connected.
    """

    def __init__(self, bootstrap: str, topic: str, security: ClientSecurity = PLAINTEXT) -> None:
        self._security = security
        self._bootstrap = bootstrap
        self._topic = topic
        self._consumer: KafkaConsumer | None = None
        self._ends: dict[int, int] = {}
        self._behind: dict[TopicPartition, int] = {}  # the ends that it has not reached yet
        self.complete = False

    @property
    def version(self) -> str:
        """How far it has read: ``TOPIC@OFFSETS``, the next offset of each partition."""
        return f"{self._topic}@{','.join(str(self._ends[number]) for number in sorted(self._ends))}"

    def poll(self) -> list[tuple[str, bytes | None]]:
        """Keys with their new values (None: removed), oldest first; none after half a second without any.

        Raises:
            BrokerUnavailable: the broker does not answer, or has no such topic.
        """
        try:
            consumer = self._consumer or self._connect()
            found = []
            for records in consumer.poll(timeout_ms=_POLL_MS, max_records=_MOST).values():
                for record in records:
                    self._ends[record.partition] = record.offset + 1
                    if record.key is not None:
                        found.append((record.key.decode("utf-8", "replace"), record.value))
            for place in [place for place, end in self._behind.items() if _at(consumer, place) >= end]:
                del self._behind[place]
            self.complete = not self._behind
            return found
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Let go of the broker."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _connect(self) -> KafkaConsumer:
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap,
            enable_auto_commit=False,
            metrics_enabled=False,
            **self._security.for_kafka_python(),
        )
        self._consumer = consumer
        numbers = consumer.partitions_for_topic(self._topic)
        if not numbers:
            raise BrokerUnavailable(self._bootstrap, f"there is no topic {self._topic}")
        places = [TopicPartition(self._topic, number) for number in sorted(numbers)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        self._ends = dict.fromkeys(sorted(numbers), 0)
        self._behind = dict(consumer.end_offsets(places))
        return consumer


def _at(consumer: KafkaConsumer, place: TopicPartition) -> int:
    """Offset of the next record, also where the last one before it is no record of ours (a transaction's mark)."""
    position = consumer.position(place, timeout_ms=_POLL_MS)
    return -1 if position is None else int(position)
