"""Admits events: checks each event at the border and gives it an envelope.

The border checks that a payload is a JSON object of bounded size and depth, its event id and key, that the required
fields are present and of the JSON type that the schema asks for, and the expectations that the source wants judged
here (:mod:`ingest.border.expectations`). The readers of bronze check the whole schema and every expectation with
Spark. Nothing is dropped: a refused event continues with ``envelope.reject`` set and ends in quarantine.

A two-step collection splits this. A *front* node (:class:`FrontBorder`) writes payloads unread to ``TOPIC.raw``, and
:mod:`ingest.relay` validates and enriches them in a consumer group of its own. The front chooses the event id, at
random or from the place in the upstream; if the source names an id in the payload, the second step replaces it. The
order of a stream upstream is kept. The order of events by HTTP is kept only if a client awaits each acknowledgement
from the same node and the source has one partition.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from lakehouse.contract.envelope import MAX_ID_BYTES, WEIGHT, Envelope, EventLines, about, fingerprint, new_event_id
from lakehouse.contract.pipeline import Source, Template
from lakehouse.contract.pipeline.expectations import BORDER
from lakehouse.contract.pipeline.source import ShedSpec
from lakehouse.contract.sql.ddl import JSON_NAMES, find_field, parse_ddl

MAX_DEPTH = 100  # of nested objects and arrays
KEPT_BYTES = 65_536  # kept of an event that is too large
RAW_SUFFIX = ".raw"
RAW_PLACE = "raw"  # extra header of a refined event: its place in the raw topic
RAW_ID = "raw_id"  # the same: the id that the front node gave it

SHED_CHECK_S = 0.05  # between two checks of what waits

logger = logging.getLogger(__name__)
Extra = tuple[tuple[str, str], ...]
_lines = EventLines(logger)
_SHORT = MAX_ID_BYTES // 4  # a text of this many characters never has more bytes
_SHALLOW = 2 * MAX_DEPTH  # a payload of this size cannot be nested deeper
_EXACT = 2**53  # from here on a float may stand for several integers
_NEEDS = "needs fields that are absent, null or not plain values"
_UNSURE: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event is refused: a reason for its sender and for quarantine, an HTTP status, and a code for programs."""

    reason: str
    status: int
    code: str


@dataclass(slots=True)
class Admitted:
    """An event with its envelope. Not frozen: freezing would triple the cost of making one.

    Attributes:
        envelope: with ``reject`` if there is a ``refusal``.
        payload: untouched; only the beginning of an event that is too large.
        shed: load shedding drops it.
    """

    envelope: Envelope
    key: bytes
    payload: bytes
    refusal: Refusal | None
    shed: bool = False


class Border:
    """Admits the events of one source.

    Args:
        tenant: default tenant of its events.
        collector: id of this node.
        clock: nanoseconds since the epoch.
        file: of the pipeline, for errors.
        shedder: drops events under overload; None: never.

    Raises:
        ConfigError: an expectation cannot be judged at the border.
    """

    def __init__(
        self,
        source: Source,
        *,
        tenant: str,
        collector: str,
        clock: Callable[[], int] = time.time_ns,
        file: Path | None = None,
        shedder: Shedder | None = None,
    ) -> None:
        self.source = source
        self._shedder = shedder
        self._name = source.name
        self._tenant = tenant
        self._collector = collector
        self._clock = clock
        self._unwraps = bool(source.unwrap)
        self._id_of = None if source.event_id_template is None else _renderer(source.event_id_template)
        self._key_of = None if source.key_template is None else _renderer(source.key_template)
        declared = parse_ddl(source.schema)
        self._required: list[tuple[str, tuple[str, ...], frozenset[type]]] = []
        for path in source.required:
            steps = tuple(path.split("."))
            field = find_field(declared, steps)
            self._required.append((path, steps, field.json if field is not None else frozenset()))
        self._identify_good = _good_identity(source.event_id_template, source.key_template)
        self._good_fields = [(path, types or _ANY) for path, steps, types in self._required if len(steps) == 1]
        self._failed: Callable[[Mapping[str, Any]], str | None] | None = None
        if any(expectation.at == BORDER for expectation in source.expectations.values()):
            from ingest.border.expectations import compile_expectations  # with sqlglot, which is slow to import

            self._failed = compile_expectations(source, file)
        self._flaw = self._lacks if self._required else None
        # The remaining check of an event with these fields, or None.
        self._flaw_of_good = self._lacks if len(self._good_fields) < len(self._required) else None
        if self._failed is not None:
            self._flaw = self._lacks_or_fails if self._required else self._fails
            self._flaw_of_good = self._lacks_or_fails if self._flaw_of_good else self._fails

    def admit(
        self,
        payload: bytes,
        *,
        suspect: bool = False,
        origin: str | None = None,
        tenant: str = "",
        max_bytes: int = 0,
        fallback_id: str | None = None,
        extra: Extra = (),
        refusal: Refusal | None = None,
    ) -> Admitted:
        """Check one event and give it an envelope. Never raises because of the payload.

        Args:
            suspect: Kafka may have the event already.
            origin: lane and index of an event that its upstream can repeat, so that a generated id is the same then.
            tenant: owner of the event; empty: the node's tenant.
            max_bytes: a limit below the source's; 0: the source's.
            fallback_id: its id if the payload has none.
            extra: further headers.
            refusal: why it is refused already.
        """
        limit = self.source.max_event_bytes
        if 0 < max_bytes < limit:
            limit = max_bytes
        if len(payload) > limit:
            reason = f"the event has {len(payload)} bytes, more than the {limit} that are allowed"
            fields = event_id = key = None
            refusal = Refusal(reason, 413, "too-large")
            payload = payload[:KEPT_BYTES]
        elif refusal is not None:
            fields = event_id = key = None
        else:
            fields, event_id, key, refusal = self._judge(payload)
        if fallback_id is not None:
            event_id = event_id or fallback_id
        if event_id is None:
            event_id = new_event_id() if origin is None else repeatable_id(origin, payload)
        shed = False
        if self._shedder is not None and refusal is None and fields is not None:
            weight = self._shedder.judge(event_id, fields)
            shed = weight is None
            extra = (weight or ()) + extra
        envelope = Envelope(
            event_id,
            self._name,
            tenant or self._tenant,
            self._clock() // 1000,
            self._collector,
            fingerprint(payload),
            suspect,
            None if refusal is None else refusal.reason,
            extra,
        )
        return Admitted(envelope, (key or event_id).encode(), payload, refusal, shed)

    def admit_all(self, payloads: Sequence[bytes], *, tenant: str = "", max_bytes: int = 0) -> list[Admitted]:
        """:meth:`admit` of each, at half the cost: one pass accepts what is clearly good."""
        if self._shedder is not None:
            return [self.admit(payload, tenant=tenant, max_bytes=max_bytes) for payload in payloads]
        name, collector, whose = self._name, self._collector, tenant or self._tenant
        limit = min(self.source.max_event_bytes, max_bytes or self.source.max_event_bytes)
        identify, wanted, at = self._identify_good, self._good_fields, self._clock() // 1000
        loads, mark, flaw = orjson.loads, fingerprint, self._flaw_of_good
        found: list[Admitted] = []
        fields: Any
        for payload in payloads:
            try:
                fields = loads(payload) if len(payload) <= limit else None
            except orjson.JSONDecodeError:
                fields = None
            if self._unwraps:
                fields = self.source.fields_in(fields)
            good = type(fields) is dict and (
                len(payload) <= _SHALLOW or payload.count(b"{") + payload.count(b"[") <= MAX_DEPTH
            )
            event_id, key = identify(fields) if good else _UNSURE
            if key is not None and event_id is not None:
                for path, types in wanted:
                    if type(fields.get(path)) not in types:
                        break
                else:
                    if flaw is None or flaw(fields) is None:
                        envelope = Envelope(event_id, name, whose, at, collector, mark(payload))
                        found.append(Admitted(envelope, key.encode(), payload, None))
                        continue
            found.append(self.admit(payload, tenant=tenant, max_bytes=max_bytes))
        return found

    def _judge(self, payload: bytes) -> tuple[dict[str, Any] | None, str | None, str | None, Refusal | None]:
        """Fields, event id, key and refusal of a payload, each as far as known."""
        try:
            fields = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            return None, None, None, Refusal(f"not JSON: {error}", 400, "not-json")
        if not isinstance(fields, dict):
            name = JSON_NAMES.get(type(fields), "that")
            return None, None, None, Refusal(f"an event is a JSON object, not {name}", 422, "not-an-object")
        # Counting brackets is cheap and gives an upper bound of the depth.
        may_be_deep = len(payload) > _SHALLOW and payload.count(b"{") + payload.count(b"[") > MAX_DEPTH
        if may_be_deep and _depth(fields) > MAX_DEPTH:
            return None, None, None, Refusal(f"nested more than {MAX_DEPTH} deep", 422, "too-deep")
        if self._unwraps:
            fields = self.source.fields_in(fields)
            if not isinstance(fields, dict):
                return None, None, None, Refusal(f"missing {self.source.unwrap}", 422, "missing-field")
        event_id, key, refusal = self._identify(fields)
        if refusal is None and self._flaw is not None:
            refusal = self._flaw(fields)
        return fields, event_id, key, refusal

    def _identify(self, fields: dict[str, Any]) -> tuple[str | None, str | None, Refusal | None]:
        """Event id, key and refusal; the id is None if the payload has no usable one."""
        event_id = key = None
        if self._id_of is not None:
            event_id = self._id_of(fields)
            if event_id is None:
                return None, None, _bad_id(f"event id {self.source.event_id} {_NEEDS}")
            if len(event_id) > _SHORT and len(event_id.encode()) > MAX_ID_BYTES:
                return None, None, _bad_id(f"event id is longer than {MAX_ID_BYTES} bytes")
            if "e+" in event_id and _inexact(self.source.event_id_template, fields):
                return None, None, _bad_id("event id has a number that is too large to be exact; send it as a string")
        if self._key_of is not None:
            key = self._key_of(fields)
            if key is None:
                return event_id, None, _bad_id(f"key {self.source.key} {_NEEDS}")
            if len(key) > _SHORT and len(key.encode()) > MAX_ID_BYTES:
                return event_id, None, _bad_id(f"key is longer than {MAX_ID_BYTES} bytes")
        return event_id, key, None

    def _lacks(self, fields: dict[str, Any]) -> Refusal | None:
        """Refuse the first required field that is absent, null, or of a type that the schema rules out."""
        path = ""
        try:
            for path, steps, types in self._required:
                value: Any = fields
                for step in steps:
                    value = value[step]
                if value is None:
                    raise KeyError
                if types and type(value) not in types:
                    kind = JSON_NAMES.get(type(value), "an object")
                    return Refusal(f"does not fit the schema: {path} is {kind}", 422, "schema")
        except (KeyError, TypeError):
            return Refusal(f"missing {path}", 422, "missing-field")
        return None

    def _fails(self, fields: dict[str, Any]) -> Refusal | None:
        """Refuse the first failed expectation, in the words of bronze's readers."""
        name = self._failed(fields) if self._failed is not None else None
        return None if name is None else Refusal(f"expectation {name} failed", 422, "expectation")

    def _lacks_or_fails(self, fields: dict[str, Any]) -> Refusal | None:
        return self._lacks(fields) or self._fails(fields)


def _depth(value: Any) -> int:
    """Nesting depth of objects and arrays, counted to one past the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [item for item in inner if isinstance(item, (dict, list))]
    return depth


def _renderer(template: Template) -> Callable[[dict[str, Any]], str | None]:
    """:meth:`Template.render`, without its loop if the template is a single top-level field."""
    path = _only_field(template)
    if not path:
        return template.render

    def render_field(fields: dict[str, Any]) -> str | None:
        value = fields.get(path)
        kind = type(value)
        if kind is str:
            return value
        return str(value) if kind is int else template.render(fields)

    return render_field


def _only_field(template: Template | None) -> str:
    """The top-level field that the whole template consists of, or empty."""
    path = template.fields[0] if template is not None else ""
    return path if template is not None and template.text == "{" + path + "}" and "." not in path else ""


def _good_identity(
    id_template: Template | None, key_template: Template | None
) -> Callable[[dict[str, Any]], tuple[str | None, str | None]]:
    """A function that returns id and key of an event if both are clearly valid, else None for one of them."""
    id_field, key_field = _only_field(id_template), _only_field(key_template)
    if id_field and key_field:

        def identify_by_fields(fields: dict[str, Any]) -> tuple[str | None, str | None]:
            event_id, key = fields.get(id_field), fields.get(key_field)
            if type(event_id) is int:
                event_id = str(event_id)
            elif type(event_id) is not str or len(event_id) > _SHORT:
                return None, None
            if type(key) is int:
                key = str(key)
            elif type(key) is not str or len(key) > _SHORT:
                return None, None
            return event_id, key

        return identify_by_fields
    id_of = None if id_template is None else _renderer(id_template)
    key_of = None if key_template is None else _renderer(key_template)

    def identify(fields: dict[str, Any]) -> tuple[str | None, str | None]:
        event_id = new_event_id() if id_of is None else id_of(fields)
        if event_id is None or len(event_id) > _SHORT or (id_of is not None and "e+" in event_id):
            return None, None
        if key_of is None:
            return event_id, event_id
        key = key_of(fields)
        return event_id, key if key is not None and len(key) <= _SHORT else None

    return identify


def _inexact(template: Template | None, fields: dict[str, Any]) -> bool:
    """Whether a number in the template is a float that stands for several integers, so that two events would be one."""
    for path in template.fields if template is not None else ():
        value: Any = fields
        for step in path.split("."):
            value = value[step]
        if isinstance(value, float) and abs(value) >= _EXACT:
            return True
    return False


def _bad_id(problem: str) -> Refusal:
    return Refusal(f"the {problem}", 422, "bad-id")


def repeatable_id(origin: str, payload: bytes) -> str:
    digest = hashlib.blake2b(payload, digest_size=16, key=hashlib.blake2b(origin.encode(), digest_size=32).digest())
    return f"~{digest.hexdigest()}"


def tell_refused(envelope: Envelope, what: str = "is refused") -> None:
    """Log that an event is refused, at most a few times a second."""
    found = about(envelope.event_id, envelope.source, envelope.tenant)
    _lines.say(logging.INFO, what, envelope.reject or "", **found)


_ANY = frozenset({dict, list, str, int, float, bool})  # present and not null


def front_source(source: Source) -> Source:
    """The source as a front node sees it: raw topic, no schema, no templates, no answers."""
    unread: dict[str, Any] = {"schema": "", "event_id": "", "key": "", "required": (), "expectations": {}, "unwrap": ""}
    topic = source.topic + RAW_SUFFIX
    return dataclasses.replace(
        source, topic=topic, respond="", answer=None, enrich={}, shed=None, latest_topic=False, **unread
    )


class FrontBorder(Border):
    """Admits every payload that is not too large, without parsing it."""

    def admit(self, payload: bytes, *, origin: str | None = None, **options: Any) -> Admitted:
        event = super().admit(payload, origin=origin, **options)
        if origin is not None:  # the lane as key keeps the order of a stream upstream
            event.key = origin.rpartition("#")[0].encode()
        return event

    def admit_all(self, payloads: Sequence[bytes], **options: Any) -> list[Admitted]:
        return [self.admit(payload, **options) for payload in payloads]

    def _judge(self, payload: bytes) -> tuple[dict[str, Any] | None, str | None, str | None, Refusal | None]:
        return None, None, None, None


# --- load shedding


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for Kafka.

    Attributes:
        events: of the source, in the log.
        bytes: of the node's log.
        oldest_at: ``received_at`` of the node's oldest unacknowledged event, microseconds since the epoch; 0 if none.
    """

    events: int
    bytes: int
    oldest_at: int


class Shedder:
    """Sheds the events of one source while too much waits for Kafka: part of them are not taken at all.

    Shedding happens before the log: an acknowledged event is never shed, and a shed event is never acknowledged. The
    verdict depends on the event id alone, so a repeated event gets the same one while shedding is on. Events taken
    meanwhile carry a *weight*, 1 / (1 - share), the number of events that each stands for. So ``sum(weight)`` estimates
    what ``count(*)`` would have been. Events that could not have been shed weigh 1.

    Args:
        now: seconds, monotonic.
        clock: nanoseconds since the epoch, as in ``received_at``.

    Attributes:
        count: events shed since the node started.
    """

    def __init__(
        self,
        name: str,
        spec: ShedSpec,
        waiting: Callable[[], Waiting],
        *,
        now: Callable[[], float] = time.monotonic,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._name = name
        self._spec = spec
        self._waiting = waiting
        self._now = now
        self._clock = clock
        self._updated_at = float("-inf")
        self._calm_since: float | None = None
        self._least = int(spec.share * 2**64)
        self._weight = ((WEIGHT, repr(round(1 / (1 - spec.share), 9))),)
        self.on = False
        self.count = 0

    @property
    def share(self) -> float:
        """The share of events in force now; 0 while shedding is off."""
        self._update()
        return self._spec.share if self.on else 0.0

    def judge(self, event_id: str, fields: Mapping[str, Any]) -> Extra | None:
        """Headers of a valid event with this dedupe key and payload: its weight, or none; None: it is shed."""
        self._update()
        if not self.on or any(test.holds(fields) for test in self._spec.tests):
            return ()
        digest = hashlib.blake2b(event_id.encode(), digest_size=8, person=b"millrace-shed").digest()
        if int.from_bytes(digest, "big") >= self._least:
            return self._weight
        self.count += 1
        return None

    def _update(self) -> None:
        now = self._now()
        if now - self._updated_at < SHED_CHECK_S:
            return
        self._updated_at = now
        pressure = self._pressure(self._waiting())
        if pressure >= 1:
            if not self.on:
                logger.warning(
                    "source %s: too much waits for Kafka; shedding %.0f %%", self._name, 100 * self._spec.share
                )
            self.on, self._calm_since = True, None
        elif self.on and pressure >= self._spec.off:
            self._calm_since = None
        elif self.on:
            self._calm_since = now if self._calm_since is None else self._calm_since
            if now - self._calm_since >= self._spec.hold_ms / 1000:
                logger.warning("source %s: shedding stopped after %d events", self._name, self.count)
                self.on, self._calm_since = False, None

    def _pressure(self, waiting: Waiting) -> float:
        """How near the nearest limit is; 1 is reached."""
        spec = self._spec
        parts = [0.0]
        if spec.on_events:
            parts.append(waiting.events / spec.on_events)
        if spec.on_bytes:
            parts.append(waiting.bytes / spec.on_bytes)
        if spec.on_age_ms and waiting.oldest_at:
            parts.append((self._clock() / 1e6 - waiting.oldest_at / 1e3) / spec.on_age_ms)
        return max(parts)
