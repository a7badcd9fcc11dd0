"""The second step of a two-step collection: ``TOPIC.raw`` → border, enrichment → the source's topic.

Each pipeline has one consumer group, so any number of these processes share the partitions. A process handles one batch
at a time:

1. Read records that a front node wrote.
2. Judge each (:class:`~ingest.border.admission.Border`). Keep what the front decided (id, time, node, tenant). Add
   reference data and the place in the raw topic to the headers. A refused event continues too, with its reason.
3. Send the batch; wait until Kafka has all of it.
4. Commit the offsets of the raw topic.

A crash between steps 3 and 4 repeats the batch under the same event ids, so bronze's readers count it once. A
transaction would commit both at once, but its markers take offsets in the source's topic, with which bronze's readers
count, and it would delay events by its duration.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.structs import OffsetAndMetadata

from ingest.border.admission import KEPT_BYTES, RAW_PLACE, Border, front_source, raw_topic
from ingest.enrich import Enricher
from ingest.errors import BrokerUnavailable
from ingest.kafka import SendOutcome, make_publisher, start_publisher
from ingest.log.events import LoggedEvent, LogSegment, SourceLane
from lakehouse.contract.envelope import HEADER_NAMES, Envelope, EnvelopeError, fingerprint
from lakehouse.contract.faults import crash_point
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.trace import EventLines

logger = logging.getLogger(__name__)
_lines = EventLines(logger)

STOP_S = 10.0  # for the current batch
BATCH = 5_000
REFINED_BY = "refined_by"  # an extra header
_BACKOFF_MAX_S = 5.0
_RAW_POLL_MS = 200
_ANSWER_MS = 5_000  # a broker that takes longer is considered away
_METADATA_MS = 10_000  # after this long, new partitions and topics are assigned
_SESSION_MS = 6_000  # after this long, a dead member's partitions are assigned to others


class Refiner:
    """Refines raw records of one source. Its only I/O is reading reference files.

    Args:
        source: as the pipeline declares it.
        node: id of this process.
        tenant: of records without an envelope.
        enricher: all references of the source, including those that a one-step node joins at the border.
        file: of the pipeline, for errors.
    """

    def __init__(
        self, source: Source, *, node: str, tenant: str, enricher: Enricher | None = None, file: Path | None = None
    ) -> None:
        self._source = source
        self._node = node
        self._border = Border(source, tenant=tenant, collector=node, file=file)
        self._enricher = enricher

    def refine(self, record: Any, *, suspect: bool) -> tuple[Envelope, bytes, bytes]:
        """Envelope, key and payload of a record of the raw topic.

        Args:
            record: from kafka-python.
            suspect: the source's topic may have the event already.
        """
        place = f"{record.topic}/{record.partition}/{record.offset}"
        headers = record.headers or ()
        try:
            front: Envelope | None = Envelope.from_headers(headers)
        except EnvelopeError:
            front = None  # written by another application
        origin = front.event_id if front is not None else f"@{place}"
        event = self._border.admit(record.value or b"", origin=origin, tenant=front.tenant if front else None)
        envelope, key = event.envelope, event.key
        if self._source.event_id_template is None:
            envelope = dataclasses.replace(envelope, event_id=origin)
            key = key if self._source.key_template is not None else origin.encode()
        if front is not None:
            envelope = dataclasses.replace(
                envelope,
                received_at=front.received_at,
                collector=front.collector,
                suspect=suspect or front.suspect,
                reject=front.reject or envelope.reject,
            )
        extra = tuple((name, value.decode("utf-8", "replace")) for name, value in headers if name not in HEADER_NAMES)
        extra += ((RAW_PLACE, place), (REFINED_BY, self._node))
        if self._enricher is not None and envelope.reject is None:
            extra += self._enricher(event)
        return dataclasses.replace(envelope, extra=tuple(dict(extra).items())), key, event.payload


class RefineNode:
    """Refines every source of a pipeline.

    Args:
        settings: of the process.
        pipeline: as declared.
        node: id of this process.
        bootstrap: ``host:port`` of the broker.

    Attributes:
        counts: ``read``, ``refined``, ``rejected`` and ``sent_again``, by source.
    """

    def __init__(self, settings: Settings, pipeline: Pipeline, *, node: str, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._security = settings.kafka.security
        self._group = f"millrace-refine-{pipeline.name or 'pipeline'}"
        self._sources = dict(pipeline.sources)
        topics = {name: source.topic for name, source in self._sources.items()}
        self._publisher = make_publisher(bootstrap, settings.kafka, topics)
        self._outcomes: dict[int, SendOutcome] = {}
        self._arrived = asyncio.Event()
        self._seq = 0
        self._lanes = {name: SourceLane(n, f"{name}/refine", name) for n, name in enumerate(self._sources)}
        self._enrichers = _enrichers(self._sources, pipeline.path.parent, bootstrap, self._security)
        self._refiners = {
            name: Refiner(
                source, node=node, tenant=settings.tenant, enricher=self._enrichers.get(name), file=pipeline.path
            )
            for name, source in self._sources.items()
        }
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self._sources}

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Refine until ``stop`` is set; the current batch then has :data:`STOP_S` to finish.

        A batch that Kafka does not take in that time stays in the raw topic for the next start.
        """
        following: list[asyncio.Task[None]] = []
        try:
            if not await _until(stop, self._begin(following), 0):
                return
            ready()
            if not await _until(stop, self._batches(stop), STOP_S):
                logger.warning("Kafka did not take the last batch in %.0f s; the raw topic keeps it", STOP_S)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await asyncio.to_thread(self._publisher.close, 1.0)

    async def _begin(self, following: list[asyncio.Task[None]]) -> None:
        """Connect, and follow the references until they are complete."""
        declared = list(self._sources.values())
        topics = declared + [front_source(source) for source in declared]
        await start_publisher(self._publisher, self._deliver, self._bootstrap, topics, self._security)
        following += [asyncio.create_task(enricher.run()) for enricher in self._enrichers.values()]
        for enricher in self._enrichers.values():
            await enricher.complete()

    async def _batches(self, stop: asyncio.Event) -> None:
        pause = 0.2
        while not stop.is_set():
            reader = RawReader(self._bootstrap, self._sources, self._group, self._security)
            try:
                while not stop.is_set():
                    batch = await asyncio.to_thread(reader.poll)
                    if batch:
                        await self._send(batch)
                        crash_point("refine.before_commit")
                        await asyncio.to_thread(reader.commit)
                        pause = 0.2
            except BrokerUnavailable as error:
                logger.warning("%s; next attempt in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(_BACKOFF_MAX_S, pause * 2)
            finally:
                await asyncio.to_thread(reader.close)

    async def _send(self, batch: Sequence[tuple[str, Any, bool]]) -> None:
        """Send a batch and wait until Kafka has all of it, in the order of each partition."""
        events: list[LoggedEvent] = []
        for name, record, suspect in batch:
            envelope, key, payload = self._refiners[name].refine(record, suspect=suspect)
            counts = self.counts[name]
            counts["read"] += 1
            counts["rejected" if envelope.reject is not None else "refined"] += 1
            if envelope.reject is not None:
                _tell("is refused", envelope)
            self._seq += 1
            events.append(LoggedEvent(self._seq, self._lanes[name], envelope, key, payload, _NOWHERE, 0, None))
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
                await asyncio.sleep(min(_BACKOFF_MAX_S, 0.05 * 2**attempt))

    def _again(self, outcome: SendOutcome) -> LoggedEvent | None:
        """The event to send again, or None if Kafka has it."""
        event = outcome.event
        if not outcome.error:
            return None
        self.counts[event.envelope.source]["sent_again"] += 1
        if outcome.final:  # e.g. too large with its headers: its beginning is kept as rejected
            payload = event.payload[:KEPT_BYTES]
            event.payload = payload
            event.envelope = dataclasses.replace(
                event.envelope, reject=outcome.error, fingerprint=fingerprint(payload), extra=event.envelope.extra[:4]
            )
            _tell("is not taken by Kafka", event.envelope)
        else:
            event.envelope = dataclasses.replace(event.envelope, suspect=True)
        return event

    def _deliver(self, outcomes: Sequence[SendOutcome]) -> None:
        for outcome in outcomes:
            self._outcomes[outcome.event.seq] = outcome
        self._arrived.set()


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


def _enrichers(
    sources: Mapping[str, Source], folder: Path, bootstrap: str, security: ClientSecurity
) -> dict[str, Enricher]:
    """All references of a source are joined here, whichever step they name: a front node joins none."""
    found = {}
    for name, source in sources.items():
        if source.enrich:
            specs = {key: dataclasses.replace(spec, at="refine") for key, spec in source.enrich.items()}
            found[name] = Enricher(
                dataclasses.replace(source, enrich=specs), folder, bootstrap, at="refine", security=security
            )
    return found


def _tell(what: str, envelope: Envelope) -> None:
    _lines.say(
        logging.INFO,
        what,
        envelope.reject or "",
        event_id=envelope.event_id,
        source=envelope.source,
        tenant=envelope.tenant,
    )


_NOWHERE = LogSegment(0, Path())


class RawReader:
    """The raw topics, read as one member of the consumer group. Blocks."""

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
            for place, records in consumer.poll(timeout_ms=_RAW_POLL_MS, max_records=BATCH).items():
                before = self._suspect_before.setdefault(place, records[0].offset + BATCH)
                name = self._names[place.topic]
                found += [(name, record, record.offset < before) for record in records]
                self._next[place] = records[-1].offset + 1
            return found
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def commit(self) -> None:
        """Commit everything that was polled.

        Raises:
            BrokerUnavailable: the broker does not answer.
        """
        assert self._consumer is not None
        offsets = {place: OffsetAndMetadata(offset, "", -1) for place, offset in self._next.items()}
        self._next = {}
        try:
            self._consumer.commit(offsets, timeout_ms=_ANSWER_MS)
        except kafka_errors.CommitFailedError:  # other members now own these partitions and repeat the batch
            logger.info("the group was rebalanced meanwhile; the batch counts once by its ids")
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
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
        for topic in self._names:  # otherwise the leader may assign nothing until its metadata is renewed
            consumer.partitions_for_topic(topic)
        consumer.subscribe(sorted(self._names), listener=_Assigned(self._suspect_before))
        return consumer


class _Assigned(ConsumerRebalanceListener):  # type: ignore[misc]
    """Marks newly assigned partitions: another member may have refined up to one batch of them."""

    def __init__(self, suspect_before: dict[TopicPartition, int]) -> None:
        self._suspect_before = suspect_before

    def on_partitions_revoked(self, revoked: Any) -> None:
        pass

    def on_partitions_assigned(self, assigned: Any) -> None:
        for place in assigned:
            self._suspect_before.pop(place, None)
