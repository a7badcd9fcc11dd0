"""The newest event of each key, in a compacted topic beside the source's, for readers that are slow or come seldom.

One consumer group a pipeline copies ``TOPIC`` to ``TOPIC.latest``: key, payload and headers of each record, in order
within a key, without rejected events. Kafka's cleaner then drops records that a newer one of the same key replaces.
After a crash the last batch is copied again, which leaves the same newest value of each key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka import errors as kafka_errors
from kafka.structs import OffsetAndMetadata

from ingest.errors import BrokerUnavailable
from ingest.kafka import ensure_topics
from lakehouse.contract.envelope import REJECT
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.kafkasecurity import ClientSecurity
from lakehouse.contract.pipeline import Pipeline, Source

logger = logging.getLogger(__name__)

_POLL_MS = 200
_BATCH = 5_000
_BACKOFF_MAX_S = 5.0


class LatestMirror:
    """Copies until stopped. Blocks.

    Args:
        pipeline: its sources with ``latest_topic``.
        bootstrap: ``host:port`` of a broker.
        security: how to log in.

    Attributes:
        copied: records by source.

    Raises:
        ConfigError: no source has ``latest_topic``.
    """

    def __init__(self, pipeline: Pipeline, bootstrap: str, security: ClientSecurity) -> None:
        self._sources: Mapping[str, Source] = {s.topic: s for s in pipeline.sources.values() if s.latest_topic}
        if not self._sources:
            raise ConfigError("no source says latest_topic", key="latest_topic", remedy="Set latest_topic = true")
        self._group = f"millrace-latest-{pipeline.name or 'pipeline'}"
        self._common: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "metrics_enabled": False,
            **security.for_kafka_python(),
        }
        self._bootstrap = bootstrap
        self._security = security
        self.copied: dict[str, int] = {source.name: 0 for source in self._sources.values()}

    def run(self, stop: threading.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Copy until ``stop`` is set; waits for the broker while it is away."""
        pause = 0.2
        while not stop.is_set():
            try:
                ensure_topics(self._bootstrap, list(self._sources.values()), self._security)
                self._copy(stop, ready)
                pause = 0.2
            except (BrokerUnavailable, kafka_errors.KafkaError, OSError) as error:
                logger.warning("%s: %s; next attempt in %.1f s", type(error).__name__, error, pause)
                stop.wait(pause)
                pause = min(_BACKOFF_MAX_S, pause * 2)

    def _copy(self, stop: threading.Event, ready: Callable[[], None]) -> None:
        consumer = KafkaConsumer(
            group_id=self._group, enable_auto_commit=False, auto_offset_reset="earliest", **self._common
        )
        producer = KafkaProducer(
            acks="all", linger_ms=20, max_in_flight_requests_per_connection=1, allow_auto_create_topics=False,
            **self._common,
        )  # fmt: skip
        try:
            consumer.subscribe(sorted(self._sources))
            ready()
            while not stop.is_set():
                self._batch(consumer, producer)
        finally:
            producer.close(timeout=5)
            consumer.close(autocommit=False)

    def _batch(self, consumer: KafkaConsumer, producer: KafkaProducer) -> None:
        """1. Read.  2. Write, and wait until Kafka has everything.  3. Commit the offsets."""
        ends: dict[TopicPartition, int] = {}
        sent = []
        for place, records in consumer.poll(timeout_ms=_POLL_MS, max_records=_BATCH).items():
            source = self._sources[place.topic]
            for record in records:
                if record.key is not None and all(name != REJECT for name, _ in record.headers or ()):
                    sent.append(producer.send(source.latest, record.value, record.key, list(record.headers or ())))
                    self.copied[source.name] += 1
            ends[place] = records[-1].offset + 1
        if not ends:
            return
        producer.flush(timeout=30)
        deadline = time.monotonic() + 30
        for future in sent:
            future.get(timeout=max(0.0, deadline - time.monotonic()))
        consumer.commit({place: OffsetAndMetadata(end, "", -1) for place, end in ends.items()})
