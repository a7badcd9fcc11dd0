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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingest.border import KEPT_BYTES, Border
from ingest.enrich import Enricher
from ingest.errors import BrokerUnavailable
from ingest.events import Lane, LoggedEvent, Segment
from ingest.front import RAW_PLACE, front_source
from ingest.publish import Outcome, ensure_topics, make_publisher
from ingest.raw_topic import RawReader
from lakehouse.contract.envelope import HEADER_NAMES, Envelope, EnvelopeError, fingerprint
from lakehouse.contract.faults import crash_point
from lakehouse.contract.kafkasecurity import ClientSecurity
from lakehouse.contract.pipeline import Pipeline, Source
from lakehouse.contract.settings import Settings
from lakehouse.contract.trace import EventLines

logger = logging.getLogger(__name__)
_lines = EventLines(logger)

STOP_S = 10.0  # for the batch that is being sent when it is told to stop
_BACKOFF_MAX_S = 5.0
REFINED_BY = "refined_by"  # an extra header


class Refiner:
    """What becomes of a raw record of one source. No I/O but the reading of reference files.

    Args:
        source: as the pipeline declares it.
        node: id of this process.
        enricher: its references, also those that a one-step node joins at the border.
        tenant: for records without an envelope.
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
            name: Refiner(
                source, node=node, tenant=settings.tenant, enricher=self._enrichers.get(name), file=pipeline.path
            )
            for name, source in self._sources.items()
        }
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self._sources}

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Refine until ``stop`` is set; a batch that is being sent then has :data:`STOP_S` to come through.

        One that Kafka does not take in that time stays in the raw topic, and is refined again at the next start.
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
        """Connect, and follow the references until they are there."""
        await self._connect()
        following += [asyncio.create_task(enricher.run()) for enricher in self._enrichers.values()]
        for enricher in self._enrichers.values():
            await enricher.complete()

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


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None], grace_s: float) -> bool:
    """Let the work run to its end, or until so long after ``stop``; whether it came to its end."""
    task, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((task,), timeout=grace_s)
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)
    if not task.cancelled():
        task.result()  # what it raised, if it did
    return not task.cancelled()


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
