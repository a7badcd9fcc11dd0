"""Acknowledgement tokens, and what became of the event behind one.

A token carries the event's identity (source, tenant, event id, time), so any node can answer for it, also after a
restart: from memory while the event is recent, else from the bronze table. Tokens are signed with a keyed BLAKE2b of
128 bits, which needs one pass where HMAC needs two. All nodes of a lake share the key.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from ingest.answers.tables import Coordinates, LakeState
from ingest.border.admission import RAW_SUFFIX
from ingest.errors import RequestRefused
from ingest.kafka import SendOutcome
from ingest.log.segments import Fate, LoggedEvent
from lakehouse.contract.envelope import Envelope
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.storage import LakePath, is_away, shared_secret, write_whole

REMEMBERED = 100_000
logger = logging.getLogger(__name__)

KEY_BYTES = 32
_KEY_FILE = "ack.key"

_MAC_BYTES = 16
_MAX_CHARS = 4_096  # of a token: source, tenant and id are bounded
_TO_URL = bytes.maketrans(b"+/", b"-_")
_FROM_URL = bytes.maketrans(b"-_", b"+/")
_BLANKS = (b"", b"  ", b" ")  # padding by the length modulo 3


class RecentEvents:
    """The newest events and where they are, in bounded memory."""

    def __init__(self, topics: dict[str, str], size: int = REMEMBERED) -> None:
        self._topics = topics
        self._size = size
        self._events: OrderedDict[tuple[str, str, str], Fate] = OrderedDict()
        self._waiting: dict[tuple[str, str, str], asyncio.Future[None]] = {}

    def logged(self, envelope: Envelope) -> Fate:
        """Remember an event that was appended to the log; a repeated event keeps the entry of the first."""
        key = (envelope.source, envelope.tenant, envelope.event_id)
        fate = self._events.get(key)
        if fate is None:
            fate = self._events[key] = Fate(envelope.reject)
            if len(self._events) > self._size:
                self._events.popitem(last=False)
        return fate

    def logged_all(self, events: Sequence[LoggedEvent]) -> None:
        """Remember appended events and set the fate of each."""
        remembered, size = self._events, self._size
        for event in events:
            envelope = event.envelope
            key = (envelope.source, envelope.tenant, envelope.event_id)
            fate = remembered.get(key)
            if fate is None:
                fate = remembered[key] = Fate(envelope.reject)
            event.fate = fate
        while len(remembered) > size:
            remembered.popitem(last=False)

    def known(self, outcome: SendOutcome) -> None:
        """Kafka has taken an event, or refused it for good."""
        envelope = outcome.event.envelope
        found = outcome.event.fate or self._events.get((envelope.source, envelope.tenant, envelope.event_id))
        if found is None:
            return
        if outcome.error:
            found.failed = outcome.error
        elif not found.topic:
            found.topic = self._topics[envelope.source]
            found.partition, found.offset = outcome.partition, outcome.offset
        if self._waiting:
            waiting = self._waiting.pop((envelope.source, envelope.tenant, envelope.event_id), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def decided(self, token: Token) -> None:
        """Return when Kafka has taken or refused the token's event; at once if the event is not remembered."""
        found = self.get(token)
        if found is None or found.topic or found.failed:
            return
        future = self._waiting.setdefault(token.identity, asyncio.get_running_loop().create_future())
        await asyncio.shield(future)  # a cancelled waiter must not cancel the future of others

    def get(self, token: Token) -> Fate | None:
        return self._events.get(token.identity)


@dataclass(frozen=True, slots=True)
class AckState:
    """What became of an event.

    Attributes:
        state: ``logged``, ``queued``, ``in_bronze``, ``in_product``, ``rejected`` or ``unknown``.
        coordinates: its place in Kafka, once known.
        products: current version of each product that holds it.
        reason: why it was rejected.
        event_id: the id that refining gave it, if that is another one than a front node's.
    """

    state: str
    coordinates: Coordinates | None = None
    products: dict[str, int] | None = None
    reason: str | None = None
    event_id: str | None = None


def ack_state(token: Token, recent: RecentEvents, lake: LakeState, products: Sequence[str]) -> AckState:
    """What became of the token's event; ``products`` are those of its source. Reads the lake, so it blocks.

    If the lake is away, what this node knows by itself is the answer; its error is raised if that is nothing.
    """
    remembered = recent.get(token)
    try:
        return _looked_up(token, remembered, lake, products)
    except Exception as error:
        if remembered is None or not is_away(error):
            raise
        coordinates = _coordinates(remembered)
        return AckState("logged" if coordinates is None else "queued", coordinates)


def _looked_up(token: Token, remembered: Fate | None, lake: LakeState, products: Sequence[str]) -> AckState:
    if remembered is not None and remembered.failed:
        return AckState("rejected", reason=remembered.failed)
    coordinates = _coordinates(remembered)
    reject = remembered.reject if remembered else None
    event_id, in_bronze = token.event_id, False
    if remembered is None or (coordinates is not None and coordinates.topic.endswith(RAW_SUFFIX)):
        # Another node took it, or this one did as a front node: only bronze has its place, and its id after refining.
        found = lake.find_event(token.source, token.tenant, event_id, token.received_at)
        if found is None:
            return AckState("unknown" if remembered is None else "queued", coordinates)
        coordinates, reject, event_id, in_bronze = found.coordinates, found.reject, found.event_id, True
    told = None if event_id == token.event_id else event_id
    if reject is None and (in_bronze or coordinates is not None):
        reject = lake.quarantine_reason(token.source, token.tenant, event_id)
    if reject is not None:
        return AckState("rejected", coordinates, reason=reject, event_id=told)
    if coordinates is None:
        return AckState("in_bronze" if in_bronze else "logged", event_id=told)
    held = {name: version for name in products if (version := lake.product_version(name, coordinates)) is not None}
    if held:
        return AckState("in_product", coordinates, held, event_id=told)
    if in_bronze or lake.in_bronze(token.source, coordinates):
        return AckState("in_bronze", coordinates, event_id=told)
    return AckState("queued", coordinates)


def _coordinates(fate: Fate | None) -> Coordinates | None:
    return Coordinates(fate.topic, fate.partition, fate.offset) if fate is not None and fate.topic else None


@dataclass(frozen=True, slots=True)
class Token:
    """The content of an acknowledgement token; ``received_at`` is in microseconds since the epoch."""

    source: str
    tenant: str
    event_id: str
    received_at: int

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.source, self.tenant, self.event_id


class Signer:
    """Makes and reads tokens with a key of :data:`KEY_BYTES` bytes."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)  # copied for each token

    @classmethod
    def of_lake(cls, state: LakePath, copies: Path | None = None) -> Signer:
        """The signer with the key in ``state/ack.key``, which is created if absent; several nodes may do so at once.

        Args:
            copies: folder of this machine, for a key of an object store. A node that starts while the store is away
                takes the copy, or makes a key that only this node knows.

        Raises:
            EnvironmentProblem: other users may read the key, or its size is wrong.
        """
        try:
            key = shared_secret(state / _KEY_FILE, KEY_BYTES)
        except EnvironmentProblem as problem:
            if copies is None or not is_away(problem):
                raise
            known = (copies / _KEY_FILE).exists()
            logger.warning(
                "acknowledgement tokens are signed with %s",
                "this machine's copy of the lake's key" if known else "a key that other nodes do not have",
            )
            return cls(shared_secret(copies / _KEY_FILE, KEY_BYTES))
        if copies is not None:
            write_whole(copies / _KEY_FILE, key, 0o600)
        return cls(key)

    def __repr__(self) -> str:
        return "Signer(key=…)"

    def sign(self, envelope: Envelope) -> bytes:
        """The token of an event, URL-safe."""
        return self.sign_all((envelope,))[2:-2]

    def sign_all(self, envelopes: Iterable[Envelope]) -> bytes:
        """The tokens of events as a JSON array of strings."""
        tokens: list[bytes] = []
        dumps, base64, keyed = orjson.dumps, binascii.b2a_base64, self._keyed.copy
        for envelope in envelopes:
            body = dumps((envelope.source, envelope.tenant, envelope.event_id, envelope.received_at))
            body += _BLANKS[(_MAC_BYTES + len(body)) % 3]  # legal at the end of JSON, and saves base64 its padding
            mac = keyed()
            mac.update(body)
            tokens.append(base64(mac.digest() + body, newline=False))
        return b'["%b"]' % b'","'.join(tokens).translate(_TO_URL)

    def open(self, text: str) -> Token:
        """Verify and read a token. Raises RequestRefused: it was not made with this key."""
        if len(text) > _MAX_CHARS:
            raise _bad_token()
        try:
            coded = text.encode("ascii").translate(_FROM_URL)
            data = binascii.a2b_base64(coded + b"=" * (-len(coded) % 4), strict_mode=True)
            mac, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
            keyed = self._keyed.copy()
            keyed.update(body)
            if not hmac.compare_digest(mac, keyed.digest()):
                raise _bad_token()
            source, tenant, event_id, received_at = orjson.loads(body)
        except ValueError:  # of base64 or ASCII; a signed body is always JSON
            raise _bad_token() from None
        return Token(source, tenant, event_id, received_at)


def _bad_token() -> RequestRefused:
    return RequestRefused("this is not an acknowledgement token", 400, code="bad-token")
