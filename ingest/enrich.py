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

    def __init__(self, name: str, spec: EnrichSpec, folder: Path) -> None:
        self.name = name
        self.spec = spec
        self.key = Template(spec.key)
        self.file = folder / spec.file if spec.file else None
        self.stamp: Stamp | None = None
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
        self.references = {name: Reference(name, spec, folder) for name, spec in source.enrich.items()}
        self._unread = {reference.name for reference in self.references.values() if reference.spec.topic}
        self._complete = asyncio.Event()
        if not self._unread:
            self._complete.set()
        for reference in self.references.values():
            if reference.file is not None:
                self._load(reference, reference.file)

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
        for reference in self.references.values():
            key = reference.key.render(fields)
            row = reference.rows.get(key) if key is not None else None
            if row is not None:
                found.append((reference.name, row))
            found.append((f"{reference.name}_version", reference.version))
        return tuple(found)

    async def run(self) -> None:
        """Follow files that change and topics that grow, until cancelled."""
        followers = [asyncio.create_task(self._follow(each)) for each in self.references.values() if each.spec.topic]
        try:
            while True:
                await asyncio.sleep(REFRESH_S)
                await asyncio.to_thread(self._refresh)
        finally:
            for follower in followers:
                follower.cancel()
            await asyncio.gather(*followers, return_exceptions=True)

    def _refresh(self) -> None:
        for reference in self.references.values():
            try:
                if reference.file is not None and stamp_of(reference.file) != reference.stamp:
                    self._load(reference, reference.file)
            except (ConfigError, OSError) as error:
                logger.error("the reference %s stays as it was: %s", reference.name, error)

    def _load(self, reference: Reference, path: Path) -> None:
        try:
            stamp = stamp_of(path)
            rows = read_rows(path, reference.spec)
        except (OSError, ValueError) as error:
            problem = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"{path} cannot be used: {problem}",
                key=f"sources.{self._source.name}.enrich.{reference.name}.file",
                remedy="Give a CSV file with a header, a JSON array of objects, or JSON lines",
            ) from None
        digest = hashlib.blake2b("\0".join(f"{k}\0{v}" for k, v in sorted(rows.items())).encode(), digest_size=8)
        reference.rows, reference.version, reference.stamp = rows, digest.hexdigest(), stamp
        logger.info("the reference %s has %d rows, version %s", reference.name, len(rows), reference.version)

    async def _follow(self, reference: Reference) -> None:
        while True:
            reader = TopicReader(self._kafka, reference.spec.topic)
            try:
                while True:
                    changes = await asyncio.to_thread(reader.poll)
                    self._apply(reference, changes)
                    reference.version = reader.version
                    if reader.complete:
                        self._unread.discard(reference.name)
                        if not self._unread:
                            self._complete.set()
            except BrokerUnavailable as error:
                logger.warning("the reference %s is not followed for the moment: %s", reference.name, error)
                await asyncio.sleep(REFRESH_S)
            finally:
                await asyncio.to_thread(reader.close)

    def _apply(self, reference: Reference, changes: Iterable[tuple[str, bytes | None]]) -> None:
        spec = reference.spec
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


def read_rows(path: Path, spec: EnrichSpec) -> dict[str, str]:
    """Rows of a file by key, each as JSON; the last row of a key counts.

    Raises OSError, or ValueError: it is too large, of unknown form, or lacks a column.
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
            # A position is also behind a transaction's marker, which is no record; None: not known yet.
            at = {place: consumer.position(place, timeout_ms=_POLL_MS) for place in self._behind}
            self._behind = {place: end for place, end in self._behind.items() if at[place] is None or at[place] < end}
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
