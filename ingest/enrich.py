"""Reference data joined to events and carried in their Kafka headers, which bronze keeps.

``[sources.X.enrich.NAME]`` names a small reference, a file or a compacted topic, that every node holds in memory, so
the hot path asks no second store. An event whose key is in it gets two headers: ``NAME``, the row as a JSON object, and
``NAME_version``, the state of the reference. Any other event gets the version alone.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import io
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from kafka import KafkaConsumer, TopicPartition

from ingest.border.admission import Admitted
from ingest.errors import BrokerUnavailable
from ingest.kafka import broker_errors
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.source import EnrichSpec, Source, Template
from lakehouse.contract.settings import KafkaSettings
from lakehouse.contract.storage import Stamp, stamp_of

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_ROW_BYTES = 8_192
REFRESH_S = 2.0
_POLL_MS = 500
_MOST = 5_000


class Reference:
    """Rows by key, as header values, and their version: a digest of the rows, or ``TOPIC@OFFSETS``."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.version = ""


class Enricher:
    """Adds the references of one source to its events.

    Args:
        folder: base of relative files.

    Raises:
        ConfigError: a file cannot be read or has the wrong form.
    """

    def __init__(self, source: Source, folder: Path, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._source = source
        self._specs = source.enrich
        self._keys = {name: Template(spec.key) for name, spec in self._specs.items()}
        self._files = {name: folder / spec.file for name, spec in self._specs.items() if spec.file}
        self._stamps: dict[str, Stamp | None] = {}
        self.references: dict[str, Reference] = {name: Reference() for name in self._specs}
        self._unread = {name for name, spec in self._specs.items() if spec.topic}
        self._complete = asyncio.Event()
        if not self._unread:
            self._complete.set()
        for name in self._files:
            self._load(name)

    @property
    def missing(self) -> str:
        """Names of references that have not been read to their end yet; empty: none."""
        return ", ".join(sorted(self._unread))

    async def complete(self) -> None:
        """Return when every topic has been read to its end once, by :meth:`run`."""
        await self._complete.wait()

    def close(self) -> None:
        """Stop waiting for the references."""
        self._complete.set()

    def __call__(self, event: Admitted) -> tuple[tuple[str, str], ...]:
        """The headers of an event that passed the border."""
        try:
            fields = orjson.loads(event.payload)
        except orjson.JSONDecodeError:
            return ()
        return self.headers(fields) if isinstance(fields, dict) else ()

    def headers(self, fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """The headers of an event with these fields."""
        found: list[tuple[str, str]] = []
        for name, reference in self.references.items():
            key = self._keys[name].render(fields)
            row = reference.rows.get(key) if key is not None else None
            if row is not None:
                found.append((name, row))
            found.append((f"{name}_version", reference.version))
        return tuple(found)

    async def run(self) -> None:
        """Follow files that change and topics that grow, until cancelled."""
        topics = {name: spec for name, spec in self._specs.items() if spec.topic}
        followers = [asyncio.create_task(self._follow(name, spec)) for name, spec in topics.items()]
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                await asyncio.to_thread(self._refresh)
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _refresh(self) -> None:
        for name, path in self._files.items():
            try:
                if stamp_of(path) != self._stamps[name]:
                    self._load(name)
            except (ConfigError, OSError) as error:
                logger.error("the reference %s stays as it was: %s", name, error)

    def _load(self, name: str) -> None:
        spec, path = self._specs[name], self._files[name]
        try:
            stamp = stamp_of(path)
            rows = read_rows(path, spec)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"{path} cannot be used: {problem}",
                key=f"sources.{self._source.name}.enrich.{name}.file",
                remedy="Give a CSV file with a header, a JSON array of objects, or JSON lines",
            ) from None
        digest = hashlib.blake2b("\0".join(f"{k}\0{v}" for k, v in sorted(rows.items())).encode(), digest_size=8)
        reference = self.references[name]
        reference.rows, reference.version = rows, digest.hexdigest()
        self._stamps[name] = stamp
        logger.info("the reference %s has %d rows, version %s", name, len(rows), reference.version)

    async def _follow(self, name: str, spec: EnrichSpec) -> None:
        while True:
            reader = TopicReader(self._kafka, spec.topic)
            try:
                while True:
                    changes = await asyncio.to_thread(reader.poll)
                    self._apply(self.references[name], spec, changes, reader.version)
                    if reader.complete:
                        self._unread.discard(name)
                        if not self._unread:
                            self._complete.set()
            except BrokerUnavailable as error:
                logger.warning("the reference %s is not followed for the moment: %s", name, error)
                await asyncio.sleep(REFRESH_S)
            finally:
                await asyncio.to_thread(reader.close)

    def _apply(
        self, reference: Reference, spec: EnrichSpec, changes: Iterable[tuple[str, bytes | None]], version: str
    ) -> None:
        for key, value in changes:
            try:
                row = None if value is None else _row_text(orjson.loads(value), spec)
            except ValueError as error:
                logger.error("key %s of topic %s is passed over: %s", key, spec.topic, error)
                continue
            if row is None:
                reference.rows.pop(key, None)
            else:
                reference.rows[key] = row
        reference.version = version


def read_rows(path: Path, spec: EnrichSpec) -> dict[str, str]:
    """Rows of a file by key, each as JSON; the last row of a key counts.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, of unknown form, or lacks a column.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes; a reference is small, join a table instead")
    text = path.read_text(encoding="utf-8-sig")
    rows: Iterable[Any]
    if path.suffix.lower() == ".csv":
        rows = csv.DictReader(io.StringIO(text))
    elif text.lstrip().startswith("["):
        rows = orjson.loads(text)
    else:
        rows = [orjson.loads(line) for line in text.splitlines() if line.strip()]
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or row.get(spec.column) is None:
            raise ValueError(f"row {number} has no {spec.column!r}")
        found[str(row[spec.column])] = _row_text(row, spec)
    return found


def _row_text(row: Any, spec: EnrichSpec) -> str:
    if not isinstance(row, dict):
        raise ValueError("it is not an object")
    chosen = {name: row.get(name) for name in spec.fields} if spec.fields else row
    text = orjson.dumps(chosen).decode()
    if len(text) > MAX_ROW_BYTES:
        raise ValueError(f"a row has more than {MAX_ROW_BYTES} bytes; name the fields that are needed")
    return text


class TopicReader:
    """Reads every partition of a compacted topic from its start, in no consumer group. Blocks.

    Attributes:
        complete: everything that was there on connecting has been read.
    """

    def __init__(self, kafka: KafkaSettings, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._consumer: KafkaConsumer | None = None
        self._ends: dict[int, int] = {}
        self._behind: dict[TopicPartition, int] = {}  # ends not reached yet
        self.complete = False

    @property
    def version(self) -> str:
        """``TOPIC@OFFSETS``, with the next offset of each partition."""
        return f"{self._topic}@{','.join(str(self._ends[number]) for number in sorted(self._ends))}"

    def poll(self) -> list[tuple[str, bytes | None]]:
        """Keys with their new values (None: removed), oldest first; empty after half a second without any.

        Raises:
            BrokerUnavailable: the broker does not answer, or lacks the topic.
        """
        found = []
        with broker_errors(self._kafka.bootstrap):
            consumer = self._consumer or self._connect()
            for records in consumer.poll(timeout_ms=_POLL_MS, max_records=_MOST).values():
                for record in records:
                    self._ends[record.partition] = record.offset + 1
                    if record.key is not None:
                        found.append((record.key.decode("utf-8", "replace"), record.value))
            for place in [place for place, end in self._behind.items() if _at(consumer, place) >= end]:
                del self._behind[place]
            self.complete = not self._behind
        return found

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _connect(self) -> KafkaConsumer:
        consumer = KafkaConsumer(
            bootstrap_servers=self._kafka.bootstrap,
            enable_auto_commit=False,
            metrics_enabled=False,
            **self._kafka.security.for_kafka_python(),
        )
        self._consumer = consumer
        numbers = consumer.partitions_for_topic(self._topic)
        if not numbers:
            raise BrokerUnavailable(self._kafka.bootstrap, f"there is no topic {self._topic}")
        places = [TopicPartition(self._topic, number) for number in sorted(numbers)]
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        self._ends = dict.fromkeys(sorted(numbers), 0)
        self._behind = dict(consumer.end_offsets(places))
        return consumer


def _at(consumer: KafkaConsumer, place: TopicPartition) -> int:
    """Offset of the next record, also after a transaction's marker."""
    position = consumer.position(place, timeout_ms=_POLL_MS)
    return -1 if position is None else int(position)
