"""Creates topics that are absent and compares the others with their declaration. Blocks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kafka import KafkaAdminClient
from kafka import errors as kafka_errors
from kafka.admin import ConfigResource, ConfigResourceType

from ingest.errors import BrokerUnavailable
from ingest.kafka.publisher import CONNECT_MS, error_text
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.pipeline import Source

logger = logging.getLogger(__name__)

WARN, ALARM = "warn", "alarm"
_LIMIT = "max.message.bytes"
_DENIED = "a topic is absent or the user may not use it; an administrator runs: millrace kafka apply"


@dataclass(frozen=True, slots=True)
class TopicRemark:
    """A difference between a topic and its declaration.

    Attributes:
        topic: its name.
        severity: ``warn``, or ``alarm`` if events would be lost or never taken.
        problem: the difference.
        remedy: what to do.
    """

    topic: str
    severity: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"topic {self.topic}: {self.problem}. {self.remedy}"


def ensure_topics(bootstrap: str, sources: Sequence[Source], security: ClientSecurity = PLAINTEXT) -> list[TopicRemark]:
    """Create absent topics, wait until every partition has a leader, and compare them with the declaration.

    Returns:
        The differences, which have been logged.

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
    for remark in remarks:
        if remark.severity == ALARM:
            raise EnvironmentProblem(f"topic {remark.topic}: {remark.problem}", remark.remedy)
    return remarks


def check_topics(bootstrap: str, sources: Sequence[Source], security: ClientSecurity = PLAINTEXT) -> list[TopicRemark]:
    """Compare topics with their declaration, without changing anything.

    Raises:
        BrokerUnavailable: the broker does not answer.
    """
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
    """``max.message.bytes`` by topic.

    Raises:
        BrokerUnavailable: the broker does not answer.
    """
    wanted = [ConfigResource(ConfigResourceType.TOPIC, topic, [_LIMIT]) for topic in topics]
    with _admin(bootstrap, security) as admin:
        found = admin.describe_configs(wanted, config_filter="all")["topic"]
        return {topic: int(found[topic][_LIMIT]["value"]) for topic in topics}


def judge(source: Source, partitions: int, replicas: int, configs: Mapping[str, str]) -> list[TopicRemark]:
    """Compare a topic with its source's declaration. More partitions than declared are accepted.

    Args:
        source: the declaration.
        partitions: of the topic.
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
