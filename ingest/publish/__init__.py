"""The way to Kafka: the seam, its two clients, and the topics."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from ingest.publish.confluent import ConfluentPublisher
from ingest.publish.kafka_python import KafkaPythonPublisher
from ingest.publish.seam import Outcome, Publisher, record_bytes
from ingest.publish.topics import TopicRemark, check_topics, ensure_topics, topic_limits
from lakehouse.contract.settings import KafkaSettings

__all__ = [
    "ConfluentPublisher",
    "KafkaPythonPublisher",
    "Outcome",
    "Publisher",
    "TopicRemark",
    "check_topics",
    "client_name",
    "ensure_topics",
    "make_publisher",
    "record_bytes",
    "topic_limits",
]


def client_name(settings: KafkaSettings) -> str:
    """The client that ``kafka.client`` stands for here: ``auto`` is confluent-kafka where it is installed."""
    if settings.client != "auto":
        return settings.client
    return "confluent-kafka" if importlib.util.find_spec("confluent_kafka") else "kafka-python"


def make_publisher(bootstrap: str, settings: KafkaSettings, topics: Mapping[str, str]) -> Publisher:
    """The publisher that the settings ask for; call it on the event loop.

    Args:
        bootstrap: ``host:port`` of a broker.
        settings: client, linger and batch size.
        topics: topic of each source.
    """
    kind = ConfluentPublisher if client_name(settings) == "confluent-kafka" else KafkaPythonPublisher
    return kind(bootstrap, settings, topics)
