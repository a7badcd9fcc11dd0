"""Kafka clients: the publisher interface, its two implementations, and topics."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from ingest.kafka.confluent import ConfluentPublisher
from ingest.kafka.kafka_python import KafkaPythonPublisher
from ingest.kafka.publisher import Publisher, SendOutcome, record_bytes
from ingest.kafka.topics import TopicRemark, check_topics, ensure_topics, topic_limits
from lakehouse.contract.settings import KafkaSettings

__all__ = [
    "ConfluentPublisher",
    "KafkaPythonPublisher",
    "Publisher",
    "SendOutcome",
    "TopicRemark",
    "check_topics",
    "client_name",
    "ensure_topics",
    "make_publisher",
    "record_bytes",
    "topic_limits",
]


def client_name(settings: KafkaSettings) -> str:
    """The client that ``kafka.client`` selects: ``auto`` is confluent-kafka if installed."""
    if settings.client != "auto":
        return settings.client
    return "confluent-kafka" if importlib.util.find_spec("confluent_kafka") else "kafka-python"


def make_publisher(bootstrap: str, settings: KafkaSettings, topics: Mapping[str, str]) -> Publisher:
    """The publisher that the settings select; call it on the event loop.

    Args:
        bootstrap: ``host:port`` of a broker.
        settings: client, linger and batch size.
        topics: topic by source.
    """
    kind = ConfluentPublisher if client_name(settings) == "confluent-kafka" else KafkaPythonPublisher
    return kind(bootstrap, settings, topics)
