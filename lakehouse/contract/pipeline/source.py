"""Sources of the pipeline model: how events come in, what they look like, and which may be left out."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any
from urllib.parse import urlsplit

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline.expectations import Check, Expectation, checks_of
from lakehouse.contract.tomlfile import Milliseconds, at_least, durations, one_of

STREAM_KINDS: Mapping[str, tuple[str, ...]] = {
    "websocket": ("ws", "wss"),
    "sse": ("http", "https"),
    "lines": ("http", "https"),
}
"""Kinds that are clients of an upstream, with the schemes of its address."""

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "websocket": ("url", "resume_param"),
    "sse": ("url", "headers"),
    "lines": ("url", "resume_param", "headers"),
    "http": ("ack",),
    "udp": ("host", "port", "framing", "sequence", "sender", "buffer_bytes"),
}
COLLECTOR_KINDS = tuple(_OPTIONS)
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class CollectorSpec:
    """How events of a source come in.

    Attributes:
        kind: one of :data:`COLLECTOR_KINDS`, or ``module:function`` of a kind of your own.
        url: upstream address (``websocket``, ``sse``, ``lines``); ``--url`` of the command overrides it.
        resume_param: query parameter by which this upstream resumes at a message index; empty: it cannot resume,
            and a reconnect is reported as a gap.
        headers: request headers (``sse``, ``lines``); ``$NAME`` as a value is taken from the environment.
        ack: of ``http``: ``durable`` (202 with a token once the event is safe) or ``none`` (202 at once, no body).
        host: address that ``udp`` binds.
        port: port that ``udp`` binds.
        framing: of ``udp``: ``event`` (a datagram is an event) or ``lines`` (a datagram holds one event a line).
        sequence: of ``udp``: field that counts up by one for each event of a sender, e.g. ``{seq}``: then losses are
            counted.
        sender: of ``udp``: template that names the sender within the source, e.g. ``{reader}``; empty: by address.
        buffer_bytes: of ``udp``: receive buffer asked of the system.
        options: of a kind of your own; it checks them itself.
    """

    kind: str
    url: str = ""
    resume_param: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    ack: str = "durable"
    host: str = "127.0.0.1"
    port: int = 0
    framing: str = "event"
    sequence: str = ""
    sender: str = ""
    buffer_bytes: int = 4_194_304
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = ("options",) if _CLASS.fullmatch(self.kind) else _OPTIONS.get(self.kind)
        if known is None:
            remedy = f"Use one of: {', '.join(COLLECTOR_KINDS)}; or module:function of your own"
            raise ConfigError(f"{self.kind!r} is not known", key="kind", remedy=remedy)
        for option in dataclasses.fields(self)[1:]:
            default = option.default_factory() if callable(option.default_factory) else option.default
            if option.name not in known and getattr(self, option.name) != default:
                raise ConfigError(
                    f"a collector of kind {self.kind!r} has no such option",
                    key=option.name,
                    remedy=f"It takes: {', '.join(known)}",
                )
        self._check_values()

    def _check_values(self) -> None:
        schemes = STREAM_KINDS.get(self.kind)
        if schemes and self.url and urlsplit(self.url).scheme not in schemes:
            raise ConfigError(f"{self.url!r} is no address of this kind", key="url", remedy=f"{schemes[0]}://HOST/PATH")
        one_of("ack", self.ack, ("durable", "none"))
        one_of("framing", self.framing, ("event", "lines"))
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"{self.port} is no port", key="port")
        at_least("buffer_bytes", self.buffer_bytes, 4_096)
        for name in ("sequence", "sender"):
            text = getattr(self, name)
            if text and not re.search(r"\{[A-Za-z_][\w.]*\}", text):
                raise ConfigError(f"{text!r} names no field", key=name, remedy="Write e.g. '{seq}'")


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What a sender gets back, computed from its event.

    Attributes:
        product: table that the answer is read from, once it holds the event.
        key: column of the product to template over the event, e.g. ``{ city = "{group.group_city}" }``.
        timeout: the longest that a sender waits.
        callback_hosts: ``host:port`` that an answer may be pushed to; a callback to any other is refused.
    """

    product: str
    key: dict[str, str]
    timeout: str = "10 seconds"
    callback_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.key:
            raise ConfigError("an answer needs the key of its rows", key="key", remedy='key = { column = "{field}" }')
        durations(self, "timeout")


@dataclass(frozen=True, slots=True)
class EnrichSpec:
    """Reference data that is joined to each event and travels in its headers.

    Attributes:
        key: template over the event, e.g. ``{group.group_city}``.
        column: column of the reference that the key is looked for in.
        file: CSV with a header, JSON array of objects, or JSON lines; relative to the pipeline's folder.
        topic: compacted Kafka topic instead of a file: its keys are the reference's, its values JSON objects.
        fields: columns that are taken; empty: all.
    """

    key: str
    column: str = ""
    file: str = ""
    topic: str = ""
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.topic):
            raise ConfigError("a reference is a file or a topic", key="file", remedy="Give one of file and topic")
        if self.file and not self.column:
            raise ConfigError("a file needs the column that is looked in", key="column", remedy="Add column = …")


FEED_FORMATS = ("auto", "csv", "tsv", "jsonl", "parquet")
READERS = "millrace.readers"
"""Entry points of packages that read other formats of files, by the format's name."""
LOADER = "loader-1"
"""Id of a loader that was given none."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def metrics_file(node: str) -> str:
    """Name of the file below ``_millrace/run`` in which a loader keeps what it counts."""
    return "loader.prom" if node == LOADER else f"loader-{node}.prom"


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """One file that is pulled: ``[[sources.NAME.feeds]]``.

    Attributes:
        url: ``http`` or ``https``; asked for with the ETag or date of the last time.
        name: unique among the source's feeds; empty: the last part of the URL's path.
        every: pause between two looks.
        format: one of :data:`FEED_FORMATS`, or of a reader of one's own; gzip is told by the first bytes.
        sla: how long after a new file was met its rows must be in bronze; empty: no such promise.
        timeout: the longest that one download may take.
        max_bytes: a larger file is refused.
        private: whether the address may be a private one (this machine, the local network).
    """

    url: str
    name: str = ""
    every: str = "15 minutes"
    format: str = "auto"
    sla: str = ""
    timeout: str = "10 minutes"
    max_bytes: int = 10_000_000_000
    private: bool = False

    every_ms = Milliseconds("every")
    sla_ms = Milliseconds("sla")
    timeout_ms = Milliseconds("timeout")

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is no http address", key="url", remedy="Write https://HOST/PATH")
        if parts.username or parts.password:
            raise ConfigError("the address has a password in it", key="url", remedy="Use an address that needs none")
        if self.format not in FEED_FORMATS:
            one_of("format", self.format, (*FEED_FORMATS, *sorted(entry_points(group=READERS).names)))
        durations(self, "every", "timeout", "sla")
        at_least("max_bytes", self.max_bytes, 1)
        if not self.name:
            object.__setattr__(self, "name", parts.path.rstrip("/").rpartition("/")[2].lower() or "feed")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"{self.name!r} is no name", key="name", remedy="Give name = … of [a-z0-9._-]")


_TEST = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:(=|!=|<=|>=|<|>|in)\s*(.+?)\s*)?", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "in": lambda a, b: a in b,
}


@dataclass(frozen=True, slots=True)
class KeepTest:
    """A test of one field of the payload, such as ``amount >= 100``, ``kind in ["buy", "pay"]`` or ``member.vip``.

    Attributes:
        path: of the field; dots descend into objects.
        operator: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` or ``in``; empty: the field is there and neither null,
            false, 0 nor empty.
        value: what it is compared with.
    """

    path: tuple[str, ...]
    operator: str = ""
    value: Any = None

    @classmethod
    def read(cls, text: str) -> KeepTest:
        """From TOML: ``PATH``, or ``PATH OPERATOR VALUE`` with a JSON value (text in single quotes is taken too).

        Raises ValueError: it is neither.
        """
        match = _TEST.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no test of a field")
        path = tuple(match[1].split("."))
        if not match[2]:
            return cls(path)
        value = match[3]
        if len(value) >= 2 and value[0] == value[-1] == "'":
            value = json.dumps(value[1:-1])
        try:
            found = json.loads(value)
        except ValueError:
            raise ValueError(f"{match[3]} is no JSON value") from None
        if (match[2] == "in") != isinstance(found, list) or isinstance(found, dict):
            raise ValueError(f"{match[2]} does not go with {match[3]}")
        return cls(path, match[2], found)

    def holds(self, payload: Mapping[str, Any]) -> bool:
        """Whether a parsed payload passes; a field that is absent, or of another kind, does not."""
        value: Any = payload
        for step in self.path:
            value = value.get(step) if isinstance(value, Mapping) else None
        if not self.operator:
            return bool(value)
        if value is None:
            return False
        try:
            return _COMPARE[self.operator](value, self.value)
        except TypeError:
            return False


@dataclass(frozen=True)
class ShedSpec:
    """``[sources.NAME.shed]``: at least one of ``on_events``, ``on_bytes`` and ``on_age`` switches it on.

    Attributes:
        mode: ``random`` (any event may go) or ``semantic`` (those that pass a test of ``keep`` never go).
        share: of the events that may go, the part that does while it is on.
        keep: tests of the payload's fields, for ``semantic``.
        on_events: on when so many of the source's events wait for Kafka in the message log; 0: never.
        on_bytes: on when the node's message log is this large; 0: never.
        on_age: on when the node's oldest event that Kafka has not acknowledged came in so long ago; empty: never.
        off: off again when each of these is below this part of what switched it on …
        hold: … for so long.
    """

    mode: str = "random"
    share: float = 0.9
    keep: tuple[str, ...] = ()
    on_events: int = 0
    on_bytes: int = 0
    on_age: str = ""
    off: float = 0.5
    hold: str = "2 seconds"

    on_age_ms = Milliseconds("on_age")
    hold_ms = Milliseconds("hold")

    def __post_init__(self) -> None:
        one_of("mode", self.mode, ("random", "semantic"))
        if not 0 < self.share < 1:
            raise ConfigError("must be more than 0 and less than 1", key="share", remedy="0.9 leaves one in ten")
        if not 0 <= self.off < 1:
            raise ConfigError("must be from 0 to below 1", key="off")
        if bool(self.keep) != (self.mode == "semantic"):
            remedy = "Name what is always kept, or use mode = 'random'"
            raise ConfigError("keep goes with mode = 'semantic'", key="keep", remedy=remedy)
        for index, text in enumerate(self.keep):
            try:
                KeepTest.read(text)
            except ValueError as error:
                remedy = 'Write e.g. amount >= 100, or kind in ["buy"]'
                raise ConfigError(str(error), key=f"keep[{index}]", remedy=remedy) from None
        durations(self, "hold", "on_age")
        if self.on_events < 0 or self.on_bytes < 0:
            raise ConfigError("must not be negative", key="on_events" if self.on_events < 0 else "on_bytes")
        if not (self.on_events or self.on_bytes or self.on_age):
            raise ConfigError("nothing switches it on", key="on_events", remedy="Set on_events, on_bytes or on_age")

    @cached_property
    def tests(self) -> tuple[KeepTest, ...]:
        return tuple(KeepTest.read(text) for text in self.keep)


ENVELOPE_COLUMNS = ("event_id", "source", "tenant", "received_at", "event_time", "origin", "weight")
"""What SQL sees of every event beside the fields of its payload."""

# Used by the machinery, not promised to SQL.
_HIDDEN_COLUMNS = (
    *("reason", "warned", "halted", "payload", "fingerprint", "suspect"),
    *("topic", "partition", "offset", "bronze_at", "dedupe_key"),
)
_TAKEN = frozenset((*ENVELOPE_COLUMNS, *_HIDDEN_COLUMNS))


def column_of(field: str) -> str:
    """What SQL calls a field of the payload: ``source_`` where the envelope has a column ``source``."""
    return f"{field}_" if field in _TAKEN else field


CONTENT_TYPES = (
    *("application/json", "application/x-ndjson", "application/jsonl"),
    *("application/cloudevents+json", "application/cloudevents-batch+json"),
)
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.]*)\}")


@dataclass(frozen=True, slots=True)
class Template:
    """A value made of fields of the payload, such as ``{rsvp_id}:{mtime}``; dots descend into objects."""

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
        format: of the payload: ``json``, or ``avro`` by the schemas of a registry, which only other producers write.
        unwrap: path of the object in the payload that holds the event's fields, e.g. ``payload`` for JSON of Kafka
            Connect; empty: the payload itself.
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
    format: str = "json"
    unwrap: str = ""
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

    dedupe_horizon_ms = Milliseconds("dedupe_horizon")
    retention_ms = Milliseconds("retention")

    def __post_init__(self) -> None:
        if not _TOPIC.fullmatch(self.topic):
            raise ConfigError(f"{self.topic!r} is no Kafka topic name", key="topic", remedy="Use [a-zA-Z0-9._-]")
        if not self.event_time.strip():
            raise ConfigError("it is empty", key="event_time", remedy="Write received_at if events say no time")
        at_least("partitions", self.partitions, 1)
        at_least("max_event_bytes", self.max_event_bytes, 1)
        at_least("replicas", self.replicas, 1)
        one_of("guarantee", self.guarantee, ("exactly_once", "at_least_once", "at_most_once"))
        if not 1 <= self.min_isr <= self.replicas:
            raise ConfigError("must be between 1 and replicas", key="min_isr", remedy="Raise replicas, or lower it")
        at_least("max_rate", self.max_rate, 0)
        at_least("max_connections", self.max_connections, 0)
        for kind in self.content_types:
            one_of("content_types", kind, CONTENT_TYPES)
        durations(self, "retention", "lateness", "dedupe_horizon", "bronze_retention")
        checks_of(self.table_expectations, "table_expectations")
        for name in self.table_expectations.keys() & self.expectations.keys():
            raise ConfigError("the name is taken", key=f"table_expectations.{name}", remedy="Names are unique")
        for key in ("event_id", "key"):
            text = getattr(self, key)
            if text and not Template(text).fields:
                raise ConfigError(f"{text!r} names no field", key=key, remedy="Write e.g. '{rsvp_id}:{mtime}'")

        one_of("format", self.format, ("json", "avro"))
        if self.format == "avro" and (self.collectors or self.feeds):
            raise ConfigError(
                "collectors and feeds bring JSON",
                key="collectors" if self.collectors else "feeds",
                remedy="Payloads in Avro come from the producers of the topic; leave it out",
            )
        if self.unwrap and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", self.unwrap):
            raise ConfigError(f"{self.unwrap!r} is no path", key="unwrap", remedy="Write e.g. unwrap = 'payload'")
        one_of("respond", self.respond, ("", "sync", "half_async", "full_async"))
        if bool(self.respond) != (self.answer is not None):
            raise ConfigError("respond and answer go together", key="respond", remedy="Add [sources.NAME.answer]")
        names = [feed.name for feed in self.feeds]
        if len(set(names)) < len(names):
            raise ConfigError("two feeds have the same name", key="feeds", remedy="Give each a name = …")
        for name in self.enrich:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", name):
                raise ConfigError(f"{name!r} is no name of a header", key="enrich", remedy="Use [a-z][a-z0-9_]*")

    @cached_property
    def unwrap_path(self) -> tuple[str, ...]:
        return tuple(self.unwrap.split(".")) if self.unwrap else ()

    def fields_in(self, payload: Any) -> Any:
        """The object in a parsed payload that holds the event's fields; None if absent."""
        for step in self.unwrap_path:
            payload = payload.get(step) if isinstance(payload, Mapping) else None
        return payload

    @property
    def checks(self) -> tuple[Check, ...]:
        """What is expected of its batches and of the whole table."""
        return checks_of(self.table_expectations, f"sources.{self.name}.table_expectations")

    def expected(self, action: str) -> dict[str, str]:
        """Predicates over each event with this action, by name."""
        return {name: found.sql for name, found in self.expectations.items() if found.action == action}

    @cached_property
    def event_id_template(self) -> Template | None:
        return Template(self.event_id) if self.event_id else None

    @cached_property
    def key_template(self) -> Template | None:
        """None: the event id is the key."""
        return Template(self.key) if self.key else None

    @property
    def latest(self) -> str:
        """The compacted topic with the newest event of each key."""
        return f"{self.topic}.latest"
