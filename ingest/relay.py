"""Processes that read topics in a consumer group and write others: ``millrace collect``
in the roles ``refine`` and ``latest``.

Any number of processes share the partitions. A process handles one batch at a time:

1. Read records.
2. Turn each into an event.
3. Send the batch; wait until Kafka has all of it.
4. Commit the offsets.

A crash between steps 3 and 4 repeats the batch under the same event ids, so bronze's readers count it once. A
transaction would commit both at once, but its markers take offsets in the written topic, with which bronze's readers
count, and it would delay events by its duration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.structs import OffsetAndMetadata

from ingest.border.admission import KEPT_BYTES, RAW_ID, RAW_PLACE, Border, front_source, tell_refused
from ingest.enrich import Enricher
from ingest.errors import BrokerUnavailable
from ingest.kafka import BACKOFF_FIRST_S, BACKOFF_MAX_S, KafkaPublisher, SendOutcome, broker_errors
from ingest.log.segments import NOWHERE, LoggedEvent, SourceLane
from lakehouse.contract.envelope import HEADER_NAMES, WEIGHT, Envelope, EnvelopeError, fingerprint
from lakehouse.contract.errors import ConfigError, crash_point
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import KafkaSettings, Settings

logger = logging.getLogger(__name__)

STOP_S = 10.0  # for the current batch
BATCH = 5_000
REFINED_BY = "refined_by"  # an extra header
_POLL_MS = 200
_ANSWER_MS = 5_000  # a broker that takes longer is considered away
_METADATA_MS = 10_000  # after this long, new partitions and topics are assigned
_SESSION_MS = 6_000  # after this long, a dead member's partitions are assigned to others

Outgoing = tuple[Envelope, bytes, bytes]
"""Envelope, key and payload."""


class TopicRelay:
    """Relays the topics of some sources; subclasses define :meth:`_convert`.

    Args:
        read: source by topic that is read.
        written: topic that is written by source.
        sources: their topics are created if absent.
        enrichers: their references are followed, and read to their end before the first record.

    Attributes:
        counts: by source, ``read`` and ``sent_again``, and what subclasses count.
    """

    def __init__(
        self,
        settings: Settings,
        group: str,
        read: Mapping[str, str],
        written: Mapping[str, str],
        sources: Sequence[Source],
        enrichers: Sequence[Enricher] = (),
    ) -> None:
        self._kafka = settings.kafka
        self._group = group
        self._read = read
        self._wanted = sources
        self._enrichers = enrichers
        self._publisher = KafkaPublisher(settings.kafka, written)
        self._outcomes: dict[int, SendOutcome] = {}
        self._arrived = asyncio.Event()
        self._seq = 0
        self._lanes = {name: SourceLane(n, name, name) for n, name in enumerate(written)}
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in written}

    def _convert(self, source: str, record: Any, suspect: bool) -> Outgoing | None:
        """The event of a record from kafka-python, or None; ``suspect``: the written topic may have it already."""
        raise NotImplementedError

    async def _begin(self, following: list[asyncio.Task[None]]) -> None:
        await self._publisher.start_when_available(self._deliver, self._wanted)
        following += [asyncio.create_task(enricher.run()) for enricher in self._enrichers]
        for enricher in self._enrichers:
            await enricher.complete()

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Relay until ``stop`` is set; the current batch then has :data:`STOP_S` to finish.

        A batch that Kafka does not take in that time is read again at the next start.
        """
        following: list[asyncio.Task[None]] = []
        try:
            if not await _until(stop, self._begin(following), 0):
                return
            ready()
            if not await _until(stop, self._batches(stop), STOP_S):
                logger.warning("Kafka did not take the last batch in %.0f s; the topic keeps it", STOP_S)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await asyncio.to_thread(self._publisher.close, 1.0)

    async def _batches(self, stop: asyncio.Event) -> None:
        pause = BACKOFF_FIRST_S
        while not stop.is_set():
            reader = GroupReader(self._kafka, self._group, self._read)
            try:
                while not stop.is_set():
                    batch = await asyncio.to_thread(reader.poll)
                    if batch:
                        await self._send(batch)
                        crash_point("refine.before_commit")
                        await asyncio.to_thread(reader.commit)
                        pause = BACKOFF_FIRST_S
            except BrokerUnavailable as error:
                if pause == BACKOFF_FIRST_S:  # once, not at each attempt
                    logger.warning("%s; trying until it is", error)
                await asyncio.sleep(pause)
                pause = min(BACKOFF_MAX_S, pause * 2)
            finally:
                await asyncio.to_thread(reader.close)

    async def _send(self, batch: Sequence[tuple[str, Any, bool]]) -> None:
        """Send a batch and wait until Kafka has all of it, in the order of each partition."""
        events: list[LoggedEvent] = []
        for name, record, suspect in batch:
            self.counts[name]["read"] += 1
            if (found := self._convert(name, record, suspect)) is not None:
                self._seq += 1
                events.append(LoggedEvent(self._seq, self._lanes[name], *found, NOWHERE, 0, None))
        attempt = 0
        while events:
            self._outcomes.clear()
            self._publisher.send(events, afresh=attempt > 0)
            while len(self._outcomes) < len(events):
                self._arrived.clear()
                await self._arrived.wait()
            events = [again for event in events if (again := self._again(self._outcomes[event.seq])) is not None]
            if events:
                attempt += 1
                await asyncio.sleep(min(BACKOFF_MAX_S, 0.05 * 2 ** min(attempt, 10)))

    def _again(self, outcome: SendOutcome) -> LoggedEvent | None:
        """The event to send again, or None if Kafka has it."""
        event = outcome.event
        if not outcome.error:
            return None
        self.counts[event.envelope.source]["sent_again"] += 1
        if outcome.final:  # e.g. too large with its headers: its beginning is kept as rejected
            payload = event.payload = event.payload[:KEPT_BYTES]
            event.envelope = dataclasses.replace(
                event.envelope, reject=outcome.error, fingerprint=fingerprint(payload), extra=event.envelope.extra[:4]
            )
            tell_refused(event.envelope, "is not taken by Kafka")
        else:
            event.envelope = dataclasses.replace(event.envelope, suspect=True)
        return event

    def _deliver(self, outcomes: Sequence[SendOutcome]) -> None:
        for outcome in outcomes:
            self._outcomes[outcome.event.seq] = outcome
        self._arrived.set()


class RefineNode(TopicRelay):
    """The second step of a two-step collection: ``TOPIC.raw`` → border, enrichment → the source's topic.

    ``counts`` has ``refined`` and ``rejected`` too.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, *, node: str) -> None:
        sources = pipeline.sources
        raw = {name: front_source(source) for name, source in sources.items()}
        enrichers = {
            name: Enricher(source, pipeline.path.parent, settings.kafka)
            for name, source in sources.items()
            if source.enrich
        }
        super().__init__(
            settings,
            f"millrace-refine-{pipeline.name or 'pipeline'}",
            {source.topic: name for name, source in raw.items()},
            {name: source.topic for name, source in sources.items()},
            [*sources.values(), *raw.values()],
            list(enrichers.values()),
        )
        self._refiners: dict[str, Refiner] = {}
        for name, source in sources.items():
            border = Border(source, tenant=settings.tenant, collector=node, file=pipeline.path)
            self._refiners[name] = Refiner(border, enrichers.get(name))

    def _convert(self, source: str, record: Any, suspect: bool) -> Outgoing:
        found = self._refiners[source].refine(record, suspect=suspect)
        if found[0].reject is not None:
            tell_refused(found[0])
        self.counts[source]["refined" if found[0].reject is None else "rejected"] += 1
        return found


class Refiner:
    """Refines raw records of one source, without I/O.

    What the front decided (id, time, node, tenant) stays. A refused event continues too, with its reason.

    Args:
        border: of the source; its node is this process.
    """

    def __init__(self, border: Border, enricher: Enricher | None = None) -> None:
        self._border = border
        self._enricher = enricher

    def refine(self, record: Any, *, suspect: bool) -> Outgoing:
        """The event of a record of the raw topic; see :meth:`TopicRelay._convert`."""
        source = self._border.source
        front = _front(record)
        origin = front.event_id if front is not None else f"@{_place(record)}"
        event = self._border.admit(
            record.value or b"",
            suspect=suspect,
            origin=origin,
            tenant=front.tenant if front is not None else "",
            fallback_id=origin if source.event_id_template is None else None,
        )
        envelope = event.envelope
        extra = dict(_extra(record)) | {RAW_ID: origin, RAW_PLACE: _place(record), REFINED_BY: envelope.collector}
        if front is not None:
            envelope = dataclasses.replace(
                envelope,
                received_at=front.received_at,
                collector=front.collector,
                suspect=suspect or front.suspect,
                reject=front.reject or envelope.reject,
            )
        if self._enricher is not None and envelope.reject is None:
            extra |= dict(self._enricher(event))
        return dataclasses.replace(envelope, extra=tuple(extra.items())), event.key, event.payload


class LatestMirror(TopicRelay):
    """Keeps the newest event of each key in ``TOPIC.latest``, for readers that are slow or come seldom.

    Key, payload and headers of each record are copied, in order within a key, without rejected events. Kafka's cleaner
    drops records that a newer one of the same key replaces. A repeated batch leaves the same newest value of each key.

    Raises:
        ConfigError: no source has ``latest_topic``.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline) -> None:
        sources = [source for source in pipeline.sources.values() if source.latest_topic]
        if not sources:
            raise ConfigError("no source says latest_topic", key="latest_topic", remedy="Set latest_topic = true")
        super().__init__(
            settings,
            f"millrace-latest-{pipeline.name or 'pipeline'}",
            {source.topic: source.name for source in sources},
            {source.name: source.latest for source in sources},
            sources,
        )
        self._tenant = settings.tenant

    def _convert(self, source: str, record: Any, suspect: bool) -> Outgoing | None:
        envelope = _front(record)
        if record.key is None or (envelope is not None and envelope.reject is not None):
            return None
        value = record.value or b""
        if envelope is None:
            received_at = record.timestamp * 1000
            envelope = Envelope(f"@{_place(record)}", source, self._tenant, received_at, "", fingerprint(value))
        self.counts[source]["copied"] += 1
        return dataclasses.replace(envelope, source=source, extra=_extra(record)), record.key, value


def _place(record: Any) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def _front(record: Any) -> Envelope | None:
    """The envelope of a record; None if another application wrote it."""
    try:
        return Envelope.from_headers(record.headers or ())
    except EnvelopeError:
        return None


def _extra(record: Any) -> tuple[tuple[str, str], ...]:
    """Extra headers: those that :meth:`Envelope.from_headers` leaves out."""
    own = set(HEADER_NAMES) - {WEIGHT}
    return tuple((name, value.decode("utf-8", "replace")) for name, value in record.headers or () if name not in own)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None], grace_s: float) -> bool:
    """Run the work to its end, or until ``grace_s`` after ``stop``; returns whether it ended."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((task,), timeout=grace_s)
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
    if not task.cancelled():
        task.result()  # raises its exception, if any
    return not task.cancelled()


class GroupReader:
    """Topics, read as one member of a consumer group. Blocks. Every method raises :class:`BrokerUnavailable`.

    Args:
        sources: name by topic.
    """

    def __init__(self, kafka: KafkaSettings, group: str, sources: Mapping[str, str]) -> None:
        self._kafka = kafka
        self._group = group
        self._sources = sources
        self._consumer: KafkaConsumer | None = None
        self._next: dict[TopicPartition, int] = {}
        self._suspect_before: dict[TopicPartition, int] = {}

    def poll(self) -> list[tuple[str, Any, bool]]:
        """Records with the names of their sources, and whether each may have been relayed before."""
        found: list[tuple[str, Any, bool]] = []
        with broker_errors(self._kafka.bootstrap):
            consumer = self._consumer or self._connect()
            for place, records in consumer.poll(timeout_ms=_POLL_MS, max_records=BATCH).items():
                before = self._suspect_before.setdefault(place, records[0].offset + BATCH)
                name = self._sources[place.topic]
                found += [(name, record, record.offset < before) for record in records]
                self._next[place] = records[-1].offset + 1
        return found

    def commit(self) -> None:
        """Commit everything that was polled."""
        assert self._consumer is not None
        offsets = {place: OffsetAndMetadata(offset, "", -1) for place, offset in self._next.items()}
        self._next = {}
        with broker_errors(self._kafka.bootstrap):
            try:
                self._consumer.commit(offsets, timeout_ms=_ANSWER_MS)
            except kafka_errors.CommitFailedError:  # other members now own these partitions and repeat the batch
                logger.info("the group was rebalanced meanwhile; the batch counts once by its ids")

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False, timeout_ms=_ANSWER_MS)
            self._consumer = None

    def _connect(self) -> KafkaConsumer:
        consumer = self._consumer = KafkaConsumer(
            bootstrap_servers=self._kafka.bootstrap,
            group_id=self._group,
            session_timeout_ms=_SESSION_MS,
            heartbeat_interval_ms=_SESSION_MS // 4,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            metadata_max_age_ms=_METADATA_MS,
            bootstrap_timeout_ms=_ANSWER_MS,
            metrics_enabled=False,
            **self._kafka.security.for_kafka_python(),
        )
        for topic in self._sources:  # otherwise the leader may assign nothing until its metadata is renewed
            consumer.partitions_for_topic(topic)
        consumer.subscribe(sorted(self._sources), listener=_Rebalanced(consumer, self._suspect_before))
        return consumer


class _Rebalanced(ConsumerRebalanceListener):  # type: ignore[misc]
    """Marks newly assigned partitions: another member may have relayed up to one batch of them."""

    def __init__(self, consumer: KafkaConsumer, suspect_before: dict[TopicPartition, int]) -> None:
        self._consumer = consumer
        self._suspect_before = suspect_before

    def on_partitions_revoked(self, revoked: Any) -> None:
        # kafka-python 3.0.12 joins again after a change of metadata, but forgets that it does so once the leader has
        # assigned partitions: if a poll ends at this moment, no later one completes the join.
        self._consumer._coordinator.request_rejoin()

    def on_partitions_assigned(self, assigned: Any) -> None:
        for place in assigned:
            self._suspect_before.pop(place, None)
