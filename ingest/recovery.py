"""What the files of an earlier run hold: every segment is read and verified when the log is opened."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from ingest.events import Lane, Segment
from ingest.records import (
    EVENT_X,
    EVENTS,
    MARK,
    SEGMENT_MAGIC,
    Damage,
    Frame,
    event_extra,
    event_fields,
    frame_heads,
    scan,
)
from ingest.segments import SUFFIX
from lakehouse.contract.envelope import UPSTREAM_ID

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Bytes of a segment that cannot be read.

    Attributes:
        segment: name of the file.
        offset: of the first byte.
        data: the bytes.
        lanes: that the events in it may have come by: what is left of their heads says so, else the lanes before and
            after it.
        first_seq: lowest sequence number that may be in it.
        last_seq: highest one; less than ``first_seq``: no event is missing, a mark was hit.
        torn: it is the end of a write that a crash interrupted: no event in it was acknowledged from the log.
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


@dataclass(slots=True)
class Recovery:
    """What the files of an earlier run hold.

    Attributes:
        segments: in order; those without unacknowledged events can go.
        lanes: with state folded up to the last readable event.
        next_seq: sequence number of the next event.
        acked: every event before this sequence number has been acknowledged by Kafka.
        to_replay: events that Kafka has not acknowledged.
        torn_bytes: cut off the end of the newest segment: a write that the crash interrupted.
        corrupt: what could not be read elsewhere.
        torn: the interrupted write, or None.
        clean: the earlier run closed the log properly.
    """

    segments: list[Segment] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    next_seq: int = 1
    acked: int = 0
    to_replay: int = 0
    torn_bytes: int = 0
    corrupt: list[Corrupt] = field(default_factory=list)
    torn: Corrupt | None = None
    clean: bool = True


def recover(folder: Path, *, mend: bool = True) -> Recovery:
    """Read every segment in ``folder``, verify it, cut a torn tail off the newest, fold the state of the lanes.

    Args:
        folder: of the log.
        mend: False: change nothing and say nothing, for a look at a log that may be in use.
    """
    return _Fold(mend).run(sorted(folder.glob(f"*{SUFFIX}")))


class _Fold:
    """Folds frames, in the order they were written, into a :class:`Recovery`."""

    def __init__(self, mend: bool) -> None:
        self.found = Recovery()
        self.mend = mend
        self.open_damage: list[Corrupt] = []  # whose end is known when the next frame is
        self.last_lane = -1
        self.last_seq = 0
        self.lanes: dict[int, Lane] = {}
        self.events: list[tuple[Segment, array[int], array[int]]] = []  # per segment: sequence numbers, lanes

    def run(self, paths: Sequence[Path]) -> Recovery:
        found = self.found
        for path in paths:
            self._segment(path, newest=path is paths[-1])
        self._close_damage(found.next_seq)
        found.corrupt = [replace(item, in_kafka=item.last_seq < found.acked) for item in found.corrupt]
        if self.mend:
            for item in found.corrupt:
                logger.error("%s; the failed store keeps the bytes", item)
        for segment, seqs, lanes in self.events:
            for seq, index in zip(seqs, lanes, strict=True):
                if seq >= found.acked:
                    segment.unacked += 1
                    self._lane(index).in_log += 1
            found.to_replay += segment.unacked
        found.lanes = [self._lane(index) for index in range(max(self.lanes, default=-1) + 1)]
        for lane in found.lanes:
            lane.durable = lane.received
        found.next_seq = max(found.next_seq, self.last_seq + 1)
        return found

    def _segment(self, path: Path, *, newest: bool) -> None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # a node that runs has just removed it
            return
        segment = Segment(int(path.stem), path, len(data), len(data))
        self.found.segments.append(segment)
        seqs, lanes = array("Q"), array("H")
        self.events.append((segment, seqs, lanes))
        for item in scan(data, len(SEGMENT_MAGIC) if data.startswith(SEGMENT_MAGIC) else 0):
            if isinstance(item, Damage):
                self._damage(segment, data, item, newest=newest)
                continue
            if self.open_damage:
                self._close_damage(item.seq, item)
            if item.kind == MARK:
                self._mark(item)
            elif item.kind in EVENTS and item.seq > self.last_seq:
                self.last_seq = item.seq
                self.found.clean = False  # nothing follows the mark of a clean close
                seqs.append(item.seq)
                lanes.append(self._event(item))

    def _damage(self, segment: Segment, data: bytes, damage: Damage, *, newest: bool) -> None:
        first = max(self.last_seq + 1, self.found.next_seq if self.last_seq == 0 else 0)
        item = Corrupt(segment.path.name, damage.offset, data[damage.offset : damage.end], (), first)
        self.found.clean = False
        if not (newest and damage.tail):
            self.open_damage.append(item)
            return
        self.found.torn = replace(item, torn=True)
        self.found.torn_bytes = damage.end - damage.offset
        segment.size = segment.durable = damage.offset
        if self.mend:
            logger.warning("%s; they are cut off", self.found.torn)
            with segment.path.open("r+b") as file:
                file.truncate(damage.offset)
                os.fsync(file.fileno())

    def _close_damage(self, next_seq: int, frame: Frame | None = None) -> None:
        """What comes after the damage is known: so is what may be missing in it."""
        after = event_fields(frame.body)[0] if frame is not None and frame.kind in EVENTS else -1
        for item in self.open_damage:
            found = {lane for seq, lane in frame_heads(item.data) if item.first_seq <= seq < next_seq}
            names = [
                self.lanes[index].name for index in sorted(found or {self.last_lane, after}) if index in self.lanes
            ]
            self.found.corrupt.append(replace(item, lanes=tuple(names), last_seq=next_seq - 1))
        self.open_damage.clear()

    def _mark(self, frame: Frame) -> None:
        state = orjson.loads(frame.body[1:])
        self.found.acked = max(self.found.acked, state["acked"])
        self.found.clean = state["clean"]
        self.found.next_seq = max(self.found.next_seq, frame.seq)
        for index, values in enumerate(state["lanes"]):
            self.lanes[index] = Lane(index, **values)

    def _event(self, frame: Frame) -> int:
        index, position, received_at, rejected = event_fields(frame.body)
        self.last_lane = index
        lane = self._lane(index)
        lane.received += 1
        lane.rejected += rejected
        lane.last_at = received_at
        if position is not None:
            lane.position = position
        if frame.kind == EVENT_X:
            lane.cursor = dict(event_extra(frame.body)).get(UPSTREAM_ID, lane.cursor)
        return index

    def _lane(self, index: int) -> Lane:
        # A lane is named by a mark before its first event; without a name only if that mark is corrupt.
        return self.lanes.setdefault(index, Lane(index, f"lost/{index}", ""))
