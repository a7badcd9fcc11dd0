"""The message log at rest: recovery when it is opened, the failed store, and what operators see and retry.

Every segment is verified. The failed store is a file of frames beside the segments. It keeps events that Kafka refused
for good and bytes that cannot be read, each with the reason, and counts towards the log's limit. A node only appends to
it; :func:`retry` removes what Kafka took at last, for which it needs the log to itself. The views for operators change
nothing and may run beside the node.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from ingest.errors import BrokerUnavailable
from ingest.kafka import KafkaPublisher, SendOutcome
from ingest.log.segments import (
    EVENT_X,
    EVENTS,
    FAILED,
    MARK,
    NOWHERE,
    RAW,
    SEGMENT_MAGIC,
    SUFFIX,
    Damage,
    LogFrame,
    LoggedEvent,
    LogSegment,
    SourceLane,
    StoredEvent,
    event_extra,
    event_fields,
    frame_chunks,
    frame_heads,
    read_event,
    read_reason,
    reason_body,
    scan,
)
from lakehouse.contract.envelope import UPSTREAM_ID
from lakehouse.contract.errors import EnvironmentProblem
from lakehouse.contract.storage import try_lock, write_whole

logger = logging.getLogger(__name__)

FILE_NAME = "failed"
RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Bytes of a segment that cannot be read.

    Attributes:
        lanes: of the events that may be in it, by the remains of their frames, else by the events around it.
        first_seq: lowest sequence number that may be in it.
        last_seq: highest one; below ``first_seq`` if no event is missing.
        torn: the end of an interrupted write; the log acknowledged no event in it.
        in_kafka: Kafka has acknowledged everything in it.
    """

    segment: str
    offset: int
    data: bytes
    lanes: tuple[str, ...] = ()
    first_seq: int = 0
    last_seq: int = -1
    torn: bool = False
    in_kafka: bool = False

    def __str__(self) -> str:
        what = "an interrupted write" if self.torn else "corrupt"
        place = f"{self.segment}: {len(self.data)} bytes at {self.offset} are {what}"
        if self.torn:
            return f"{place}: events from {self.first_seq} on, none of them acknowledged from the log"
        if self.last_seq < self.first_seq:
            return f"{place}: no event is missing"
        events = f"events {self.first_seq} to {self.last_seq} of {', '.join(self.lanes) or 'an unknown lane'}"
        return f"{place}: {events}, {'which Kafka has' if self.in_kafka else 'LOST unless their senders repeat them'}"


class Recovery:
    """What an earlier run left. Every segment in ``folder`` is read and verified, frame by frame in write order.

    Args:
        mend: cut an interrupted write off the newest segment. False, for a log that may be in use, changes nothing and
            logs nothing.

    Attributes:
        segments: in order.
        lanes: with their state after the last readable event.
        acked: Kafka has acknowledged every event before this sequence number.
        to_replay: events that Kafka has not acknowledged.
        torn_bytes: bytes cut off the newest segment.
        corrupt: other bytes that cannot be read.
        torn: the interrupted write, or None.
        clean: the earlier run closed the log.
    """

    def __init__(self, folder: Path, *, mend: bool = True) -> None:
        self.segments: list[LogSegment] = []
        self.next_seq = 1
        self.acked = self.to_replay = self.torn_bytes = 0
        self.corrupt: list[Corrupt] = []
        self.torn: Corrupt | None = None
        self.clean = True
        self._mend = mend
        self._open_damage: list[Corrupt] = []  # completed by the next frame
        self._last_lane = -1
        self._last_seq = 0
        self._by_index: dict[int, SourceLane] = {}
        self._events: list[tuple[LogSegment, array[int], array[int]]] = []  # per segment: sequence numbers, lanes
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        for path in paths:
            self._segment(path, newest=path is paths[-1])
        self._close_damage(self.next_seq)
        self.corrupt = [replace(item, in_kafka=item.last_seq < self.acked) for item in self.corrupt]
        if mend:
            for item in self.corrupt:
                logger.error("%s; the failed store keeps the bytes", item)
        for segment, seqs, lanes in self._events:
            for seq, index in zip(seqs, lanes, strict=True):
                if seq >= self.acked:
                    segment.unacked += 1
                    self._lane(index).in_log += 1
            self.to_replay += segment.unacked
        self._events.clear()
        self.lanes = [self._lane(index) for index in range(max(self._by_index, default=-1) + 1)]
        for lane in self.lanes:
            lane.durable = lane.received
        self.next_seq = max(self.next_seq, self._last_seq + 1)

    def _segment(self, path: Path, *, newest: bool) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # a running node has just removed it
            return
        segment = LogSegment(int(path.stem), path, len(data), len(data))
        self.segments.append(segment)
        seqs, lanes = array("Q"), array("H")
        self._events.append((segment, seqs, lanes))
        for item in scan(data, len(SEGMENT_MAGIC) if data.startswith(SEGMENT_MAGIC) else 0):
            if isinstance(item, Damage):
                self._damage(segment, data, item, newest=newest)
                continue
            if self._open_damage:
                self._close_damage(item.seq, item)
            if item.kind == MARK:
                self._mark(item)
            elif item.kind in EVENTS and item.seq > self._last_seq:
                self._last_seq = item.seq
                self.clean = False  # nothing follows the mark of a clean close
                seqs.append(item.seq)
                lanes.append(self._event(item))

    def _damage(self, segment: LogSegment, data: bytes, damage: Damage, *, newest: bool) -> None:
        first = max(self._last_seq + 1, self.next_seq if self._last_seq == 0 else 0)
        item = Corrupt(segment.path.name, damage.offset, data[damage.offset : damage.end], (), first)
        self.clean = False
        if not (newest and damage.tail):
            self._open_damage.append(item)
            return
        self.torn = replace(item, torn=True)
        self.torn_bytes = damage.end - damage.offset
        segment.size = segment.durable = damage.offset
        if self._mend:
            logger.warning("%s; they are cut off", self.torn)
            with segment.path.open("r+b") as file:
                file.truncate(damage.offset)
                os.fsync(file.fileno())

    def _close_damage(self, next_seq: int, frame: LogFrame | None = None) -> None:
        """Complete open damage once the next intact frame shows which events may be missing."""
        after = event_fields(frame.body)[0] if frame is not None and frame.kind in EVENTS else -1
        for item in self._open_damage:
            found = {lane for seq, lane in frame_heads(item.data) if item.first_seq <= seq < next_seq}
            names = [
                self._by_index[index].name
                for index in sorted(found or {self._last_lane, after})
                if index in self._by_index
            ]
            self.corrupt.append(replace(item, lanes=tuple(names), last_seq=next_seq - 1))
        self._open_damage.clear()

    def _mark(self, frame: LogFrame) -> None:
        state = orjson.loads(frame.body[1:])
        self.acked = max(self.acked, state["acked"])
        self.clean = state["clean"]
        self.next_seq = max(self.next_seq, frame.seq)
        for index, values in enumerate(state["lanes"]):
            self._by_index[index] = SourceLane(index, **values)

    def _event(self, frame: LogFrame) -> int:
        index, position, received_at, rejected = event_fields(frame.body)
        self._last_lane = index
        lane = self._lane(index)
        lane.received += 1
        lane.rejected += rejected
        lane.last_at = received_at
        if position is not None:
            lane.position = position
        if frame.kind == EVENT_X:
            lane.cursor = dict(event_extra(frame.body)).get(UPSTREAM_ID, lane.cursor)
        return index

    def _lane(self, index: int) -> SourceLane:
        # A mark names a lane before its first event, unless that mark is corrupt.
        return self._by_index.setdefault(index, SourceLane(index, f"lost/{index}", ""))


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An entry of the failed store; for corrupt bytes ``seq`` is 0 and ``event`` is None."""

    seq: int
    reason: str
    event: StoredEvent | None
    data: bytes


class FailedStore:
    """The failed store. Writing blocks. Without ``mend`` it changes nothing, for a log that may be in use."""

    def __init__(self, folder: Path, node: str, *, mend: bool = True) -> None:
        self._path = folder / FILE_NAME
        self._mend = mend
        self._node = node
        self._seqs: set[int] = set()
        self._raw: set[str] = set()
        self.bytes = 0
        if self._path.exists():
            self._open()

    def add(self, seq: int, source: str, reason: str, body: bytes) -> None:
        """Store an event durably, once."""
        if seq not in self._seqs:
            self._append(seq, reason_body(FAILED, f"{source}\n{reason}", body))
            self._seqs.add(seq)

    def add_corrupt(self, corrupt: Corrupt) -> None:
        reason = str(corrupt)
        if _place_of(reason) not in self._raw:
            self._append(0, reason_body(RAW, reason, corrupt.data))
            self._raw.add(_place_of(reason))

    def remove(self, seqs: Collection[int]) -> None:
        """Remove events that Kafka has taken. The file is rewritten and replaced atomically."""
        chunks = [SEGMENT_MAGIC]
        for item in scan(self._path.read_bytes()):
            if not isinstance(item, Damage) and not (item.kind == FAILED and item.seq in seqs):
                chunks += frame_chunks(item.seq, item.body)
        data = b"".join(chunks)
        write_whole(self._path, data, durable=True)
        self._seqs.difference_update(seqs)
        self.bytes = len(data)

    def __len__(self) -> int:
        return len(self._seqs) + len(self._raw)

    def __iter__(self) -> Iterator[FailedItem]:
        """Every entry, oldest first."""
        if not self._path.exists():
            return
        for item in scan(self._path.read_bytes()):
            if isinstance(item, Damage):
                yield FailedItem(0, f"unreadable bytes in the failed store at {item.offset}", None, b"")
                continue
            reason, rest = read_reason(item.body)
            if item.kind == RAW:
                yield FailedItem(0, reason, None, rest)
            elif item.kind == FAILED:
                source, _, text = reason.partition("\n")
                event = read_event(rest, source=source, collector=self._node)
                yield FailedItem(item.seq, text, event, event.payload)

    def _open(self) -> None:
        data = self._path.read_bytes()
        end = len(data)
        for item in scan(data):
            if isinstance(item, Damage):
                if item.tail:
                    end = item.offset
            elif item.kind == FAILED:
                self._seqs.add(item.seq)
            elif item.kind == RAW:
                self._raw.add(_place_of(read_reason(item.body)[0]))
        if end < len(data) and self._mend:  # an interrupted write; its event is still in a segment
            os.truncate(self._path, end)
        self.bytes = end

    def _append(self, seq: int, body: bytes) -> None:
        with self._path.open("ab") as file:
            if file.tell() == 0:
                file.write(SEGMENT_MAGIC)
            for chunk in frame_chunks(seq, body):
                file.write(chunk)
            file.flush()
            os.fdatasync(file.fileno())
            self.bytes = file.tell()


def _place_of(reason: str) -> str:
    """The part of a reason that identifies the damage; the rest is what was known when it was written."""
    return reason.partition(" are ")[0]


# --- for operators


@dataclass(frozen=True, slots=True)
class LogView:
    """The contents of one node's log.

    Attributes:
        running: whether a process has the log open.
        clean: whether it was closed properly, or is in use.
        transient: events that Kafka has not acknowledged, according to the marks.
        lanes: the same by lane, without empty lanes.
    """

    node: str
    running: bool
    clean: bool
    transient: int
    lanes: dict[str, int]
    failed: int
    reasons: dict[str, int]
    damage: list[str]
    bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class Retried:
    """Events that Kafka took, and those that it refused again, as reason by event id."""

    sent: int
    refused: dict[str, str]


def nodes(folder: Path) -> list[str]:
    """Nodes that have a log below this folder."""
    return sorted(found.name for found in folder.iterdir() if found.is_dir()) if folder.is_dir() else []


def log_of(folder: Path, node: str) -> Path:
    """Folder of a node's log. Raises EnvironmentProblem: the node has none."""
    known = nodes(folder)
    if node not in known:
        raise EnvironmentProblem(f"no log of a node {node!r}; there are: {', '.join(known) or 'none yet'}")
    return folder / node


def look(folder: Path) -> LogView:
    """Read the log in this folder."""
    try:
        with _alone(folder):
            running = False
    except EnvironmentProblem:
        running = True
    found = Recovery(folder, mend=False)
    failed = list(FailedStore(folder, folder.name, mend=False))
    reasons = Counter(item.reason for item in failed if item.event is not None)
    damage = [item.reason for item in failed if item.event is None]
    damage += [text for text in map(str, found.corrupt) if text not in damage]
    if found.torn is not None and not running:
        damage.append(str(found.torn))
    return LogView(
        node=folder.name,
        running=running,
        clean=found.clean or running,
        transient=found.to_replay,
        lanes={lane.name: lane.in_log for lane in found.lanes if lane.in_log},
        failed=sum(reasons.values()),
        reasons=dict(reasons),
        damage=damage,
        bytes=sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        segments=len(found.segments),
    )


def transient(folder: Path) -> Iterator[dict[str, Any]]:
    """Events that Kafka has not acknowledged, according to the marks, as JSON objects."""
    found = Recovery(folder, mend=False)
    for segment in found.segments:
        for item in scan(segment.path.read_bytes()):
            if isinstance(item, Damage) or item.kind not in EVENTS or item.seq < found.acked:
                continue
            lane = found.lanes[event_fields(item.body)[0]]
            event = read_event(item.body, source=lane.source, collector=folder.name)
            yield {"kind": "transient", "seq": item.seq, "lane": lane.name, **_event(event)}


def failed(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of the failed store as JSON objects."""
    for item in FailedStore(folder, folder.name, mend=False):
        if item.event is None:
            yield {"kind": "damage", "reason": item.reason, **_bytes(item.data)}
        else:
            yield {"kind": "failed", "seq": item.seq, "reason": item.reason, **_event(item.event)}


async def retry(
    folder: Path,
    publisher: KafkaPublisher,
    *,
    ids: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Retried:
    """Send failed events again, once, with their old ids, marked ``suspect``. They count once in any case.

    1. Lock the log. 2. Send. 3. Remove from the store what Kafka has taken. A crash before step 3 sends them again on
    the next retry.

    Args:
        publisher: not started yet.
        ids: event ids to send; empty sends all.
        progress: called with the number of answered events and the total.

    Raises:
        EnvironmentProblem: a node has the log open.
        BrokerUnavailable: Kafka is unreachable or too slow; nothing was changed.
    """
    with _alone(folder):
        store = FailedStore(folder, folder.name)
        events = {item.seq: item.event for item in store if item.event is not None}
        wanted = {seq: event for seq, event in events.items() if not ids or event.envelope.event_id in ids}
        outcomes: dict[int, SendOutcome] = {}
        done = asyncio.Event()

        def deliver(batch: Sequence[SendOutcome]) -> None:
            for outcome in batch:
                outcomes[outcome.event.seq] = outcome
            progress(len(outcomes), len(wanted))
            if len(outcomes) == len(wanted):
                done.set()

        await asyncio.to_thread(publisher.start, deliver)
        try:
            publisher.send([_again(seq, event) for seq, event in wanted.items()])
            if wanted:
                await asyncio.wait_for(done.wait(), RETRY_S)
        except TimeoutError:
            reason = f"{len(outcomes)} of {len(wanted)} events were answered in {RETRY_S:.0f} s"
            raise BrokerUnavailable("the broker", reason) from None
        finally:
            await asyncio.to_thread(publisher.close, 1.0)
        store.remove([seq for seq, outcome in outcomes.items() if not outcome.error])
        refused = {o.event.envelope.event_id: o.error for o in outcomes.values() if o.error}
        return Retried(len(outcomes) - len(refused), refused)


def _again(seq: int, event: StoredEvent) -> LoggedEvent:
    envelope = replace(event.envelope, suspect=True)
    lane = SourceLane(event.lane, "", envelope.source)
    return LoggedEvent(seq, lane, envelope, event.key, event.payload, NOWHERE, 0, None)


def _event(event: StoredEvent) -> dict[str, Any]:
    envelope = event.envelope
    return {
        "event_id": envelope.event_id,
        "source": envelope.source,
        "tenant": envelope.tenant,
        "received_at": envelope.received_at,
        "reject": envelope.reject,
        "key": event.key.decode("utf-8", "replace"),
        **_bytes(event.payload),
    }


def _bytes(data: bytes) -> dict[str, str]:
    """As text if it is UTF-8, else in base64."""
    try:
        return {"payload": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def lock_folder(folder: Path) -> int:
    """Lock ``folder/lock`` and return its file descriptor. The lock ends with the process.

    Raises:
        EnvironmentProblem: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = try_lock(folder / "lock")
    if handle is None:
        owner = (folder / "lock").read_text(encoding="utf-8", errors="replace").strip()
        raise EnvironmentProblem(
            f"the message log {folder} is in use{f' by process {owner}' if owner else ''}",
            "Stop that collector, or give this one another node name",
        )
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the log's lock, unless the folder has no log."""
    if not any(folder.glob(f"*{SUFFIX}")) and not (folder / FILE_NAME).exists():
        yield
        return
    handle = lock_folder(folder)
    try:
        yield
    finally:
        os.close(handle)
