"""What of a topic bronze has not taken, asked of the broker."""

from __future__ import annotations

import base64
import logging
import socket
import time
import uuid

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import KafkaError

from lakehouse.bronze.table import Progress
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.pipeline import Source
from lakehouse.contract.settings import KafkaSettings
from lakehouse.maintain.backlog import Ask, Backlog

log = logging.getLogger(__name__)

_WAIT_MS = 3_000


def asking(kafka: KafkaSettings) -> Ask:
    """Asks the broker anew each time: one that did not answer may do so later."""
    return lambda source, done: Topics(kafka.bootstrap, kafka.security).backlog(source, done)


class Topics:
    """Looks at topics of one broker; says None of everything once it did not answer."""

    def __init__(self, bootstrap: str, security: ClientSecurity = PLAINTEXT) -> None:
        self._security = security
        self._bootstrap = bootstrap
        self._gone = not bootstrap

    def backlog(self, source: Source, done: Progress) -> Backlog | None:
        """What bronze, being so far, has not taken; None where the broker or the topic is not there."""
        if self._gone or not self._answers():
            return None
        try:
            consumer = KafkaConsumer(
                bootstrap_servers=self._bootstrap,
                metrics_enabled=False,
                bootstrap_timeout_ms=_WAIT_MS,
                enable_auto_commit=False,
                group_id=None,
                **self._security.for_kafka_python(),
            )
        except (KafkaError, ValueError):
            self._gone = True
            return None
        try:
            return self._look(consumer, source, done)
        except KafkaError:
            return None
        finally:
            consumer.close()

    def _answers(self) -> bool:
        """Whether somebody listens there; the client takes long, and leaks sockets, where nobody does."""
        for address in self._bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=_WAIT_MS / 1000).close()
            except (OSError, ValueError):
                continue
            return True
        self._gone = True
        return False

    def _look(self, consumer: KafkaConsumer, source: Source, done: Progress) -> Backlog | None:
        partitions = [TopicPartition(source.topic, n) for n in consumer.partitions_for_topic(source.topic) or ()]
        if not partitions:
            return None
        starts, ends = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
        topic_id, retention_s = self._described(source)
        taken_of = {p: done.offsets.get(f"{p.topic}/{p.partition}", 0) for p in partitions}
        known = done.topics.get(source.topic)
        anew = bool(known and topic_id and known != topic_id) or any(ends[p] < taken_of[p] for p in partitions)
        waiting, lost = [], 0
        for partition in partitions:
            taken = 0 if anew else taken_of[partition]
            if taken:
                lost += max(0, starts[partition] - taken)
            if ends[partition] > max(taken, starts[partition]):
                waiting.append((partition, max(taken, starts[partition])))
        oldest = self._oldest(consumer, waiting)
        records = sum(ends[partition] - start for partition, start in waiting)
        age = max(0.0, time.time() - oldest / 1000) if oldest else 0.0
        return Backlog(records, age, lost, retention_s, anew)

    @staticmethod
    def _oldest(consumer: KafkaConsumer, waiting: list[tuple[TopicPartition, int]]) -> int | None:
        """Broker time of the oldest waiting record, milliseconds since the epoch."""
        found: dict[TopicPartition, int] = {}
        if waiting:
            consumer.assign([partition for partition, _ in waiting])
            for partition, start in waiting:
                consumer.seek(partition, start)
            deadline = time.monotonic() + _WAIT_MS / 1000
            while len(found) < len(waiting) and time.monotonic() < deadline:
                for partition, records in consumer.poll(timeout_ms=500, max_records=len(waiting)).items():
                    if records:
                        found.setdefault(partition, records[0].timestamp)
                        consumer.pause(partition)
        return min(found.values(), default=None)

    def _described(self, source: Source) -> tuple[str, float]:
        """The topic's id, empty where the broker does not tell, and for how many seconds it keeps records."""
        admin = KafkaAdminClient(
            bootstrap_servers=self._bootstrap, bootstrap_timeout_ms=_WAIT_MS, **self._security.for_kafka_python()
        )
        topic_id, retention_s = "", source.retention_ms / 1000
        try:
            # As Kafka's own tools write it.
            number = uuid.UUID(str(admin.describe_topics([source.topic])[0]["topic_id"]))
            topic_id = base64.urlsafe_b64encode(number.bytes).decode().rstrip("=")
            found = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, source.topic)])
            retention_s = int(found["topic"][source.topic]["retention.ms"]["value"]) / 1000
        except (KafkaError, ValueError, KeyError, TypeError, IndexError):
            log.debug("the broker does not describe %s", source.topic, exc_info=True)
        finally:
            admin.close()
        return topic_id, retention_s
