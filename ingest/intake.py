"""The way of events into the message log and on to Kafka.

:class:`Intake` is that way for one lane: border, log, delivery. :class:`RequestIntake` puts a whole request through it,
whichever protocol brought it: who sends, how much, border, log, answer. Neither waits: a result names the commit groups
that the answer has to wait for.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec
import orjson

from ingest.answers.acks import RecentEvents, Signer
from ingest.border.access import ApiKey, SenderGate
from ingest.border.admission import Admitted, Border, Extra, Refusal, tell_refused
from ingest.delivery import KafkaDelivery
from ingest.enrich import Enricher
from ingest.errors import LogFull, NotReady, RequestRefused, refusal_code
from ingest.log.message_log import MessageLog
from ingest.log.segments import NOWHERE, CommitGroup, LoggedEvent, SourceLane
from lakehouse.contract.envelope import MAX_ID_BYTES, UPSTREAM_ID

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_EVENTS = 5_000
MAX_ATTRIBUTE_BYTES = 8_192  # of all attributes of a CloudEvent
JSON = "application/json"
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"

T = TypeVar("T")

_ATTRIBUTE = re.compile(r"[a-z0-9]{1,64}")
_JSON_TYPE = re.compile(r"[^/;]+/(?:json|[^/;]+\+json)(?:\s*;.*)?", re.IGNORECASE)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MOST_LEVELS = 1_024  # of nesting that orjson accepts


class _Publication(msgspec.Struct):
    event: msgspec.Raw = msgspec.Raw(b"null")


_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_PUBLICATION = msgspec.json.Decoder(_Publication)


class Intake:
    """The way of one lane's events: border, log, delivery.

    Args:
        recent: remembers events that senders may ask about; None for one-way lanes.
        enricher: adds reference data to the headers.
    """

    def __init__(
        self,
        border: Border,
        lane: SourceLane,
        log: MessageLog,
        delivery: KafkaDelivery,
        recent: RecentEvents | None = None,
        enricher: Enricher | None = None,
    ) -> None:
        self.border = border
        self.lane = lane
        self.log = log
        self.one_way = recent is None  # nothing is acknowledged
        self._delivery = delivery
        self._recent = recent
        self.enricher = enricher

    def take(self, event: Admitted, position: int | None = None, extra: Extra = ()) -> LoggedEvent:
        """Append an event and send it on. A shed event is not in the log: its number is -1 and it has no group.

        Args:
            position: the upstream's next message.

        Raises:
            LogFull, LogUnavailable: the event was not taken.
        """
        envelope, lane = event.envelope, self.lane
        if event.shed:
            lane.shed += 1
            if position is not None:
                lane.position = position
            lane.cursor = dict(extra).get(UPSTREAM_ID, lane.cursor)
            return LoggedEvent(-1, lane, envelope, event.key, event.payload, NOWHERE, 0, None)
        if event.refusal is not None:
            tell_refused(envelope)
        if self.enricher is not None and event.refusal is None:
            extra += self.enricher(event)
        if extra:
            envelope = dataclasses.replace(envelope, extra=envelope.extra + extra)
        logged = self.log.append(lane, envelope, event.key, event.payload, position)
        if self._recent is not None:
            logged.fate = self._recent.logged(envelope)
        self._delivery.offer(logged)
        return logged

    def take_all(self, events: Sequence[Admitted]) -> list[LoggedEvent]:
        """Append events that came together and send them on, like :meth:`take` of each.

        All are taken or none, unless the source enriches or sheds. Raises like :meth:`take`.
        """
        if self.enricher is not None or [event for event in events if event.shed]:
            return [self.take(event) for event in events]
        rejected = self.lane.rejected
        logged = self.log.append_all(self.lane, events)
        if self.lane.rejected > rejected:
            for event in events:
                if event.refusal is not None:
                    tell_refused(event.envelope)
        if self._recent is not None:
            self._recent.logged_all(logged)
        self._delivery.offer_all(logged)
        return logged


@dataclass(slots=True)
class RequestResult:
    """The events of a request, in the log. Not frozen, like :class:`Admitted`.

    Attributes:
        groups: commit groups that the answer waits for.
        error: the answer instead, if every event was refused.
    """

    groups: tuple[CommitGroup, ...]
    answer: bytes
    error: RequestRefused | None = None
    events: Sequence[Admitted] = ()


@dataclass(slots=True)
class RequestIntake:
    """Takes requests for the sources of one node. ``not_ready``: returns why the node takes no events now, or empty."""

    intakes: Mapping[str, Intake]
    not_ready: Callable[[], str]
    gate: SenderGate
    signer: Signer

    def enter(self, source: str, kind: str, length: int, key: str | None) -> tuple[Intake, ApiKey]:
        """Judge a request by its head; returns the way of the source's events, and who sends.

        Args:
            kind: content type in lower case, without parameters.
            length: of the body in bytes; 0 if unknown.
            key: API key that was shown, or None.

        Raises:
            RequestRefused: the request is not taken.
            NotReady: no events of the source are taken now.
        """
        intake = self.intakes.get(source)
        try:
            if intake is None:
                raise RequestRefused(
                    f"there is no source {source!r} that takes events by HTTP", 404, code="unknown-source"
                )
            sender = self.gate.admit(intake.border.source, key)
            if length > MAX_BODY_BYTES:
                raise RequestRefused(f"the body has more than {MAX_BODY_BYTES} bytes", 413, code="body-too-large")
            if kind not in intake.border.source.content_types:
                wanted = " or ".join(intake.border.source.content_types)
                raise RequestRefused(f"send {wanted}", 415)
        except RequestRefused as refused:
            self.count(source if intake is not None else "", refused)
            raise
        self.check_ready(intake)
        return intake, sender

    def check_ready(self, intake: Intake) -> None:
        """Raise :class:`NotReady` if the node is not ready or the source's reference data is incomplete."""
        if reason := self.not_ready():
            raise NotReady(reason)
        enricher = intake.enricher
        if enricher is not None and enricher.missing:
            source = intake.border.source.name
            raise NotReady(
                f"the reference data of source {source!r} is being read: {enricher.missing}", enricher.complete
            )

    def take(
        self, intake: Intake, sender: ApiKey, kind: str, body: bytes, attributes: Mapping[str, str] | None = None
    ) -> RequestResult:
        """Put the events of a body into the log and send them on.

        Args:
            attributes: of the CloudEvent whose data the body is (binary mode).

        Raises:
            RequestRefused: the body is not taken, or the rate is exceeded.
            LogFull, LogUnavailable: as of :meth:`Intake.take`.
        """
        source = intake.border.source
        try:
            one, bodies = (True, (body,)) if attributes is not None else split(kind, body)
            self.gate.spend(source, sender, len(bodies))
        except RequestRefused as refused:
            self.count(source.name, refused)
            raise
        if not intake.log.has_room(len(body), len(bodies)):
            raise LogFull(intake.log.used, intake.log.limit)
        limits: dict[str, Any] = {"tenant": sender.tenant, "max_bytes": sender.max_event_bytes}
        cloud = attributes is not None or kind in (STRUCTURED, BATCHED)
        if one:
            event = (
                _cloud_event(intake.border, body, attributes, limits) if cloud else intake.border.admit(body, **limits)
            )
            return self._take_one(intake, event)
        if cloud:
            admitted = [_cloud_event(intake.border, text, None, limits) for text in bodies]
        else:
            admitted = intake.border.admit_all(bodies, **limits)
        good = not [event for event in admitted if event.refusal is not None or event.shed]
        kept = [good or event.refusal is None or self.gate.keep_reject(source.name) for event in admitted]
        taken = admitted if good else [event for event, keep in zip(admitted, kept, strict=True) if keep]
        logged = intake.take_all(taken)
        if intake.one_way:
            return RequestResult((), b"", events=admitted)
        groups = tuple({id(event.group): event.group for event in logged if event.group is not None}.values())
        if good:
            tokens = self.signer.sign_all([event.envelope for event in admitted])
            return RequestResult(groups, b'{"tokens":%b,"rejected":[]}' % tokens, None, admitted)
        kept = [keep and not event.shed for event, keep in zip(admitted, kept, strict=True)]
        answer, error = self._answer(admitted, kept)
        return RequestResult(groups, answer, error, admitted)

    def _take_one(self, intake: Intake, event: Admitted) -> RequestResult:
        name, refusal = intake.border.source.name, event.refusal
        keep = refusal is None or self.gate.keep_reject(name)
        group = intake.take(event).group if keep else None
        if intake.one_way:
            return RequestResult((), b"", events=(event,))
        groups = () if group is None else (group,)
        if event.shed:
            answer = orjson.dumps({"shed": True, "event_id": event.envelope.event_id})
            return RequestResult(groups, answer, None, (event,))
        token = self.signer.sign(event.envelope) if keep else b""
        if refusal is None:
            return RequestResult(groups, b'{"token":"%b"}' % token, None, (event,))
        members: dict[str, Any] = {"token": token.decode()} if token else {}
        error = RequestRefused(refusal.reason, refusal.status, code=refusal.code, **members)
        return RequestResult(groups, b"", error, (event,))

    def _answer(self, events: Sequence[Admitted], kept: Sequence[bool]) -> tuple[bytes, RequestRefused | None]:
        sign = self.signer.sign
        tokens = [sign(event.envelope).decode() if keep else None for event, keep in zip(events, kept, strict=True)]
        rejected = [
            {"index": index, "code": event.refusal.code, "detail": event.refusal.reason}
            for index, event in enumerate(events)
            if event.refusal is not None
        ]
        if len(rejected) < len(events):
            answer: dict[str, Any] = {"tokens": tokens, "rejected": rejected}
            if shed := [index for index, event in enumerate(events) if event.shed]:
                answer["shed"] = shed
            return orjson.dumps(answer), None
        return b"", RequestRefused("every event is refused", 422, code="all-refused", tokens=tokens, rejected=rejected)

    def count(self, source: str, refused: RequestRefused) -> None:
        """Count a request that is refused as a whole; nothing of it is kept."""
        self.gate.refused[source, refusal_code(refused)] += 1


def _cloud_event(
    border: Border, body: bytes, attributes: Mapping[str, str] | None, limits: Mapping[str, Any]
) -> Admitted:
    try:
        payload, event_id, extra = structured(body) if attributes is None else cloud_event(attributes, body)
    except NotACloudEvent as bad:
        return border.admit(body, refusal=Refusal(f"not a CloudEvent: {bad}", 422, "cloudevent"), **limits)
    return border.admit(payload, fallback_id=event_id, extra=extra, **limits)


def split(kind: str, body: bytes) -> tuple[bool, Sequence[bytes]]:
    """Whether the body is a single event, and the events. Raises RequestRefused: there are no events, or too many."""
    if kind == STRUCTURED:
        return True, (body,)
    if kind in (JSON, BATCHED):
        if body.lstrip()[:1] != b"[":
            return True, (body,)
        try:
            _check_count(len(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return True, (body,)  # the border refuses and keeps it
        return False, elements(body)
    events = [line for line in map(bytes.strip, body.split(b"\n")) if line]
    _check_count(len(events))
    return False, events


def elements(text: bytes) -> list[bytes]:
    """The elements of an array, byte for byte. ``text`` is an array that orjson accepts.

    Parsing an event and serializing it again would change it: numbers are rounded to doubles, white space and escapes
    are lost.
    """
    return [bytes(element) for element in _decode(_ELEMENTS, text)]


def published_event(text: bytes) -> bytes:
    """The member ``event`` of an object that orjson accepts, byte for byte; ``null`` if absent, last if repeated."""
    return bytes(_decode(_PUBLICATION, text).event)


def presented_key(name: bytes, value: bytes) -> str | None:
    """The API key in a header (name in lower case), or None."""
    if name == b"authorization" and value[:7].lower() == b"bearer ":
        return value[7:].strip().decode("latin-1")
    if name == b"x-api-key":
        return value.strip().decode("latin-1")
    return None


def first_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The first API key in headers, or None."""
    return next((key for name, value in headers if (key := presented_key(name.lower(), value))), None)


def _decode(decoder: msgspec.json.Decoder[T], text: bytes) -> T:
    try:
        return decoder.decode(text)
    except RecursionError:  # msgspec stops at Python's limit, below what orjson accepts
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(limit + _MOST_LEVELS)
        try:
            return decoder.decode(text)
        finally:
            sys.setrecursionlimit(limit)


def _check_count(events: int) -> None:
    if not events:
        raise RequestRefused("there is no event in the body", 400, code="empty")
    if events > MAX_EVENTS:
        raise RequestRefused(f"the body has {events} events, more than {MAX_EVENTS}", 413, code="too-many-events")


# --- CloudEvents


class NotACloudEvent(ValueError):
    """An event that breaks the specification; the text is the reason."""


def structured(text: bytes) -> tuple[bytes, str, Extra]:
    """An event in the JSON format, as :func:`cloud_event` returns it. Raises NotACloudEvent."""
    try:
        orjson.loads(text)  # the stricter of the two
        members = _MEMBERS.decode(text)
    except (orjson.JSONDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise NotACloudEvent(f"it is not a JSON object: {error}") from None
    data, coded = members.pop("data", None), members.pop("data_base64", None)
    attributes = {name: value for name, raw in members.items() if (value := orjson.loads(bytes(raw))) is not None}
    if data is not None and coded is not None:
        raise NotACloudEvent("it has both data and data_base64")
    if coded is not None:
        try:
            payload = base64.b64decode(orjson.loads(bytes(coded)), validate=True)
        except (TypeError, binascii.Error, ValueError):
            raise NotACloudEvent("data_base64 is not base64") from None
        return cloud_event(attributes, payload)
    if data is None:
        raise NotACloudEvent("it has no data")
    return cloud_event(attributes, bytes(data))


def cloud_event(attributes: Mapping[str, Any], payload: bytes) -> tuple[bytes, str, Extra]:
    """Payload, id and Kafka headers of a CloudEvent (1.0) with this data, which stays as it is byte for byte.

    The id is the source and the id of the CloudEvent, which name an event together; a space, which a URI cannot hold,
    is between them. Headers are named as in the CloudEvents binding for Kafka: ``ce_id``, ``ce_source``, …
    ``attributes`` are named without ``ce-``. Raises NotACloudEvent: an attribute is absent or wrong.
    """
    if attributes.get("specversion") != "1.0":
        raise NotACloudEvent("specversion is not 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise NotACloudEvent(f"{name} is missing")
    if not _JSON_TYPE.fullmatch(kind := str(attributes.get("datacontenttype", "application/json"))):
        raise NotACloudEvent(f"datacontenttype is {kind[:100]}; an event's data is JSON")
    headers = []
    for name, value in attributes.items():
        if not _ATTRIBUTE.fullmatch(name):
            raise NotACloudEvent(f"{name[:64]!r} is no name of an attribute")
        if isinstance(value, bool):
            value = str(value).lower()
        if not isinstance(value, str | int) or any(ord(c) < 32 or ord(c) == 127 for c in str(value)):
            raise NotACloudEvent(f"{name} is no plain value")
        headers.append(("content-type" if name == "datacontenttype" else f"ce_{name}", str(value)))
    if " " in attributes["source"]:
        raise NotACloudEvent("source is no URI")
    if sum(len(name) + len(value.encode()) for name, value in headers) > MAX_ATTRIBUTE_BYTES:
        raise NotACloudEvent(f"its attributes have more than {MAX_ATTRIBUTE_BYTES} bytes")
    if "time" in attributes:
        try:
            if datetime.fromisoformat(str(attributes["time"])).tzinfo is None:
                raise ValueError
        except ValueError:
            raise NotACloudEvent("time is no RFC 3339 timestamp") from None
    event_id = f"{attributes['source']} {attributes['id']}"
    if len(event_id.encode()) > MAX_ID_BYTES:
        raise NotACloudEvent(f"its source and id have more than {MAX_ID_BYTES} bytes")
    return payload, event_id, tuple(headers)
