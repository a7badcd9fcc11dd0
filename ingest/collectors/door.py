"""What a request with events goes through, whichever protocol brought it: who sends, how much, border, log, answer.

No I/O here and nothing to wait for: :meth:`Door.take` says which groups the answer has to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ingest.border import Admitted
from ingest.cut import elements
from ingest.errors import EventRefused, IngestError, LogFull, LogUnavailable
from ingest.events import Group
from ingest.limits import Caller, Gate
from ingest.source import Intake
from ingest.tokens import Signer

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_EVENTS = 5_000
RETRY_AFTER_S = 1

JSON = "application/json"
LINES = ("application/x-ndjson", "application/jsonl")

TITLES: Mapping[int, str] = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    411: "Length required",
    413: "Too large",
    415: "Unsupported media type",
    422: "Event refused",
    429: "Too many requests",
    431: "Request header fields too large",
    502: "Bad gateway",
    503: "Not taking events now",
    504: "Gateway timeout",
}
CODES: Mapping[int, str] = {
    400: "bad-request",
    401: "unauthorized",
    403: "forbidden",
    404: "not-found",
    405: "method-not-allowed",
    408: "timeout",
    411: "length-required",
    413: "too-large",
    415: "content-type",
    422: "refused",
    429: "too-fast",
    431: "head-too-large",
    502: "bad-gateway",
    503: "unavailable",
    504: "answer-timeout",
}
"""The code of a refusal that has none of its own."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A request that may send to a source.

    Attributes:
        intake: of the source.
        caller: who sends.
    """

    intake: Intake
    caller: Caller


@dataclass(frozen=True, slots=True)
class Taken:
    """The events of a request, in the log.

    Attributes:
        groups: those to wait for before the answer goes out.
        answer: body of the answer.
        error: every event was refused: this is the answer instead.
        events: of the request, in order, also those that were refused.
    """

    groups: tuple[Group, ...]
    answer: bytes
    error: EventRefused | None = None
    events: Sequence[Admitted] = ()


@dataclass(slots=True)
class Door:
    """Takes requests for the sources of one node.

    Attributes:
        intakes: by source, for those that take events by HTTP.
        not_ready: why the node takes no events now; empty: it does.
        gate: keys and limits.
        signer: of the tokens.
        one_way: sources that acknowledge nothing.
    """

    intakes: Mapping[str, Intake]
    not_ready: Callable[[], str]
    gate: Gate
    signer: Signer
    one_way: Collection[str] = field(default_factory=tuple)

    def enter(self, source: str, kind: str, length: int, key: str | None) -> Pass:
        """Judge a request by its head.

        Args:
            source: from the path.
            kind: content type without parameters, in small letters.
            length: of the body in bytes; 0 where it is not known yet.
            key: that was shown, or None.

        Raises:
            EventRefused: the request is not taken.
            LogUnavailable: the node is not ready.
        """
        intake = self.intakes.get(source)
        try:
            if intake is None:
                raise EventRefused(
                    f"there is no source {source!r} that takes events by HTTP", 404, code="unknown-source"
                )
            caller = self.gate.admit(intake.border.source, key)
            if length > MAX_BODY_BYTES:
                raise EventRefused(f"the body has more than {MAX_BODY_BYTES} bytes", 413, code="body-too-large")
            if kind not in intake.border.source.content_types:
                wanted = " or ".join(intake.border.source.content_types)
                raise EventRefused(f"send {wanted}", 415)
        except EventRefused as refused:
            self.count(source if intake is not None else "", refused)
            raise
        self.check_ready(intake)
        return Pass(intake, caller)

    def check_ready(self, intake: Intake) -> None:
        """Pass where events of this source are taken now.

        Raises:
            NotReady: they are not: the node is not ready, or the source's reference data is not there.
        """
        if reason := self.not_ready():
            raise NotReady(reason)
        if reason := intake.not_ready():
            raise NotReady(reason, intake)

    def take(self, passed: Pass, kind: str, body: bytes) -> Taken:
        """Put the events of a body into the log and send them on.

        Raises:
            EventRefused: the body is not taken, or there are too many events at the moment.
            LogFull: the log has reached its bound.
            LogUnavailable: the disk refuses writes.
        """
        intake, caller = passed.intake, passed.caller
        source = intake.border.source
        try:
            one, bodies = split(kind, body)
            self.gate.spend(source, caller, len(bodies))
        except EventRefused as refused:
            self.count(source.name, refused)
            raise
        if not intake.log.has_room(len(body), len(bodies)):
            raise LogFull(intake.log.used, intake.log.limit)
        if one:
            return self._take_one(intake, caller, body)
        admitted = intake.border.admit_all(bodies, tenant=caller.tenant, max_bytes=caller.max_event_bytes)
        good = not [event for event in admitted if event.refusal is not None or event.shed]
        kept = [good or event.refusal is None or self.gate.keep_reject(source.name) for event in admitted]
        taken = admitted if good else [event for event, keep in zip(admitted, kept, strict=True) if keep]
        logged = intake.take_all(taken)
        if source.name in self.one_way:
            return Taken((), b"", events=admitted)
        groups = tuple({id(event.group): event.group for event in logged if event.group is not None}.values())
        if good:
            tokens = self.signer.sign_all([event.envelope for event in admitted])
            return Taken(groups, b'{"tokens":%b,"rejected":[]}' % tokens, None, admitted)
        kept = [keep and not event.shed for event, keep in zip(admitted, kept, strict=True)]
        answer, error = self._answer(admitted, kept)
        return Taken(groups, answer, error, admitted)

    def _take_one(self, intake: Intake, caller: Caller, body: bytes) -> Taken:
        event = intake.border.admit(body, tenant=caller.tenant, max_bytes=caller.max_event_bytes)
        name, refusal = intake.border.source.name, event.refusal
        keep = refusal is None or self.gate.keep_reject(name)
        group = intake.take(event).group if keep else None
        if name in self.one_way:
            return Taken((), b"", events=(event,))
        groups = () if group is None else (group,)
        if event.shed:
            return Taken(groups, orjson.dumps({"shed": True, "event_id": event.envelope.event_id}), None, (event,))
        token = self.signer.sign(event.envelope) if keep else b""
        if refusal is None:
            return Taken(groups, b'{"token":"%b"}' % token, None, (event,))
        members: dict[str, Any] = {"token": token.decode()} if token else {}
        error = EventRefused(refusal.reason, refusal.status, code=refusal.code, **members)
        return Taken(groups, b"", error, (event,))

    def _answer(self, events: Sequence[Admitted], kept: Sequence[bool]) -> tuple[bytes, EventRefused | None]:
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
        return b"", EventRefused("every event is refused", 422, code="all-refused", tokens=tokens, rejected=rejected)

    def count(self, source: str, refused: EventRefused) -> None:
        """Count a request that is refused whole: nothing of it is kept."""
        self.gate.refused[source, refused.code or CODES[refused.status]] += 1


class NotReady(LogUnavailable):
    """The node takes no events now.

    Attributes:
        intake: whose reference data is not there; None: it is the node that is not ready.
    """

    def __init__(self, reason: str, intake: Intake | None = None) -> None:
        super().__init__(reason)
        self.intake = intake

    def __str__(self) -> str:
        return self.reason


def split(kind: str, body: bytes) -> tuple[bool, Sequence[bytes]]:
    """Whether the body is one event, and the events.

    Raises:
        EventRefused: there is none, or there are too many.
    """
    if kind == JSON:
        if body.lstrip()[:1] != b"[":
            return True, (body,)
        try:
            _check_count(len(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return True, (body,)  # the border says what is wrong with it, and keeps it
        return False, list(elements(body))
    events = [line for line in map(bytes.strip, body.split(b"\n")) if line]
    _check_count(len(events))
    return False, events


def _check_count(events: int) -> None:
    if not events:
        raise EventRefused("there is no event in the body", 400, code="empty")
    if events > MAX_EVENTS:
        raise EventRefused(f"the body has {events} events, more than {MAX_EVENTS}", 413, code="too-many-events")


def presented_key(name: bytes, value: bytes) -> str | None:
    """The API key in a header (its name in small letters), or None."""
    if name == b"authorization" and value[:7].lower() == b"bearer ":
        return value[7:].strip().decode("latin-1")
    if name == b"x-api-key":
        return value.strip().decode("latin-1")
    return None


def problem_body(error: IngestError) -> tuple[int, bytes, int]:
    """Status, problem document (RFC 9457) and seconds to wait for what went wrong.

    ``type`` names the kind of problem and does not change: ``urn:millrace:problem:CODE``.
    """
    if isinstance(error, EventRefused):
        status, code, retry, members = error.status, error.code, error.retry_after, error.members
    else:
        code = {LogFull: "log-full", NotReady: "not-ready"}.get(type(error), "log-unavailable")
        status, retry, members = 503, RETRY_AFTER_S, {}
    code = code or CODES.get(status, "error")
    body = {
        "type": f"urn:millrace:problem:{code}",
        "title": TITLES.get(status, "Error"),
        "status": status,
        "detail": str(error),
        **members,
    }
    return status, orjson.dumps(body), retry
