"""The message log: appends events, sends nothing, and forgets what Kafka has acknowledged.

:mod:`ingest.log.protocols` decides when an event's record is written. With the hybrid protocol:

1. :meth:`MessageLog.append` gives the event a sequence number and puts its bytes into the open *group*.
2. At most ``group_commit_ms`` later the group is sealed. A worker thread makes all sealed groups durable with one
   write and one ``fdatasync``. Sending to Kafka does not wait for it.
3. The group's events may be acknowledged when the group is durable, or when Kafka has acknowledged all of them:
   :meth:`ingest.log.segments.CommitGroup.wait`.
4. :meth:`MessageLog.acked` takes Kafka's acknowledgements. A segment without outstanding events is removed. *Marks*
   in the log record how far Kafka has acknowledged, so that a restart sends little again. They also carry the
   position and the counters of each lane, which outlive the segments.

Everything except the worker's writes runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from ingest.border.admission import Admitted
from ingest.errors import LogFull, LogUnavailable
from ingest.log.protocols import PROTOCOLS
from ingest.log.recovery import FailedStore, Recovery, lock_folder
from ingest.log.segments import (
    EVENT_OVERHEAD,
    EVENTS,
    SEGMENT_MAGIC,
    CommitGroup,
    Cursor,
    Damage,
    LogFrame,
    LoggedEvent,
    LogSegment,
    SourceLane,
    event_chunks,
    event_head,
    frame_chunks,
    mark_body,
    read_event,
    scan,
    segment_path,
)
from lakehouse.contract.envelope import UPSTREAM_ID, Envelope

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 1024 * 1024
MARK_INTERVAL_S = 0.05
AHEAD = 512  # most events sent to Kafka before they are on disk, and so most duplicates after a crash
_FIELDS_BYTES = 256  # allowance for id, tenant and key in a forecast of size
_OVERHEAD_BYTES = 16_384  # most bytes of an event and its segment besides the payload
_LEAST_FOR_MARKS = 4_096


class MessageLog:
    """The log of one node: locks its folder and reads what an earlier run left.

    Args:
        folder: of the log; created if absent.
        limit: most bytes on disk.
        group_commit_ms: longest time before an event's group is sealed.
        segment_bytes: size at which a segment is closed; an eighth of the limit at most.
        protocol: a key of :data:`ingest.log.protocols.PROTOCOLS`.

    Raises:
        EnvironmentProblem: another process has the log open.

    Attributes:
        recovery: what an earlier run left.
        on_durable: called on the event loop after each write.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        limit: int,
        group_commit_ms: int = 5,
        segment_bytes: int = SEGMENT_BYTES,
        protocol: str = "hml",
    ) -> None:
        segment_bytes = min(segment_bytes, max(4096, limit // 8))
        self._lock = lock_folder(folder)
        self._folder = folder
        self._node = node
        self.limit = limit
        self._most = limit - max(_LEAST_FOR_MARKS, limit // 100)  # for events; the rest is for marks
        self._segment_bytes = segment_bytes
        self.failed = FailedStore(folder, node)
        self.recovery = Recovery(folder)
        for corrupt in self.recovery.corrupt:
            self.failed.add_corrupt(corrupt)
        self._suspect_ahead = 0 if self.recovery.clean else AHEAD
        self._lanes = {lane.name: lane for lane in self.recovery.lanes}
        for lane in self._lanes.values():
            lane.suspect_left = max(lane.suspect_left, self._suspect_ahead)
        self.next_seq = self.recovery.next_seq
        self._acked = self.recovery.acked if self.recovery.to_replay else self.next_seq
        self._marked = -1
        self._mark_timer: asyncio.TimerHandle | None = None
        self._commit = PROTOCOLS[protocol](folder, group_commit_ms / 1000, self.next_seq - 1)
        self._segments = {segment.number: segment for segment in self.recovery.segments}
        self._used = sum(segment.size for segment in self._segments.values())
        self._full = False
        self._room: list[asyncio.Future[None]] = []
        self._closed = False
        self.on_durable: Callable[[], None] = lambda: None
        self._header_bytes = 0  # of the active segment, without its events
        self._active = self._roll()
        self._drop([segment for segment in self.recovery.segments if segment.unacked == 0])
        self._commit.write_now()  # so that a crash from now on is recognized
        self._commit.on_durable = self._written

    # --- lanes

    def lane(self, name: str, source: str) -> SourceLane:
        """The lane of this name with its earlier state; created if new."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = SourceLane(len(self._lanes), name, source, suspect_left=self._suspect_ahead)
            self._append_mark()  # goes before the lane's first event
        return lane

    def lanes(self) -> list[SourceLane]:
        """All lanes, including those of collectors that are no longer configured."""
        return list(self._lanes.values())

    # --- appending

    def append(
        self, lane: SourceLane, envelope: Envelope, key: bytes, payload: bytes, position: int | None = None
    ) -> LoggedEvent:
        """Take an event; it becomes durable with its group. Event id, tenant and key have at most 65,535 bytes.

        ``position`` is the upstream's next message, stored with the event. Raises LogFull if the limit is reached (wait
        for :meth:`room`), and LogUnavailable if the disk refuses writes or the log is closed.
        """
        self._check_writable()
        chunks, size = event_chunks(self.next_seq, lane.index, position, envelope, key, payload)
        self._check_room(size)
        return self._append(lane, (Admitted(envelope, key, payload, None),), chunks, [size], position)[0]

    def append_all(self, lane: SourceLane, events: Sequence[Admitted]) -> list[LoggedEvent]:
        """Take all of these events or none, like :meth:`append` of each but with one update of the counters."""
        self._check_writable()
        index, first = lane.index, self.next_seq
        chunks: list[bytes] = []
        sizes: list[int] = []
        for seq, event in enumerate(events, first):
            parts, size = event_chunks(seq, index, None, event.envelope, event.key, event.payload)
            chunks += parts
            sizes.append(size)
        total = sum(sizes)
        self._check_room(total)
        if not self._commit.alone and self._active.size + total <= self._segment_bytes:
            return self._append(lane, events, chunks, sizes)
        logged: list[LoggedEvent] = []
        for n, event in enumerate(events):
            logged += self._append(lane, (event,), chunks[2 * n : 2 * n + 2], sizes[n : n + 1])
        return logged

    def _check_writable(self) -> None:
        if self._commit.problem or self._closed:
            raise LogUnavailable(f"the message log cannot be written: {self._commit.problem or 'it is closed'}")

    def _check_room(self, size: int) -> None:
        if not self._fits(size):
            raise LogFull(self.used, self.limit, size)

    def _fits(self, size: int) -> bool:
        """Whether this many bytes fit now; makes room by dropping acknowledged events."""
        if self.used + size > self._most:
            self._turn()
        if self.used + size > self._most:
            self._full = True
            return False
        return True

    def _append(
        self,
        lane: SourceLane,
        events: Sequence[Admitted],
        chunks: list[bytes],
        sizes: list[int],
        position: int | None = None,
    ) -> list[LoggedEvent]:
        """Put events into one segment and one group and update all counters."""
        if not events:
            return []
        first, count = self.next_seq, len(events)
        segment, offset = self._place(chunks, sum(sizes))
        group = self._commit.group(first + count - 1)
        self.next_seq = first + count
        segment.unacked += count
        group.unacked += count
        group.counts[lane] = group.counts.get(lane, 0) + count
        lane.received += count
        lane.in_log += count
        lane.last_at = events[-1].envelope.received_at
        if position is not None:
            lane.position = position
        logged: list[LoggedEvent] = []
        for seq, event in enumerate(events, first):
            envelope = event.envelope
            if envelope.reject is not None:
                lane.rejected += 1
            if envelope.extra:
                lane.cursor = dict(envelope.extra).get(UPSTREAM_ID, lane.cursor)
            logged.append(LoggedEvent(seq, lane, envelope, event.key, event.payload, segment, offset, group))
            offset += sizes[seq - first]
        self._commit.received()
        return logged

    def has_room(self, payload_bytes: int, events: int = 1) -> bool:
        """Whether events of this total size would be taken now."""
        fits = self._fits(payload_bytes + events * (EVENT_OVERHEAD + _FIELDS_BYTES))
        return fits and not (self.full or self._commit.problem or self._closed)

    async def room(self, size: int = 0) -> None:
        """Return when the log takes this many bytes. Never returns once the log is closed."""
        while self._closed or self._commit.problem or not self._fits(size) or self.full:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    @property
    def full(self) -> bool:
        """Whether the limit was reached and less than a tenth has been freed since."""
        if self._full and self.used <= self.limit * 0.9:
            self._full = False
        return self._full

    @property
    def used(self) -> int:
        """Bytes on disk, including pending writes."""
        return self._used + self.failed.bytes

    @property
    def problem(self) -> str:
        """Why the disk refuses writes, or empty."""
        return self._commit.problem

    @property
    def durable_seq(self) -> int:
        """Every event up to this sequence number is on disk."""
        return self._commit.durable_seq

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    def observe(self, call: Callable[[float], None]) -> None:
        """Call ``call`` for each group with the seconds from its first event until it was durable."""
        self._commit.observe = call

    # --- sending, and acknowledgement by Kafka

    def sending(self, seq: int) -> None:
        """The events up to this one are now handed to Kafka's client, or set aside."""
        self._commit.sending(seq)

    def acked(self, events: Iterable[LoggedEvent], first_outstanding: int) -> None:
        """Record that Kafka or the failed store has these events, each named once.

        ``first_outstanding`` is the lowest sequence number that is neither acknowledged nor failed.
        """
        drop: list[LogSegment] = []
        active = self._active
        for segment, lane, group, count in _runs(events):
            segment.unacked -= count
            lane.in_log -= count
            if segment.unacked == 0 and segment is not active:
                drop.append(segment)
            if group is not None:
                group.unacked -= count
                if group.unacked == 0 and not self._commit.is_open(group):
                    group.close()
        self._acked = first_outstanding
        if drop:
            self._drop(drop)
        if self._full or self._room:
            self._turn()
        if self._commit.acked() and not self._closed and self._acked > self._marked:
            self._mark_now()
        elif self._mark_timer is None and not self._closed and self._acked > self._marked:
            self._mark_timer = asyncio.get_running_loop().call_later(MARK_INTERVAL_S, self._mark_now)

    async def fail(self, event: LoggedEvent, reason: str) -> None:
        """Move an event that Kafka refuses for good to the failed store; call :meth:`acked` afterwards."""
        body = event_head(event.lane.index, None, event.envelope, event.key) + event.payload
        await asyncio.get_running_loop().run_in_executor(
            self._commit.worker, self.failed.add, event.seq, event.envelope.source, reason, body
        )
        event.lane.failed += 1

    # --- reading back

    def cursor(self) -> Cursor:
        """The start of the log."""
        return Cursor(min(self._segments), 0)

    def read(
        self, cursor: Cursor, *, from_seq: int, until_seq: int, max_bytes: int
    ) -> tuple[list[LoggedEvent], Cursor]:
        """Read durable events with ``from_seq <= seq < until_seq``, and the cursor to read on from. Blocks.

        There are about ``max_bytes`` of events in order, fewer at the end of a segment, none if nothing more is there
        now.
        """
        events: list[LoggedEvent] = []
        lanes = self.lanes()
        for number in sorted(n for n in list(self._segments) if n >= cursor.segment):
            segment = self._segments.get(number)
            at = cursor.offset if number == cursor.segment else 0
            while segment is not None and not events and at < segment.durable:
                for frame in _read_frames(segment, at, max_bytes):
                    if isinstance(frame, Damage):
                        logger.error("%s: bytes %d to %d cannot be read back", segment.path, frame.offset, frame.end)
                    elif frame.kind in EVENTS and frame.seq >= until_seq:
                        return events, Cursor(number, frame.offset)
                    elif frame.kind in EVENTS and frame.seq >= from_seq:
                        lane = lanes[int.from_bytes(frame.body[1:3], "little")]
                        found = read_event(frame.body, source=lane.source, collector=self._node)
                        place = (segment, frame.offset, None)
                        events.append(LoggedEvent(frame.seq, lane, found.envelope, found.key, found.payload, *place))
                    at = frame.end
            cursor = Cursor(number, at)
            if events:
                break
        return events, cursor

    # --- closing

    async def close(self) -> None:
        """Write pending bytes, mark the log as closed, and release the folder."""
        if self._closed:
            return
        self._closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        self._append_mark(clean=True)
        await self._commit.close()
        os.close(self._lock)

    # --- segments and marks

    def _place(self, chunks: list[bytes], size: int) -> tuple[LogSegment, int]:
        segment = self._active
        if segment.size > self._header_bytes and segment.size + size > self._segment_bytes:
            self._active = self._roll()
            if segment.unacked == 0:
                self._drop([segment])
            segment = self._active
        self._used += size
        return segment, self._commit.add(segment, chunks, size)

    def _roll(self) -> LogSegment:
        """Begin a segment. It starts with a mark, so that older segments can be removed."""
        number = max(self._segments, default=0) + 1
        segment = self._segments[number] = LogSegment(number, segment_path(self._folder, number))
        chunks = [SEGMENT_MAGIC, *self._mark_chunks(clean=False)]
        self._header_bytes = sum(map(len, chunks))
        self._used += self._header_bytes
        self._commit.add(segment, chunks, self._header_bytes)
        return segment

    def _turn(self) -> None:
        """Begin a new segment if nothing in the active one is outstanding, to free its space."""
        old = self._active
        if old.unacked == 0 and old.size > self._header_bytes and not self._closed:
            self._active = self._roll()
            self._drop([old])
            self._commit.flush_soon()

    def _drop(self, segments: list[LogSegment]) -> None:
        for segment in segments:
            if self._segments.pop(segment.number, None) is not None:
                self._used -= segment.size
        self._commit.remove(segments)
        self._wake_room()

    def _mark_chunks(self, *, clean: bool) -> list[bytes]:
        self._marked = self._acked
        state = {"acked": self._acked, "clean": clean, "lanes": [lane.state() for lane in self._lanes.values()]}
        return frame_chunks(self.next_seq, mark_body(orjson.dumps(state)))

    def _append_mark(self, *, clean: bool = False) -> None:
        chunks = self._mark_chunks(clean=clean)
        self._place(chunks, sum(map(len, chunks)))

    def _mark_now(self) -> None:
        self._mark_timer = None
        if self._acked > self._marked:
            self._append_mark()
            self._commit.flush_soon()

    def _written(self) -> None:
        self._wake_room()
        self.on_durable()

    def _wake_room(self) -> None:
        if self._room and not self.full and not self._commit.problem:
            waiting, self._room = self._room, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def _read_frames(segment: LogSegment, offset: int, max_bytes: int) -> Iterator[LogFrame | Damage]:
    """Yield frames of the durable part of a segment from ``offset``: about ``max_bytes``, at least one frame."""
    offset = max(offset, len(SEGMENT_MAGIC))
    end = segment.durable
    handle = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(handle, min(max_bytes, end - offset), offset)
        for item in scan(data, 0, offset):
            if isinstance(item, Damage) and item.tail and offset + len(data) < end:
                if item.offset == offset:  # the first frame alone is longer than the bytes read
                    yield from scan(os.pread(handle, end - offset, offset), 0, offset)
                return
            yield item
    finally:
        os.close(handle)


def least_limit(payload_bytes: int) -> int:
    """The smallest limit of a log that can take a payload of this size when it is otherwise empty."""
    least = payload_bytes + _OVERHEAD_BYTES
    return least + max(_LEAST_FOR_MARKS, math.ceil(least / 99))


def _runs(events: Iterable[LoggedEvent]) -> Iterator[tuple[LogSegment, SourceLane, CommitGroup | None, int]]:
    """Consecutive events with equal segment, lane and group, as (segment, lane, group, count)."""
    first: LoggedEvent | None = None
    count = 0
    for event in events:
        if first is not None and (
            event.group is first.group and event.segment is first.segment and event.lane is first.lane
        ):
            count += 1
            continue
        if first is not None:
            yield first.segment, first.lane, first.group, count
        first, count = event, 1
    if first is not None:
        yield first.segment, first.lane, first.group, count
