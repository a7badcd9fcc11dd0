"""The broker that a process uses: the lake's own or another, its topics, and what bronze has not taken of them."""

from __future__ import annotations

import base64
import dataclasses
import logging
import socket
import time
import uuid
from collections.abc import Iterable

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.admin import ACL, ConfigResource, ConfigResourceType
from kafka.errors import KafkaError

from ingest import kafka as publish
from ingest.border.admission import front_source
from ingest.broker import EmbeddedBroker, access_rules
from ingest.errors import BrokerUnavailable
from ingest.kafka import TopicRemark
from lakehouse.bronze.table import Progress
from lakehouse.contract.errors import EnvironmentProblem, MillraceError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import PLAINTEXT, ClientSecurity, KafkaSettings, Settings
from lakehouse.maintain.report import Ask, Backlog

log = logging.getLogger(__name__)

_WAIT_MS = 3_000


def embedded(settings: Settings, *, port: int = 0, die_with_parent: bool = False) -> EmbeddedBroker:
    """The lake's own broker, whether it runs or not; ``port`` of its next start, 0: the one it had."""
    folder = Lake.of(settings).broker()
    return EmbeddedBroker(folder, port=port, die_with_parent=die_with_parent, secure=settings.kafka.secure)


def resolve_kafka(settings: Settings, user: str) -> Settings:
    """The settings with the broker's address and with how this process logs in there.

    Args:
        user: which of the embedded broker's users it is (:data:`ingest.broker.USERS`); of a broker elsewhere
            the settings name the user.

    Raises:
        EnvironmentProblem: there is no broker.
        ConfigError: the settings of security do not fit together, or the password cannot be read.
    """
    bootstrap = resolve_bootstrap(settings)
    kafka = dataclasses.replace(settings.kafka, bootstrap=bootstrap)
    own = embedded(settings)
    if kafka.secure and own.exists() and bootstrap == own.bootstrap:
        kafka = kafka.secured_by(own.security(user))
    kafka.security.for_kafka_python()  # what is wrong is said now
    return dataclasses.replace(settings, kafka=kafka)


def apply_topics(settings: Settings, pipeline: Pipeline, *, timeout_s: float = 60.0) -> list[TopicRemark]:
    """Make the pipeline's topics as the broker's administrator and, where it is the secure embedded one, grant them.

    Raises EnvironmentProblem: the broker does not answer, refuses, or a topic would lose events.
    """
    found = resolve_kafka(settings, "admin").kafka
    fronts = [front_source(source) for source in pipeline.sources.values()]
    declared = list(pipeline.sources.values())
    if found.user != "admin" or settings.kafka.user:  # a broker elsewhere, or one that asks nobody
        return ensure_topics(declared, found.bootstrap, security=found.security, timeout_s=timeout_s)
    remarks = ensure_topics(declared + fronts, found.bootstrap, security=found.security, timeout_s=timeout_s)
    grant(found, access_rules(pipeline))
    return remarks


def grant(kafka: KafkaSettings, rules: list[ACL]) -> None:
    """Add access rules, as the broker's administrator. Raises EnvironmentProblem: it does not answer, or refuses."""
    try:
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap, **kafka.security.for_kafka_python())
    except (KafkaError, OSError) as error:
        raise EnvironmentProblem(f"{kafka.bootstrap}: {error}", "Is it running? millrace kafka status") from None
    try:
        failed = admin.create_acls(rules)["failed"]
    except KafkaError as error:
        raise EnvironmentProblem(f"the broker does not take access rules: {error}") from None
    finally:
        admin.close()
    if failed:
        raise EnvironmentProblem(f"the broker does not take ACLs: {failed[0]}")


def resolve_bootstrap(settings: Settings) -> str:
    """``host:port`` of the broker that the settings name, else of the lake's embedded one.

    Raises EnvironmentProblem: neither is there.
    """
    if settings.kafka.bootstrap:
        return settings.kafka.bootstrap
    try:
        return embedded(settings).bootstrap
    except EnvironmentProblem as error:
        raise EnvironmentProblem(
            str(error.problem), f"Run: millrace kafka start --lake {settings.lake}; or set MILLRACE_KAFKA=host:port"
        ) from None


def ensure_topics(
    sources: Iterable[Source], bootstrap: str, *, security: ClientSecurity = PLAINTEXT, timeout_s: float = 60.0
) -> list[TopicRemark]:
    """Create the sources' topics where they are absent, waiting for the broker.

    Raises EnvironmentProblem: the broker did not answer in time, or a topic would lose events.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return publish.ensure_topics(bootstrap, list(sources), security)
        except BrokerUnavailable as error:
            if time.monotonic() > deadline:
                raise EnvironmentProblem(str(error), "Is it running? millrace kafka status") from None
            time.sleep(0.5)


def asking(kafka: KafkaSettings) -> Ask:
    """Asks the broker anew each time: one that did not answer may do so later."""
    return lambda source, done: Topics(kafka.bootstrap, kafka.security).backlog(source, done)


class Topics:
    """Looks at topics of one broker; says None of everything once it did not answer."""

    def __init__(self, bootstrap: str, security: ClientSecurity = PLAINTEXT) -> None:
        self._security = security
        self._bootstrap = bootstrap
        self._gone = not bootstrap

    @classmethod
    def of(cls, settings: Settings) -> Topics:
        """Those of the broker that a reader of the lake would use, if there is one."""
        try:
            kafka = resolve_kafka(settings, "lakehouse").kafka
        except MillraceError:
            return cls("")
        return cls(kafka.bootstrap, kafka.security)

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
                socket.create_connection((host.strip("[]"), int(port)), timeout=_WAIT_MS / 1000).close()
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
