"""Sources of the pipeline model: how events come in and what they look like."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lakehouse.contract.checks import at_least, duration, one_of
from lakehouse.contract.collector import COLLECTOR_KINDS, AnswerSpec, CollectorSpec, EnrichSpec
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.expectations import Check, Expectation, checks_of
from lakehouse.contract.feed import FeedSpec
from lakehouse.contract.shed import ShedSpec
from lakehouse.contract.tomlfile import duration_ms

__all__ = ["COLLECTOR_KINDS", "RESPOND_STYLES", "AnswerSpec", "CollectorSpec", "EnrichSpec", "Source", "Template"]

CONTENT_TYPES = ("application/json", "application/x-ndjson", "application/jsonl")
GUARANTEES = ("exactly_once", "at_least_once", "at_most_once")
RESPOND_STYLES = ("", "sync", "half_async", "full_async")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A value made of fields of the payload, such as ``{rsvp_id}:{mtime}``; dots descend into objects.

    Attributes:
        text: the template as written.
    """

    text: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of the fields in it."""
        return tuple(_FIELD.findall(self.text))

    def render(self, payload: Mapping[str, Any]) -> str | None:
        """The value for one parsed payload, or None where a field is absent, null, or an object or array."""
        parts: list[str] = []
        for literal, path in _split_template(self.text):
            parts.append(literal)
            if not path:
                break
            value: Any = payload
            for step in path:
                value = value.get(step) if isinstance(value, Mapping) else None
            if value is None or isinstance(value, (Mapping, list)):
                return None
            parts.append(str(value).lower() if isinstance(value, bool) else str(value))
        return "".join(parts)


@functools.cache
def _split_template(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Literals, each with the path of the field after it; the last has none. Cached: collectors render per event."""
    pieces = _FIELD.split(text)
    paths = [tuple(path.split(".")) for path in pieces[1::2]]
    return tuple(zip(pieces[::2], [*paths, ()], strict=True))


@dataclass(frozen=True)
class Source:
    """Where events come from and what they look like.

    Attributes:
        name: key of the table in the TOML file.
        topic: Kafka topic.
        schema: the payload's fields as a Spark DDL string.
        event_id: template of the dedupe key; empty: every event gets an id of its own.
        key: template of the Kafka key (order is kept within a key); empty: the event id.
        event_time: Spark SQL expression over the payload's fields.
        required: paths of fields that must be there and not null.
        expectations: what is expected of each event, by name; a plain text is the predicate of one that quarantines.
        table_expectations: what is expected of batches and of the whole table (:attr:`checks`), by name.
        bronze_retention: how long bronze keeps events, e.g. ``400 days``; empty: for ever.
        lateness: how long after its event time an event may arrive and still be added to the products, e.g. ``1 hour``;
            empty: late events are always added. A product may say otherwise.
        dedupe_horizon: an event that comes again after nothing of it came for so long (by the time of bronze commits)
            counts again, and its id may be forgotten; empty: it is once for ever.
        partitions: of the topic, when we create it.
        retention: of the topic, when we create it, e.g. ``7 days``.
        replicas: of each of its partitions, when we create it.
        min_isr: replicas that must have an event before it is acknowledged, when we create the topic.
        guarantee: ``exactly_once``, ``at_least_once`` or ``at_most_once``: what a collector does with an event whose
            fate in Kafka is unknown.
        latest_topic: keep the newest event of each key in a compacted topic, ``TOPIC.latest``.
        max_event_bytes: larger payloads are refused at the border.
        max_rate: events a second that a node takes by HTTP and stream connections; 0: as many as come.
        max_connections: of senders to this source on a node; 0: as many as come.
        content_types: bodies that are taken by HTTP.
        collectors: how events come in.
        respond: what a sender by HTTP gets beside the acknowledgement: empty (nothing), ``sync`` (the answer to its
            POST), ``half_async`` (a place where it waits for the answer) or ``full_async`` (fetched or pushed later).
        answer: where the answer comes from, for ``respond``.
        enrich: reference data joined to each event, by the header that carries it.
        shed: which events may be left out, and when.
        feeds: files that the batch loader fetches by URL, on a schedule.
    """

    topic: str
    schema: str
    event_time: str
    event_id: str = ""
    key: str = ""
    required: tuple[str, ...] = ()
    expectations: dict[str, Expectation] = field(default_factory=dict)
    table_expectations: dict[str, Any] = field(default_factory=dict)
    bronze_retention: str = ""
    lateness: str = ""
    dedupe_horizon: str = ""
    partitions: int = 2
    retention: str = "7 days"
    replicas: int = 1
    min_isr: int = 1
    guarantee: str = "exactly_once"
    latest_topic: bool = False
    max_event_bytes: int = 1_000_000
    max_rate: int = 0
    max_connections: int = 0
    content_types: tuple[str, ...] = CONTENT_TYPES
    collectors: tuple[CollectorSpec, ...] = ()
    respond: str = ""
    answer: AnswerSpec | None = None
    enrich: dict[str, EnrichSpec] = field(default_factory=dict)
    feeds: tuple[FeedSpec, ...] = ()
    shed: ShedSpec | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not _TOPIC.fullmatch(self.topic):
            raise ConfigError(f"{self.topic!r} is no Kafka topic name", key="topic", remedy="Use [a-zA-Z0-9._-]")
        if self.partitions < 1:
            raise ConfigError("must be at least 1", key="partitions")
        at_least("max_event_bytes", self.max_event_bytes, 1)
        at_least("replicas", self.replicas, 1)
        one_of("guarantee", self.guarantee, GUARANTEES)
        if not 1 <= self.min_isr <= self.replicas:
            raise ConfigError("must be between 1 and replicas", key="min_isr", remedy="Raise replicas, or lower it")
        at_least("max_rate", self.max_rate, 0)
        at_least("max_connections", self.max_connections, 0)
        for kind in self.content_types:
            one_of("content_types", kind, CONTENT_TYPES)
        duration("retention", self.retention)
        if self.lateness:
            duration("lateness", self.lateness)
        if self.dedupe_horizon:
            duration("dedupe_horizon", self.dedupe_horizon)
        if self.bronze_retention:
            duration("bronze_retention", self.bronze_retention)
        checks_of(self.table_expectations, "table_expectations")
        for name in self.table_expectations.keys() & self.expectations.keys():
            raise ConfigError("the name is taken", key=f"table_expectations.{name}", remedy="Names are unique")
        for key in ("event_id", "key"):
            text = getattr(self, key)
            if text and not Template(text).fields:
                raise ConfigError(f"{text!r} names no field", key=key, remedy="Write e.g. '{rsvp_id}:{mtime}'")

        one_of("respond", self.respond, RESPOND_STYLES)
        if bool(self.respond) != (self.answer is not None):
            raise ConfigError("respond and answer go together", key="respond", remedy="Add [sources.NAME.answer]")
        if self.answer is not None:
            duration("answer.timeout", self.answer.timeout)
        names = [feed.name for feed in self.feeds]
        if len(set(names)) < len(names):
            raise ConfigError("two feeds have the same name", key="feeds", remedy="Give each a name = …")
        for name in self.enrich:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
                raise ConfigError(f"{name!r} is no name of a header", key="enrich", remedy="Use [a-z][a-z0-9_]*")

    @property
    def dedupe_horizon_ms(self) -> int:
        """The dedupe horizon in milliseconds; 0: there is none."""
        return duration_ms(self.dedupe_horizon) if self.dedupe_horizon else 0

    @property
    def checks(self) -> tuple[Check, ...]:
        """What is expected of its batches and of the whole table."""
        return checks_of(self.table_expectations, f"sources.{self.name}.table_expectations")

    def expected(self, action: str) -> dict[str, str]:
        """Predicates over each event with this action, by name."""
        return {name: found.sql for name, found in self.expectations.items() if found.action == action}

    @cached_property
    def event_id_template(self) -> Template | None:
        """Template of the event id, or None."""
        return Template(self.event_id) if self.event_id else None

    @cached_property
    def key_template(self) -> Template | None:
        """Template of the Kafka key, or None (then the event id is the key)."""
        return Template(self.key) if self.key else None

    @property
    def latest(self) -> str:
        """The compacted topic with the newest event of each key."""
        return f"{self.topic}.latest"

    @property
    def retention_ms(self) -> int:
        """Retention of the topic in milliseconds."""
        return duration_ms(self.retention)
