"""Sources of the pipeline model: how events come in and what they look like."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lakehouse.contract.checks import duration, one_of
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.tomlfile import duration_ms

COLLECTOR_KINDS = ("websocket", "http")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


@dataclass(frozen=True, slots=True)
class CollectorSpec:
    """How events of a source come in.

    Attributes:
        kind: one of :data:`COLLECTOR_KINDS`.
        url: upstream address (``websocket``); ``--url`` of the command overrides it.
        resume_param: query parameter by which this upstream resumes at a message index; empty: it cannot resume,
            and a reconnect is reported as a gap.
    """

    kind: str
    url: str = ""
    resume_param: str = ""

    def __post_init__(self) -> None:
        one_of("kind", self.kind, COLLECTOR_KINDS)


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
        expectations: name to Spark SQL predicate; an event for which it is not true goes to quarantine.
        partitions: of the topic, when we create it.
        retention: of the topic, when we create it, e.g. ``7 days``.
        max_event_bytes: larger payloads are refused at the border.
        collectors: how events come in.
    """

    topic: str
    schema: str
    event_time: str
    event_id: str = ""
    key: str = ""
    required: tuple[str, ...] = ()
    expectations: dict[str, str] = field(default_factory=dict)
    partitions: int = 2
    retention: str = "7 days"
    max_event_bytes: int = 1_000_000
    collectors: tuple[CollectorSpec, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if not _TOPIC.fullmatch(self.topic):
            raise ConfigError(f"{self.topic!r} is no Kafka topic name", key="topic", remedy="Use [a-zA-Z0-9._-]")
        if self.partitions < 1:
            raise ConfigError("must be at least 1", key="partitions")
        duration("retention", self.retention)
        for key in ("event_id", "key"):
            text = getattr(self, key)
            if text and not Template(text).fields:
                raise ConfigError(f"{text!r} names no field", key=key, remedy="Write e.g. '{rsvp_id}:{mtime}'")

    @cached_property
    def event_id_template(self) -> Template | None:
        """Template of the event id, or None."""
        return Template(self.event_id) if self.event_id else None

    @cached_property
    def key_template(self) -> Template | None:
        """Template of the Kafka key, or None (then the event id is the key)."""
        return Template(self.key) if self.key else None

    @property
    def retention_ms(self) -> int:
        """Retention of the topic in milliseconds."""
        return duration_ms(self.retention)
