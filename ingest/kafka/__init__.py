"""Kafka clients: the publisher interface, its two implementations, and topics."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence

from ingest.errors import BrokerUnavailable
from ingest.kafka.confluent import ConfluentPublisher
from ingest.kafka.kafka_python import KafkaPythonPublisher
from ingest.kafka.publisher import Publisher, SendOutcome, record_bytes
from ingest.kafka.topics import TopicRemark, check_topics, ensure_topics, topic_limits
from lakehouse.contract.kafkasecurity import ClientSecurity
from lakehouse.contract.pipeline import Source
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
    "start_publisher",
    "topic_limits",
]

logger = logging.getLogger(__name__)

_BACKOFF_MAX_S = 5.0


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


async def start_publisher(
    publisher: Publisher,
    deliver: Callable[[Sequence[SendOutcome]], None],
    bootstrap: str,
    sources: Sequence[Source],
    security: ClientSecurity,
) -> None:
    """Create absent topics and start the publisher; retry with back-off until Kafka is available."""
    pause = 0.2
    while True:
        try:
            await asyncio.to_thread(ensure_topics, bootstrap, sources, security)
            await asyncio.to_thread(publisher.start, deliver)
            return
        except BrokerUnavailable as error:
            logger.warning("%s; next attempt in %.1f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(_BACKOFF_MAX_S, pause * 2)
