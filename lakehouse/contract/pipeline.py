"""The pipeline model: what ``conf/pipelines/NAME/pipeline.toml`` declares, as frozen dataclasses.

Loading a pipeline starts no JVM and connects to nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import NAME_PATTERN, QUARANTINE
from lakehouse.contract.tomlfile import build, duration_ms, read_toml

COLLECTOR_KINDS = ("websocket", "http")
OPERATORS = ("top_n", "distinct")
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
        _one_of("kind", self.kind, COLLECTOR_KINDS)


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
        _duration("retention", self.retention)
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


@dataclass(frozen=True, slots=True)
class Product:
    """A table kept up to date from one source.

    Attributes:
        name: key of the table in the TOML file; also the table's name.
        layer: ``silver`` or ``gold``.
        source: the source it derives from.
        sql: Spark SQL over the source's name, the text of the file named in the TOML: the whole product
            (without ``operator``) or the operator's input.
        operator: one of :data:`OPERATORS`, or empty.
        storage: ``upsert`` (one row a key, the windows a batch touches are rewritten) or ``append`` (rows are
            partials, folded on read and by maintenance; for results of many keys).
        time: column of the input that a window stands on (operators).
        window: length of the tumbling window, e.g. ``1 minute`` (operators).
        item: column that is counted (operators).
        n: rows a window (``top_n``).
        max_items: items tracked a window (``top_n``): counts are exact up to about 3/4 of it.
        lg_k: log2 of the sketch's slots (``distinct``).
        channel: whether it is served to subscribers.
    """

    layer: str
    source: str
    sql: str
    operator: str = ""
    storage: str = "upsert"
    time: str = "received_at"
    window: str = "1 minute"
    item: str = ""
    n: int = 10
    max_items: int = 10_000
    lg_k: int = 12
    channel: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        _one_of("layer", self.layer, ("silver", "gold"))
        _one_of("storage", self.storage, ("upsert", "append"))
        _duration("window", self.window)
        if self.operator:
            _one_of("operator", self.operator, OPERATORS)
            if not self.item:
                raise ConfigError("an operator needs the column it counts", key="item", remedy="Add item = '…'")
        if not 1 <= self.n <= 10_000:
            raise ConfigError("must be between 1 and 10000", key="n")
        if not 4 <= self.lg_k <= 21:
            raise ConfigError("must be between 4 and 21", key="lg_k")

    @property
    def window_ms(self) -> int:
        """Length of the window in milliseconds."""
        return duration_ms(self.window)


@dataclass(frozen=True)
class Pipeline:
    """A folder's worth of sources and products.

    Attributes:
        name: the folder's name.
        sources: by name.
        products: by name.
        path: the ``pipeline.toml`` it was read from.
    """

    sources: dict[str, Source]
    products: dict[str, Product] = field(default_factory=dict)
    name: str = ""
    path: Path = Path()

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a pipeline needs a source", key="sources", remedy="Add a [sources.NAME] table")
        seen: set[str] = {QUARANTINE}
        for kind, names in (("sources", self.sources), ("products", self.products)):
            for name in names:
                if not NAME_PATTERN.fullmatch(name):
                    raise ConfigError("not a table name", key=f"{kind}.{name}", remedy="Use [a-z][a-z0-9_]*")
                if name in seen:
                    raise ConfigError("the name is taken", key=f"{kind}.{name}", remedy="Names of tables are unique")
                seen.add(name)
        for name, product in self.products.items():
            if product.source not in self.sources:
                raise ConfigError(
                    f"there is no source {product.source!r}",
                    key=f"products.{name}.source",
                    remedy=f"Sources: {', '.join(self.sources)}",
                )

    def products_of(self, source: str) -> list[Product]:
        """Products that derive from this source, in the order of the file."""
        return [p for p in self.products.values() if p.source == source]


def load_pipeline(folder: Path) -> Pipeline:
    """The pipeline in ``folder`` (its ``pipeline.toml`` and the SQL files that it names).

    Raises:
        ConfigError: the file or something in it is wrong.
    """
    path = folder / "pipeline.toml"
    raw = read_toml(path)
    for kind in ("sources", "products"):
        for name, table in raw.get(kind, {}).items():
            if isinstance(table, dict):
                table["name"] = name
                if kind == "products" and isinstance(table.get("sql"), str) and table["sql"].endswith(".sql"):
                    table["sql"] = _sql(folder / table["sql"], key=f"products.{name}.sql", file=path)
    raw["path"] = str(path)
    raw["name"] = folder.name
    return build(Pipeline, raw, file=path)


def _sql(path: Path, *, key: str, file: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}", key=key, file=file) from None


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{value!r} is not known", key=key, remedy=f"Use one of: {', '.join(allowed)}")


def _duration(key: str, value: str) -> None:
    try:
        duration_ms(value)
    except ValueError as error:
        raise ConfigError(str(error), key=key) from None
