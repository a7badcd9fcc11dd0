"""The raw topics of a two-step collection, read by the second step: one member of its consumer group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.structs import OffsetAndMetadata

from ingest.errors import BrokerUnavailable
from ingest.front import raw_topic
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.pipeline import Source

logger = logging.getLogger(__name__)

BATCH = 5_000
_POLL_MS = 200
_ANSWER_MS = 5_000  # the broker answers in that time, or counts as away
_METADATA_MS = 10_000  # new partitions, and topics that were not known yet, are shared out after so long
_SESSION_MS = 6_000  # a member that is dead for so long leaves its partitions to the others


class RawReader:
    """The raw topics as one member of the consumer group. Blocks: use it from a thread.

    Args:
        bootstrap: ``host:port`` of a broker.
        sources: by name, as declared.
        group: consumer group that shares them.
        security: how to log in.
    """

    def __init__(
        self, bootstrap: str, sources: Mapping[str, Source], group: str, security: ClientSecurity = PLAINTEXT
    ) -> None:
        self._security = security
        self._bootstrap = bootstrap
        self._group = group
        self._names = {raw_topic(source): name for name, source in sources.items()}
        self._consumer: KafkaConsumer | None = None
        self._next: dict[TopicPartition, int] = {}
        self._suspect_before: dict[TopicPartition, int] = {}

    def poll(self) -> list[tuple[str, Any, bool]]:
        """Records with the names of their sources, and whether each may have been refined before.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        try:
            consumer = self._consumer or self._connect()
            found: list[tuple[str, Any, bool]] = []
            for place, records in consumer.poll(timeout_ms=_POLL_MS, max_records=BATCH).items():
                before = self._suspect_before.setdefault(place, records[0].offset + BATCH)
                name = self._names[place.topic]
                found += [(name, record, record.offset < before) for record in records]
                self._next[place] = records[-1].offset + 1
            return found
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def commit(self) -> None:
        """Everything that was polled has been refined.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        assert self._consumer is not None
        offsets = {place: OffsetAndMetadata(offset, "", -1) for place, offset in self._next.items()}
        self._next = {}
        try:
            self._consumer.commit(offsets, timeout_ms=_ANSWER_MS)
        except kafka_errors.CommitFailedError:  # others have these partitions by now, and refine the batch again
            logger.info("the group was rebalanced meanwhile; the batch counts once by its ids")
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=_ANSWER_MS)
            self._consumer = None

    def _connect(self) -> KafkaConsumer:
        consumer = self._consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=self._group,
            session_timeout_ms=_SESSION_MS,
            heartbeat_interval_ms=_SESSION_MS // 4,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            metadata_max_age_ms=_METADATA_MS,
            bootstrap_timeout_ms=_ANSWER_MS,
            metrics_enabled=False,
            **self._security.for_kafka_python(),
        )
        for topic in self._names:  # else the group's leader may share out nothing until its metadata is renewed
            consumer.partitions_for_topic(topic)
        consumer.subscribe(sorted(self._names), listener=_Assigned(self._suspect_before))
        return consumer


class _Assigned(ConsumerRebalanceListener):  # type: ignore[misc]
    """Whatever is assigned anew may have been refined by another, as far as a batch goes."""

    def __init__(self, suspect_before: dict[TopicPartition, int]) -> None:
        self._suspect_before = suspect_before

    def on_partitions_revoked(self, revoked: Any) -> None:
        pass

    def on_partitions_assigned(self, assigned: Any) -> None:
        for place in assigned:
            self._suspect_before.pop(place, None)
