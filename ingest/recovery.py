"""What the files of an earlier run hold: every segment is read and verified when the log is opened."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from ingest.events import Lane, Segment
from ingest.records import EVENT, MARK, SEGMENT_MAGIC, Damage, Frame, event_fields, scan
from ingest.segments import SUFFIX

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Bytes of a segment that cannot be read, though they were once durable.

    Attributes:
        segment: name of the file.
        offset: of the first byte.
        data: the bytes.
    """

    segment: str
    offset: int
    data: bytes


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
        clean: the earlier run closed the log properly.
    """

    segments: list[Segment] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    next_seq: int = 1
    acked: int = 0
    to_replay: int = 0
    torn_bytes: int = 0
    corrupt: list[Corrupt] = field(default_factory=list)
    clean: bool = True


def recover(folder: Path) -> Recovery:
    """Read every segment in ``folder``, verify it, cut a torn tail off the newest, fold the state of the lanes."""
    return _Fold().run(sorted(folder.glob(f"*{SUFFIX}")))


class _Fold:
    """Folds frames, in the order they were written, into a :class:`Recovery`."""

    def __init__(self) -> None:
        self.found = Recovery()
        self.last_seq = 0
        self.lanes: dict[int, Lane] = {}
        self.events: list[tuple[Segment, array[int], array[int]]] = []  # per segment: sequence numbers, lanes

    def run(self, paths: Sequence[Path]) -> Recovery:
        found = self.found
        for path in paths:
            self._segment(path, newest=path is paths[-1])
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
        data = path.read_bytes()
        segment = Segment(int(path.stem), path, len(data), len(data))
        self.found.segments.append(segment)
        seqs, lanes = array("Q"), array("H")
        self.events.append((segment, seqs, lanes))
        for item in scan(data, len(SEGMENT_MAGIC) if data.startswith(SEGMENT_MAGIC) else 0):
            if isinstance(item, Damage):
                self._damage(segment, data, item, newest=newest)
            elif item.kind == MARK:
                self._mark(item)
            elif item.kind == EVENT and item.seq > self.last_seq:
                self.last_seq = item.seq
                self.found.clean = False  # nothing follows the mark of a clean close
                seqs.append(item.seq)
                lanes.append(self._event(item))

    def _damage(self, segment: Segment, data: bytes, damage: Damage, *, newest: bool) -> None:
        if newest and damage.tail:
            self.found.torn_bytes = damage.end - damage.offset
            self.found.clean = False
            logger.warning("%s: cut %d bytes of an interrupted write off its end", segment.path, self.found.torn_bytes)
            with segment.path.open("r+b") as file:
                file.truncate(damage.offset)
                os.fsync(file.fileno())
            segment.size = segment.durable = damage.offset
            return
        logger.error(
            "%s: bytes %d to %d are corrupt; the failed store keeps them", segment.path, damage.offset, damage.end
        )
        self.found.clean = False
        self.found.corrupt.append(Corrupt(segment.path.name, damage.offset, data[damage.offset : damage.end]))

    def _mark(self, frame: Frame) -> None:
        state = orjson.loads(frame.body[1:])
        self.found.acked = max(self.found.acked, state["acked"])
        self.found.clean = state["clean"]
        self.found.next_seq = max(self.found.next_seq, frame.seq)
        for index, values in enumerate(state["lanes"]):
            self.lanes[index] = Lane(index, **values)

    def _event(self, frame: Frame) -> int:
        index, position, received_at, rejected = event_fields(frame.body)
        lane = self._lane(index)
        lane.received += 1
        lane.rejected += rejected
        lane.last_at = received_at
        if position is not None:
            lane.position = position
        return index

    def _lane(self, index: int) -> Lane:
        # A lane is named by a mark before its first event; without a name only if that mark is corrupt.
        return self.lanes.setdefault(index, Lane(index, f"lost/{index}", ""))
