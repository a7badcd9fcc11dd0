"""The envelope: what a collector knows of an event, carried as Kafka headers beside the untouched payload.

The Kafka value is the payload, byte for byte. A record without these headers (another producer wrote to the topic)
is taken too: bronze then fills the envelope from the broker's coordinates.

``event_id`` is the one name of an event from the socket to the products: the acknowledgement answers it, bronze keeps
it, and every log line about a single event bears it, as a field of its own where lines are JSON.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

EVENT_ID = "id"
SOURCE = "source"
TENANT = "tenant"
RECEIVED_AT = "received_at"
COLLECTOR = "collector"
FINGERPRINT = "fingerprint"
SUSPECT = "suspect"
REJECT = "reject"
WEIGHT = "weight"  # an extra header: how many events it stands for, where others were shed beside it
MAX_ID_BYTES = 512  # of an event id
UPSTREAM_ID = "upstream_id"  # an extra header: the upstream's own name of the event's place (Last-Event-ID)

# What every envelope has, in the order in which it is sent.
ALWAYS: tuple[str, ...] = (EVENT_ID, SOURCE, TENANT, RECEIVED_AT, COLLECTOR, FINGERPRINT)
HEADER_NAMES: tuple[str, ...] = (*ALWAYS, SUSPECT, REJECT, WEIGHT)

_BLANK = hashlib.blake2b(digest_size=16)


class EnvelopeError(ValueError):
    """Headers that do not form an envelope."""


@dataclass(slots=True)
class Envelope:
    """Metadata of one event. (Not frozen: one is made for each event, and freezing triples what that costs.)

    Attributes:
        event_id: the dedupe key within (source, tenant); from the payload, or given when the event was first logged.
        received_at: when a collector first had it, microseconds since the epoch, UTC.
        fingerprint: :func:`fingerprint` of the payload.
        suspect: sent again from a log after a crash, so that Kafka may hold it already.
        reject: why the border refused it; such an event goes to quarantine and into no product.
        extra: further headers (place in the upstream, enrichment and its version), names unlike :data:`HEADER_NAMES`
            and each other; bronze keeps them in its column ``headers``. :meth:`from_headers` passes them over.
    """

    event_id: str
    source: str
    tenant: str
    received_at: int
    collector: str
    fingerprint: str
    suspect: bool = False
    reject: str | None = None
    extra: tuple[tuple[str, str], ...] = ()

    def to_headers(self) -> list[tuple[str, bytes]]:
        """Kafka headers, values in UTF-8: those of :data:`ALWAYS`, then what else there is to say."""
        headers = [
            (EVENT_ID, self.event_id.encode()),
            (SOURCE, self.source.encode()),
            (TENANT, self.tenant.encode()),
            (RECEIVED_AT, str(self.received_at).encode()),
            (COLLECTOR, self.collector.encode()),
            (FINGERPRINT, self.fingerprint.encode()),
        ]
        if self.suspect:
            headers.append((SUSPECT, b"1"))
        if self.reject is not None:
            headers.append((REJECT, self.reject.encode()))
        if self.extra:
            headers += [(name, value.encode()) for name, value in self.extra]
        return headers

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str, bytes]]) -> Envelope:
        """The envelope that :meth:`to_headers` wrote; other headers are passed over.

        Raises EnvelopeError: a required header is absent or is not of its form.
        """
        found = {name: value for name, value in headers if name in HEADER_NAMES}
        try:
            return cls(
                event_id=found[EVENT_ID].decode(),
                source=found[SOURCE].decode(),
                tenant=found[TENANT].decode(),
                received_at=int(found[RECEIVED_AT]),
                collector=found[COLLECTOR].decode(),
                fingerprint=found[FINGERPRINT].decode(),
                suspect=SUSPECT in found,
                reject=found[REJECT].decode() if REJECT in found else None,
            )
        except KeyError as error:
            raise EnvelopeError(f"header {error.args[0]!r} is missing") from None
        except ValueError as error:
            raise EnvelopeError(f"a header cannot be read: {error}") from None


def fingerprint(payload: bytes) -> str:
    """BLAKE2b-128 of the payload in hexadecimal, 32 characters: equal payloads have equal fingerprints."""
    digest = _BLANK.copy()  # half of what making one costs
    digest.update(payload)
    return digest.hexdigest()


def new_event_id() -> str:
    """An id for an event whose payload has none: 128 random bits, prefixed so that it can be told apart."""
    return f"~{secrets.token_hex(16)}"


LOG_FIELDS = ("event_id", "source", "tenant")
"""Fields of a log record that is about one event."""


def about(event_id: str, source: str, tenant: str) -> dict[str, str]:
    """The ``extra`` of a log call about one event."""
    return dict(zip(LOG_FIELDS, (event_id, source, tenant), strict=True))


class EventLines:
    """Writes log lines about single events, so many a second: a flood of bad events must not become one of lines.

    Args:
        most: lines a second; what is beyond them is counted, and the count told with the next line.
        now: seconds.
    """

    def __init__(self, logger: logging.Logger, most: int = 20, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._most = most
        self._now = now
        self._since = 0.0
        self._said = 0
        self._left_out = 0

    def say(self, level: int, what: str, reason: str, *, event_id: str, source: str, tenant: str) -> None:
        """Write "event ID of SOURCE WHAT: REASON", or count it."""
        now = self._now()
        if now - self._since >= 1.0:
            self._since, self._said = now, 0
        if self._said >= self._most:
            self._left_out += 1
            return
        self._said += 1
        text, left_out = "event %s of %s %s: %s", self._left_out
        if left_out:
            self._left_out, text = 0, f"{text} (and {left_out} others before it)"
        self._logger.log(level, text, event_id, source, what, reason, extra=about(event_id, source, tenant))
