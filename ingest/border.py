"""The border between untrusted and trusted: what a collector checks of an event, and the envelope it gives it.

Only what the envelope needs is looked at here: that the payload is a JSON object of bounded size, its id and its key.
The schema and the expectations are checked in bronze's readers. Nothing is dropped: an event that does not pass goes on
with ``envelope.reject`` set, and ends in quarantine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from lakehouse.contract.envelope import Envelope, fingerprint, new_event_id
from lakehouse.contract.pipeline import Source

MAX_ID_BYTES = 512
KEPT_BYTES = 65_536  # of an event that is larger than its source allows


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an event does not pass.

    Attributes:
        reason: for its sender, and for the quarantine table.
        status: of the HTTP answer.
    """

    reason: str
    status: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """An event with its envelope.

    Attributes:
        envelope: with ``reject`` where ``refusal`` is set.
        key: Kafka key.
        payload: untouched, but the beginning only of an event that is too large.
        refusal: why it does not pass, or None.
    """

    envelope: Envelope
    key: bytes
    payload: bytes
    refusal: Refusal | None


class Border:
    """Admits the events of one source.

    Args:
        source: its templates and its limit.
        tenant: whose events they are.
        collector: id of this node.
        clock: nanoseconds since the epoch.
    """

    def __init__(self, source: Source, *, tenant: str, collector: str, clock: Callable[[], int] = time.time_ns) -> None:
        self.source = source
        self._tenant = tenant
        self._collector = collector
        self._clock = clock

    def admit(self, payload: bytes, *, suspect: bool = False, origin: str | None = None) -> Admitted:
        """The event with its envelope; never raises on what the payload is.

        Args:
            payload: as received.
            suspect: Kafka may hold it already.
            origin: names the event where its upstream can send it again (lane and index), so that an id that is not in
                the payload comes out the same then.
        """
        refusal: Refusal | None = None
        fields: dict[str, Any] | None = None
        if len(payload) > self.source.max_event_bytes:
            limit = self.source.max_event_bytes
            refusal = Refusal(f"the event has {len(payload)} bytes, more than the {limit} that are allowed", 413)
            kept = payload[:KEPT_BYTES]
        else:
            kept = payload
            fields, refusal = _parse(payload)
        event_id, key = None, None
        if fields is not None:
            event_id, key, refusal = self._identify(fields)
        return self._seal(kept, event_id, key, refusal, suspect=suspect, origin=origin)

    def refuse(self, reason: str, *, origin: str) -> Admitted:
        """An event of which only its place in the upstream is known, kept as rejected."""
        return self._seal(b"", None, None, Refusal(reason, 413), suspect=False, origin=origin)

    def _seal(
        self,
        kept: bytes,
        event_id: str | None,
        key: str | None,
        refusal: Refusal | None,
        *,
        suspect: bool,
        origin: str | None,
    ) -> Admitted:
        if event_id is None:
            event_id = new_event_id() if origin is None else _repeatable_id(origin, kept)
        envelope = Envelope(
            event_id=event_id,
            source=self.source.name,
            tenant=self._tenant,
            received_at=self._clock() // 1000,
            collector=self._collector,
            fingerprint=fingerprint(kept),
            suspect=suspect,
            reject=None if refusal is None else refusal.reason,
        )
        return Admitted(envelope, (key or event_id).encode(), kept, refusal)

    def _identify(self, fields: dict[str, Any]) -> tuple[str | None, str | None, Refusal | None]:
        """Event id, key and refusal; the id is None where the payload has none (of a usable length)."""
        source = self.source
        event_id = key = None
        if source.event_id_template is not None:
            event_id = source.event_id_template.render(fields)
            if event_id is None:
                return None, None, _missing("event id", source.event_id)
            if len(event_id.encode()) > MAX_ID_BYTES:
                return None, None, Refusal(f"the event id is longer than {MAX_ID_BYTES} bytes", 422)
        if source.key_template is not None:
            key = source.key_template.render(fields)
            if key is None:
                return event_id, None, _missing("key", source.key)
            if len(key.encode()) > MAX_ID_BYTES:
                return event_id, None, Refusal(f"the key is longer than {MAX_ID_BYTES} bytes", 422)
        return event_id, key, None


def _parse(payload: bytes) -> tuple[dict[str, Any] | None, Refusal | None]:
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        return None, Refusal(f"not JSON: {error}", 400)
    if not isinstance(fields, dict):
        return None, Refusal(f"an event is a JSON object, not {_JSON_NAMES.get(type(fields), 'that')}", 422)
    return fields, None


def _missing(what: str, template: str) -> Refusal:
    return Refusal(f"the {what} {template} needs fields that are absent, null or not plain values", 422)


def _repeatable_id(origin: str, payload: bytes) -> str:
    digest = hashlib.blake2b(payload, digest_size=16, key=hashlib.blake2b(origin.encode(), digest_size=32).digest())
    return f"~{digest.hexdigest()}"


_JSON_NAMES = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}
