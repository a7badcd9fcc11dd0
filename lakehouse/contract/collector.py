"""Collectors of the pipeline model: the ways in which a source's events come in, and what each kind needs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lakehouse.contract.errors import ConfigError

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
        if self.ack not in ("durable", "none"):
            raise ConfigError(f"{self.ack!r} is not known", key="ack", remedy="Use one of: durable, none")
        if self.framing not in ("event", "lines"):
            raise ConfigError(f"{self.framing!r} is not known", key="framing", remedy="Use one of: event, lines")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"{self.port} is no port", key="port")
        if self.buffer_bytes < 4_096:
            raise ConfigError("must be at least 4096", key="buffer_bytes")
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
