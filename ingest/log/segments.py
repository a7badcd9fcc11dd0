"""What is in the message log: segments, lanes, events and their commit groups, and their bytes. No I/O here.

A segment file is ``SEGMENT_MAGIC`` and then frames, all numbers little-endian::

    frame   magic u32 · length of body u32 · crc32 of (seq, body) u32 · seq u64 · body
    body    kind u8 · …
    EVENT   lane u16 · position i64 · received_at i64 · lengths of event id, tenant, key and reject (u16 each) ·
            those four · payload
    EVENT_X an EVENT with further headers: length u16 and JSON of them stand before the payload
    MARK    JSON: cumulative state of every lane, and the first sequence number that Kafka has not acknowledged
    FAILED  length of reason u32 · reason · an EVENT body
    RAW     length of reason u32 · reason · bytes that could not be read
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import orjson

from lakehouse.contract.envelope import Envelope, fingerprint

logger = logging.getLogger(__name__)

SUFFIX = ".seg"
SEGMENT_MAGIC = b"MRLOG\x00\x00\x01"
FRAME_MAGIC = b"\xa7MR\x9e"
MAX_FIELD = 0xFFFF

EVENT, MARK, FAILED, RAW, EVENT_X = 1, 2, 3, 4, 5
EVENTS = (EVENT, EVENT_X)

_FRAME = struct.Struct("<4sIIQ")
_SEQ = struct.Struct("<Q")
_START = struct.Struct("<4sII")  # of a frame, up to the sequence number
_EVENT = struct.Struct("<BHqqHHHH")
_SEQ_EVENT = struct.Struct("<QBHqqHHHH")  # a sequence number and the beginning of an event's body
_REASON = struct.Struct("<BI")
_LENGTH = struct.Struct("<H")
_NO_POSITION = -1

FRAME_OVERHEAD = _FRAME.size
EVENT_OVERHEAD = _FRAME.size + _EVENT.size


@dataclass(slots=True, eq=False)
class LogSegment:
    """One file of the log.

    Attributes:
        size: bytes in the file once pending writes are done.
        durable: bytes on disk.
        unacked: events that Kafka has not acknowledged.
    """

    number: int
    path: Path
    size: int = 0
    durable: int = 0
    unacked: int = 0


NOWHERE = LogSegment(-1, Path())
"""Segment of events that are not in a log."""


@dataclass(slots=True, eq=False)
class SourceLane:
    """The events of one collector of a source, with cumulative counts.

    Attributes:
        name: ``SOURCE/KIND/ORDINAL``.
        position: index of the upstream's next message, or None.
        cursor: the upstream's id of the last message (Last-Event-ID), or None.
        received: events appended.
        shed: events dropped by load shedding before they were appended.
        durable: events on disk.
        rejected: received events that the border refused.
        failed: events that Kafka refused for good, now in the failed store.
        in_log: events that Kafka has not acknowledged.
        gaps: reconnects to an upstream that could not resume.
        last_at: ``received_at`` of the newest event, microseconds since the epoch; 0 if none.
        suspect_left: next events of a resumed upstream that a crashed run may already have sent to Kafka.
    """

    index: int
    name: str
    source: str
    position: int | None = None
    received: int = 0
    durable: int = 0
    rejected: int = 0
    failed: int = 0
    in_log: int = 0
    gaps: int = 0
    last_at: int = 0
    suspect_left: int = 0
    cursor: str | None = None
    shed: int = 0

    @property
    def published(self) -> int:
        return self.received - self.failed - self.in_log

    def state(self) -> dict[str, Any]:
        """The fields that a mark stores. The others follow from the events."""
        return {name: getattr(self, name) for name in _MARKED}


_MARKED = (
    "name", "source", "position", "received", "rejected", "failed", "gaps", "last_at", "suspect_left", "cursor", "shed"
)  # fmt: skip


class CommitGroup:
    """Events that become durable together."""

    __slots__ = ("_closed", "_then", "counts", "opened", "unacked")

    def __init__(self) -> None:
        self.opened = time.perf_counter()
        self.counts: dict[SourceLane, int] = {}
        self.unacked = 0
        self._closed = False
        self._then: list[Callable[[], None]] = []

    @property
    def acknowledgeable(self) -> bool:
        """Whether its events may be acknowledged to their senders: they are durable, or Kafka has all of them."""
        return self._closed

    async def wait(self) -> None:
        """Return when the group is acknowledgeable."""
        if self._closed:
            return
        closed = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not closed.done():  # the waiter was cancelled
                closed.set_result(None)

        self.then(wake)
        await closed

    def then(self, call: Callable[[], None]) -> None:
        """Call back when the group becomes acknowledgeable, which it must not be yet. Exceptions are logged."""
        self._then.append(call)

    def close(self) -> None:
        """Mark the group as acknowledgeable and wake everyone who waits."""
        if not self._closed:
            self._closed = True
            waiting, self._then = self._then, []
            for call in waiting:
                try:
                    call()
                except Exception:  # the other callbacks still run
                    logger.exception("a callback for durable events failed")


@dataclass(slots=True)
class Fate:
    """What became of an event, for its sender's questions.

    Attributes:
        reject: why the border refused it, or None.
        topic, partition, offset: its place in Kafka; the topic is empty until Kafka has it.
        failed: why Kafka refused it for good; empty if it did not.
    """

    reject: str | None
    topic: str = ""
    partition: int = -1
    offset: int = -1
    failed: str = ""


@dataclass(slots=True, eq=False)
class LoggedEvent:
    """An event in the log. Not frozen: freezing would triple the cost of making one.

    Attributes:
        envelope: its metadata; ``suspect`` is set when it is sent again.
        offset: of its frame in the segment.
        group: its commit group; None if it was read back from disk.
        fate: what its sender is told; None for one-way sources.
    """

    seq: int
    lane: SourceLane
    envelope: Envelope
    key: bytes
    payload: bytes
    segment: LogSegment
    offset: int
    group: CommitGroup | None
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the log to read on from: segment number and offset of the next frame."""

    segment: int
    offset: int


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{SUFFIX}"


# --- bytes


@dataclass(frozen=True, slots=True)
class LogFrame:
    """One intact frame.

    Attributes:
        seq: sequence number of an event; in a mark, of the next event.
        body: including the kind, its first byte.
    """

    offset: int
    end: int
    seq: int
    kind: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes that holds no intact frame.

    Attributes:
        tail: no intact frame follows. In the newest segment that is an interrupted write.
    """

    offset: int
    end: int
    tail: bool


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event as it is written; ``lane`` is the lane's index, ``position`` the upstream's next message or None."""

    lane: int
    position: int | None
    envelope: Envelope
    key: bytes
    payload: bytes


def frame_chunks(seq: int, head: bytes, payload: bytes = b"") -> list[bytes]:
    """The frame with the body ``head + payload``, as chunks to write in order."""
    crc = crc32(payload, crc32(head, crc32(_SEQ.pack(seq))))
    return [_FRAME.pack(FRAME_MAGIC, len(head) + len(payload), crc, seq) + head, payload]


def event_chunks(
    seq: int, lane: int, position: int | None, envelope: Envelope, key: bytes, payload: bytes
) -> tuple[list[bytes], int]:
    """The frame of an event as chunks to write in order, and its size."""
    if envelope.reject is None and not envelope.extra:  # nearly always: event_head in one go
        event_id, tenant = envelope.event_id.encode(), envelope.tenant.encode()
        at = _NO_POSITION if position is None else position
        sizes = len(event_id), len(tenant), len(key)
        rest = _SEQ_EVENT.pack(seq, EVENT, lane, at, envelope.received_at, *sizes, 0) + event_id + tenant + key
    else:
        rest = _SEQ.pack(seq) + event_head(lane, position, envelope, key)
    length = len(rest) - _SEQ.size + len(payload)
    start = _START.pack(FRAME_MAGIC, length, crc32(payload, crc32(rest)))
    return [start + rest, payload], FRAME_OVERHEAD + length


def event_head(lane: int, position: int | None, envelope: Envelope, key: bytes) -> bytes:
    """The body of an event up to its payload. Every field has at most 65,535 bytes."""
    event_id = envelope.event_id.encode()
    tenant = envelope.tenant.encode()
    reject = envelope.reject.encode()[:MAX_FIELD] if envelope.reject is not None else b""
    extra = orjson.dumps(envelope.extra) if envelope.extra else b""
    return (
        _EVENT.pack(
            EVENT_X if extra else EVENT,
            lane,
            _NO_POSITION if position is None else position,
            envelope.received_at,
            len(event_id),
            len(tenant),
            len(key),
            len(reject),
        )
        + event_id
        + tenant
        + key
        + reject
        + (_LENGTH.pack(len(extra)) + extra if extra else b"")
    )


def read_event(body: bytes, *, source: str, collector: str) -> StoredEvent:
    """Read an EVENT or EVENT_X body. Raises ValueError: the body is truncated or its text is not UTF-8."""
    if len(body) < _EVENT.size:
        raise ValueError("an event's body is cut off")
    kind, lane, position, received_at, n_id, n_tenant, n_key, n_reject = _EVENT.unpack_from(body)
    tenant_at = _EVENT.size + n_id
    key_at = tenant_at + n_tenant
    reject_at = key_at + n_key
    reject_end = reject_at + n_reject
    extra, payload_at = _extra(body, reject_end) if kind == EVENT_X else ((), reject_end)
    if payload_at > len(body):
        raise ValueError("an event's body is cut off")
    payload = body[payload_at:]
    envelope = Envelope(
        event_id=body[_EVENT.size : tenant_at].decode(),
        source=source,
        tenant=body[tenant_at:key_at].decode(),
        received_at=received_at,
        collector=collector,
        fingerprint=fingerprint(payload),
        reject=body[reject_at:reject_end].decode("utf-8", "replace") if n_reject else None,
        extra=extra,
    )
    return StoredEvent(lane, None if position == _NO_POSITION else position, envelope, body[key_at:reject_at], payload)


def event_fields(body: bytes) -> tuple[int, int | None, int, bool]:
    """Lane, position, ``received_at`` and whether the event was rejected."""
    _, lane, position, received_at, _, _, _, n_reject = _EVENT.unpack_from(body)
    return lane, None if position == _NO_POSITION else position, received_at, n_reject > 0


def event_extra(body: bytes) -> tuple[tuple[str, str], ...]:
    """Extra headers of an EVENT_X body; empty for an EVENT."""
    kind, _, _, _, *lengths = _EVENT.unpack_from(body)
    return _extra(body, _EVENT.size + sum(lengths))[0] if kind == EVENT_X else ()


def _extra(body: bytes, at: int) -> tuple[tuple[tuple[str, str], ...], int]:
    """Extra headers from ``at``, and the offset of the payload."""
    if at + _LENGTH.size > len(body):
        raise ValueError("an event's body is cut off")
    start = at + _LENGTH.size
    end = start + _LENGTH.unpack_from(body, at)[0]
    return tuple((name, value) for name, value in orjson.loads(body[start:end])), end


def frame_heads(data: bytes) -> Iterator[tuple[int, int]]:
    """Sequence number and lane of everything in damaged bytes that looks like an event's frame. Either may be wrong."""
    at = -1
    while (at := data.find(FRAME_MAGIC, at + 1)) >= 0:
        head = data[at : at + _FRAME.size + 3]
        if len(head) == _FRAME.size + 3 and head[_FRAME.size] in EVENTS:
            yield _FRAME.unpack_from(head)[3], int.from_bytes(head[-2:], "little")


def mark_body(state: bytes) -> bytes:
    return bytes((MARK,)) + state


def reason_body(kind: int, reason: str, rest: bytes) -> bytes:
    text = reason.encode()
    return _REASON.pack(kind, len(text)) + text + rest


def read_reason(body: bytes) -> tuple[str, bytes]:
    """The reason and the rest of a FAILED or RAW body."""
    _, length = _REASON.unpack_from(body)
    start = _REASON.size + length
    return body[_REASON.size : start].decode("utf-8", "replace"), body[start:]


def scan(data: bytes, start: int = len(SEGMENT_MAGIC), base: int = 0) -> Iterator[LogFrame | Damage]:
    """Yield the frames of a segment from ``start``, and the damage between them.

    Args:
        base: offset of ``data`` in the file; the offsets of the result are those in the file.
    """
    at, size = start, len(data)
    while at < size:
        frame = _frame_at(data, at, base)
        if frame is None:
            found = _resync(data, at + 1)
            yield Damage(base + at, base + (found or size), tail=found is None)
            if found is None:
                return
            at = found
            continue
        yield frame
        at = frame.end - base


def _frame_at(data: bytes, at: int, base: int = 0) -> LogFrame | None:
    if len(data) - at < _FRAME.size:
        return None
    magic, length, crc, seq = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + length
    if magic != FRAME_MAGIC or length == 0 or end > len(data):
        return None
    body = data[at + _FRAME.size : end]
    if crc32(body, crc32(_SEQ.pack(seq))) != crc:
        return None
    return LogFrame(base + at, base + end, seq, body[0], body)


def _resync(data: bytes, at: int) -> int | None:
    while (at := data.find(FRAME_MAGIC, at)) >= 0:
        if _frame_at(data, at) is not None:
            return at
        at += 1
    return None
