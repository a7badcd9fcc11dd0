"""The second step of a two-step collection: ``TOPIC.raw`` → border, enrichment → the source's topic.

One consumer group a pipeline, so that any number of these processes share the partitions. One batch at a time:

1. Read records that a front node put there.
2. Judge each (:class:`~ingest.border.Border`), keep what the front said of it (id, time, node, tenant), add references
   and the place in the raw topic to its headers; what does not pass goes on too, with its reason.
3. Send them; wait until Kafka has every one.
4. Commit the raw topic's offsets.

A crash between 3 and 4 sends a batch again, under the same event ids, so that bronze's readers count it once. A
transaction over both would mark the raw offsets in the same step, but its markers take offsets in the source's topic,
which bronze's readers count with; and it would be an event later by the transaction's length.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka import errors as kafka_errors
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.structs import OffsetAndMetadata
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricCollector

from ingest.border import KEPT_BYTES, Border
from ingest.enrich import Enricher
from ingest.errors import BrokerUnavailable
from ingest.events import Lane, LoggedEvent, Segment
from ingest.front import RAW_PLACE, front_source, raw_topic
from ingest.publish import Outcome, ensure_topics, make_publisher
from lakehouse.contract.envelope import HEADER_NAMES, Envelope, EnvelopeError, fingerprint
from lakehouse.contract.faults import crash_point
from lakehouse.contract.kafkasecurity import PLAINTEXT, ClientSecurity
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.trace import EventLines

logger = logging.getLogger(__name__)
_lines = EventLines(logger)

BATCH = 5_000
_POLL_MS = 200
_BACKOFF_MAX_S = 5.0
_METADATA_MS = 10_000  # new partitions, and topics that were not known yet, are shared out after so long
_SESSION_MS = 6_000  # a member that is dead for so long leaves its partitions to the others
REFINED_BY = "refined_by"  # an extra header


class Refiner:
    """What becomes of a raw record of one source. No I/O but the reading of reference files.

    Args:
        source: as the pipeline declares it.
        node: id of this process.
        enricher: its references, also those that a one-step node joins at the border.
        tenant: for records without an envelope.
    """

    def __init__(self, source: Source, *, node: str, tenant: str, enricher: Enricher | None = None) -> None:
        self._source = source
        self._node = node
        self._border = Border(source, tenant=tenant, collector=node)
        self._enricher = enricher

    def refine(self, record: Any, *, suspect: bool) -> tuple[Envelope, bytes, bytes]:
        """Envelope, key and payload of a record of the raw topic.

        Args:
            record: as kafka-python gives it.
            suspect: the source's topic may hold it already.
        """
        place = f"{record.topic}/{record.partition}/{record.offset}"
        headers = record.headers or ()
        try:
            front: Envelope | None = Envelope.from_headers(headers)
        except EnvelopeError:
            front = None  # somebody else wrote it there
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
    """Refines every source of a pipeline until it is stopped.

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
        self._outcomes: dict[int, Outcome] = {}
        self._arrived = asyncio.Event()
        self._seq = 0
        self._lanes = {name: Lane(n, f"{name}/refine", name) for n, name in enumerate(self._sources)}
        self._enrichers = _enrichers(self._sources, pipeline.path.parent, bootstrap, self._security)
        self._refiners = {
            name: Refiner(source, node=node, tenant=settings.tenant, enricher=self._enrichers.get(name))
            for name, source in self._sources.items()
        }
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self._sources}

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Refine until ``stop`` is set."""
        await self._connect()
        tasks = [asyncio.create_task(enricher.run()) for enricher in self._enrichers.values()]
        try:
            for enricher in self._enrichers.values():
                await enricher.complete()
            ready()
            await self._batches(stop)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._publisher.close, 1.0)

    async def _connect(self) -> None:
        declared = list(self._sources.values())
        pause = 0.2
        while True:
            try:
                topics = declared + [front_source(source) for source in declared]
                await asyncio.to_thread(ensure_topics, self._bootstrap, topics, self._security)
                await asyncio.to_thread(self._publisher.start, self._deliver)
                return
            except BrokerUnavailable as error:
                logger.warning("%s; next attempt in %.1f s", error, pause)
                await asyncio.sleep(pause)
                pause = min(_BACKOFF_MAX_S, pause * 2)

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

    def _again(self, outcome: Outcome) -> LoggedEvent | None:
        """The event to be sent again, or None if Kafka has it."""
        event = outcome.event
        if not outcome.error:
            return None
        self.counts[event.envelope.source]["sent_again"] += 1
        if outcome.final:  # too large with its headers, say: what remains of it is kept as rejected
            payload = event.payload[:KEPT_BYTES]
            event.payload = payload
            event.envelope = dataclasses.replace(
                event.envelope, reject=outcome.error, fingerprint=fingerprint(payload), extra=event.envelope.extra[:4]
            )
            _tell("is not taken by Kafka", event.envelope)
        else:
            event.envelope = dataclasses.replace(event.envelope, suspect=True)
        return event

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._outcomes[outcome.event.seq] = outcome
        self._arrived.set()


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
            self._consumer.commit(offsets)
        except kafka_errors.CommitFailedError:  # others have these partitions by now, and refine the batch again
            logger.info("the group was rebalanced meanwhile; the batch counts once by its ids")
        except (kafka_errors.KafkaError, OSError) as error:
            raise BrokerUnavailable(self._bootstrap, f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
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


def _enrichers(
    sources: Mapping[str, Source], folder: Path, bootstrap: str, security: ClientSecurity
) -> dict[str, Enricher]:
    """All references of a source are joined here, whichever step they name: the front joins none."""
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


_NOWHERE = Segment(0, Path())


class RefineMetrics(MetricCollector):
    """Counts of a refiner for Prometheus.

    Args:
        node: whose.
    """

    def __init__(self, node: RefineNode) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Events by source and what became of them."""
        counter = CounterMetricFamily("millrace_refine_events", "Events refined", labels=("source", "what"))
        for source, counts in self._node.counts.items():
            for what, count in counts.items():
                counter.add_metric((source, what), count)
        yield counter

    def describe(self) -> Iterable[Metric]:
        """Names are known without collecting."""
        return ()


@contextmanager
def serve_metrics(node: RefineNode, port: int) -> Iterator[None]:
    """Serve ``/metrics`` on the loopback address meanwhile; port 0: do not."""
    if not port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(RefineMetrics(node))
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
