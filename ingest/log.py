"""The message log: one local store for what Kafka has not acknowledged.

When an event's record is written is the matter of a logging protocol (:mod:`ingest.protocols`). How an event goes
through with the hybrid one:

1. :meth:`MessageLog.append` gives it a sequence number and puts its bytes into the open *group*.
2. At latest ``group_commit_ms`` later the group is sealed; a worker thread makes all sealed groups durable with one
   write and one ``fdatasync``. Nobody waits for that before sending the event to Kafka.
3. The group's events may be acknowledged to their sender when the group is durable, or when Kafka has acknowledged all
   of them, whichever comes first: :meth:`ingest.events.Group.wait`.
4. :meth:`MessageLog.acked` takes Kafka's acknowledgements. A segment in which nothing is outstanding is removed.
   *Marks* in the log say how far Kafka has acknowledged, so that a restart sends little again; they also carry each
   lane's position and counters, so that these outlive the segments.

Everything but the worker's writes runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from ingest.border import Admitted
from ingest.errors import LogFull, LogUnavailable
from ingest.events import Cursor, Group, Lane, LoggedEvent, Segment
from ingest.failed import FailedStore
from ingest.protocols import PROTOCOLS, LoggingProtocol, MakeProtocol
from ingest.records import (
    EVENT_OVERHEAD,
    EVENTS,
    SEGMENT_MAGIC,
    Damage,
    event_chunks,
    event_head,
    frame_chunks,
    mark_body,
    read_event,
)
from ingest.recovery import Recovery, recover
from ingest.segments import lock_folder, read_frames, segment_path
from lakehouse.contract.envelope import UPSTREAM_ID, Envelope

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 16 * 1024 * 1024
MARK_INTERVAL_S = 0.05
AHEAD = 512  # most events sent to Kafka before they are on the disk: so many may be there twice after a crash
_FIELDS_BYTES = 256  # allowance for id, tenant and key in a forecast of size
_BESIDE_BYTES = 16_384  # what an event and its segment have beside the payload, at most
_LEAST_FOR_MARKS = 4_096


class MessageLog:
    """The log of one node; open it with :meth:`open`.

    Attributes:
        recovery: what an earlier run left.
        failed: the failed store.
        next_seq: sequence number of the next event.
    """

    def __init__(
        self,
        folder: Path,
        node: str,
        *,
        limit: int,
        group_commit_ms: int,
        segment_bytes: int,
        protocol: MakeProtocol,
    ) -> None:
        self._lock = lock_folder(folder)
        self._folder = folder
        self._node = node
        self._limit = limit
        self._most = limit - max(_LEAST_FOR_MARKS, limit // 100)  # for events; the rest is for marks
        self._segment_bytes = segment_bytes
        self.failed = FailedStore(folder, node)
        self.recovery: Recovery = recover(folder)
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
        self._commit: LoggingProtocol = protocol(folder, group_commit_ms / 1000, self.next_seq - 1)
        self._segments = {segment.number: segment for segment in self.recovery.segments}
        self._used = sum(segment.size for segment in self._segments.values())
        self._full = False
        self._room: list[asyncio.Future[None]] = []
        self._closed = False
        self._told: Callable[[], None] = lambda: None
        self._header_bytes = 0  # of the active segment; it holds more only when something was appended
        self._active = self._roll()
        self._drop([segment for segment in self.recovery.segments if segment.unacked == 0])
        self._commit.write_now()  # so that a crash from now on is known to be one
        self._commit.on_durable = self._written

    @classmethod
    def open(
        cls,
        folder: Path,
        node: str,
        *,
        limit: int,
        group_commit_ms: int = 5,
        segment_bytes: int = SEGMENT_BYTES,
        protocol: str | MakeProtocol = "hml",
    ) -> MessageLog:
        """Lock the folder, read what an earlier run left, and be ready to append.

        Args:
            folder: of the log; made where it is absent.
            node: id of the collecting node.
            limit: bound in bytes on the disk.
            group_commit_ms: the longest that an event waits for its group to be sealed.
            segment_bytes: size at which a segment is closed; an eighth of the limit at most.
            protocol: when events are made durable: one of :data:`ingest.protocols.PROTOCOLS`, or another of that kind.

        Raises:
            EnvironmentProblem: another process has the log open.
        """
        segment_bytes = min(segment_bytes, max(4096, limit // 8))
        make = PROTOCOLS[protocol] if isinstance(protocol, str) else protocol
        return cls(
            folder, node, limit=limit, group_commit_ms=group_commit_ms, segment_bytes=segment_bytes, protocol=make
        )

    # --- lanes

    def lane(self, name: str, source: str) -> Lane:
        """The lane of this name, with the state it had; made where it is new."""
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(len(self._lanes), name, source, suspect_left=self._suspect_ahead)
            self._append_mark()  # goes before the lane's first event
        return lane

    def lanes(self) -> list[Lane]:
        """All lanes, also those of collectors that are no longer configured."""
        return list(self._lanes.values())

    # --- appending

    def append(
        self, lane: Lane, envelope: Envelope, key: bytes, payload: bytes, position: int | None = None
    ) -> LoggedEvent:
        """Take an event; it becomes durable with its group.

        Args:
            lane: the way it came.
            envelope: its metadata; id and tenant at most 65,535 bytes of UTF-8.
            key: Kafka key, at most 65,535 bytes.
            payload: the event.
            position: where the upstream is to be read next, kept together with the event.

        Raises:
            LogFull: the bound is reached; wait for :meth:`room`.
            LogUnavailable: the disk refuses writes, or the log is closed.
        """
        self._check_writable()
        chunks, size = event_chunks(self.next_seq, lane.index, position, envelope, key, payload)
        self._check_room(size)
        return self._append(lane, (Admitted(envelope, key, payload, None),), chunks, [size], position)[0]

    def append_all(self, lane: Lane, events: Sequence[Admitted]) -> list[LoggedEvent]:
        """Take events that came together, all or none: as :meth:`append` of each, but they are booked once.

        Raises:
            LogFull: the bound is reached; wait for :meth:`room`.
            LogUnavailable: the disk refuses writes, or the log is closed.
        """
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
            raise LogUnavailable(self._commit.problem or "it is closed")

    def _check_room(self, size: int) -> None:
        if not self._fits(size):
            raise LogFull(self.used, self._limit, size)

    def _fits(self, size: int) -> bool:
        """Whether so many bytes go in now; for what nobody waits for any more, room is made."""
        if self.used + size > self._most:
            self._turn()
        if self.used + size > self._most:
            self._full = True
            return False
        return True

    def _append(
        self,
        lane: Lane,
        events: Sequence[Admitted],
        chunks: list[bytes],
        sizes: list[int],
        position: int | None = None,
    ) -> list[LoggedEvent]:
        """Put events into one segment and one group, and into the books of both and of the lane."""
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
        """Whether events of so many bytes together would be taken now."""
        fits = self._fits(payload_bytes + events * (EVENT_OVERHEAD + _FIELDS_BYTES))
        return fits and not (self.full or self._commit.problem or self._closed)

    async def room(self, size: int = 0) -> None:
        """Return when the log takes events again, so many bytes of them; never, once it is closed."""
        while self._closed or self._commit.problem or not self._fits(size) or self.full:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(future)
            await future

    @property
    def full(self) -> bool:
        """Whether the bound was reached and less than a tenth has been freed since."""
        if self._full and self.used <= self._limit * 0.9:
            self._full = False
        return self._full

    @property
    def used(self) -> int:
        """Bytes on the disk, or about to be."""
        return self._used + self.failed.bytes

    @property
    def limit(self) -> int:
        """Bound of :attr:`used`."""
        return self._limit

    @property
    def problem(self) -> str:
        """Why the disk refuses writes, or empty."""
        return self._commit.problem

    @property
    def durable_seq(self) -> int:
        """Every event up to this sequence number is on the disk."""
        return self._commit.durable_seq

    @property
    def segment_count(self) -> int:
        """Segments on the disk."""
        return len(self._segments)

    def notify(
        self, *, durable: Callable[[], None] | None = None, observe: Callable[[float], None] | None = None
    ) -> None:
        """Be told of writes.

        Args:
            durable: called on the event loop after each.
            observe: called for each group with the seconds from its first event until it was durable.
        """
        if durable is not None:
            self._told = durable
        if observe is not None:
            self._commit.observe = observe

    # --- sending, and acknowledgement by Kafka

    def sending(self, seq: int) -> None:
        """The events up to this one are handed to Kafka's client now, or put aside."""
        self._commit.sending(seq)

    def acked(self, events: Iterable[LoggedEvent], first_outstanding: int) -> None:
        """Kafka has these events, or the failed store has.

        Args:
            events: each of them once.
            first_outstanding: the lowest sequence number that is neither acknowledged nor failed.
        """
        drop: list[Segment] = []
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
        """Keep an event that Kafka will never take; :meth:`acked` has to follow."""
        body = event_head(event.lane.index, None, event.envelope, event.key) + event.payload
        await asyncio.get_running_loop().run_in_executor(
            self._commit.worker, self.failed.add, event.seq, event.envelope.source, reason, body
        )
        event.lane.failed += 1

    # --- reading back

    def cursor(self) -> Cursor:
        """The oldest place in the log."""
        return Cursor(min(self._segments), 0)

    def read(
        self, cursor: Cursor, *, from_seq: int, until_seq: int, max_bytes: int
    ) -> tuple[list[LoggedEvent], Cursor]:
        """Durable events with ``from_seq <= seq < until_seq`` from the cursor on. Blocks: call it from a thread.

        Returns:
            about ``max_bytes`` of events in order, fewer at the end of a segment, and the place to go on from. No
            events: there is nothing more now.
        """
        events: list[LoggedEvent] = []
        lanes = self.lanes()
        for number in sorted(n for n in list(self._segments) if n >= cursor.segment):
            segment = self._segments.get(number)
            at = cursor.offset if number == cursor.segment else 0
            while segment is not None and not events and at < segment.durable:
                for frame in read_frames(segment, at, max_bytes):
                    if isinstance(frame, Damage):
                        logger.error("%s: bytes %d to %d cannot be read back", segment.path, frame.offset, frame.end)
                    elif frame.kind in EVENTS and frame.seq >= until_seq:
                        return events, Cursor(number, frame.offset)
                    elif frame.kind in EVENTS and frame.seq >= from_seq:
                        events.append(self._logged(frame.seq, frame.body, lanes, segment, frame.offset))
                    at = frame.end
            cursor = Cursor(number, at)
            if events:
                break
        return events, cursor

    def _logged(self, seq: int, body: bytes, lanes: Sequence[Lane], segment: Segment, offset: int) -> LoggedEvent:
        lane = lanes[int.from_bytes(body[1:3], "little")]
        stored = read_event(body, source=lane.source, collector=self._node)
        return LoggedEvent(seq, lane, stored.envelope, stored.key, stored.payload, segment, offset, None)

    # --- closing

    async def close(self) -> None:
        """Make everything durable, mark the log as properly closed, and let go of the folder."""
        if self._closed:
            return
        self._closed = True
        if self._mark_timer is not None:
            self._mark_timer.cancel()
        self._append_mark(clean=True)
        await self._commit.close()
        os.close(self._lock)

    # --- segments and marks

    def _place(self, chunks: list[bytes], size: int) -> tuple[Segment, int]:
        segment = self._active
        if segment.size > self._header_bytes and segment.size + size > self._segment_bytes:
            self._active = self._roll()
            if segment.unacked == 0:
                self._drop([segment])
            segment = self._active
        self._used += size
        return segment, self._commit.add(segment, chunks, size)

    def _roll(self) -> Segment:
        """Begin a segment, with a mark first, so that older ones can be removed."""
        number = max(self._segments, default=0) + 1
        segment = self._segments[number] = Segment(number, segment_path(self._folder, number))
        chunks = [SEGMENT_MAGIC, *self._mark_chunks(clean=False)]
        self._header_bytes = sum(map(len, chunks))
        self._used += self._header_bytes
        self._commit.add(segment, chunks, self._header_bytes)
        return segment

    def _turn(self) -> None:
        """Begin a new segment where nothing of the active one is outstanding: then its room is free."""
        old = self._active
        if old.unacked == 0 and old.size > self._header_bytes and not self._closed:
            self._active = self._roll()
            self._drop([old])
            self._commit.flush_soon()

    def _drop(self, segments: list[Segment]) -> None:
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
        self._told()

    def _wake_room(self) -> None:
        if self._room and not self.full and not self._commit.problem:
            waiting, self._room = self._room, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def least_limit(payload_bytes: int) -> int:
    """The smallest bound of a log that can take an event of so many bytes, once Kafka has every other."""
    least = payload_bytes + _BESIDE_BYTES
    return least + max(_LEAST_FOR_MARKS, math.ceil(least / 99))


def _runs(events: Iterable[LoggedEvent]) -> Iterator[tuple[Segment, Lane, Group | None, int]]:
    """Segment, lane and group of events, with how many follow each other that have the same."""
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
