"""The failed store: events that Kafka will never take, and bytes that cannot be read, each with the reason.

One file of frames beside the segments. A node only ever appends to it; `millrace log retry` takes away what went
through at last. It counts towards the bound of the log.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingest.records import FAILED, RAW, SEGMENT_MAGIC, Damage, StoredEvent, frame_chunks, read_event, read_reason, scan
from ingest.records import reason_body as _body
from ingest.recovery import Corrupt

FILE_NAME = "failed"


@dataclass(frozen=True, slots=True)
class FailedItem:
    """What is kept.

    Attributes:
        seq: sequence number that the event had; 0 for corrupt bytes.
        reason: why it is here.
        event: the event, or None for corrupt bytes.
        data: the corrupt bytes, or the event's payload.
    """

    seq: int
    reason: str
    event: StoredEvent | None
    data: bytes


class FailedStore:
    """Appends and lists. Writing blocks: call it from a worker thread.

    Args:
        folder: of the message log.
        node: id of the collecting node.
        mend: False: change nothing, for a look at a log that may be in use.
    """

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
        """Keep an event durably; one that is here already is not kept twice.

        Args:
            seq: its sequence number in the log.
            source: name of its source.
            reason: why Kafka will not take it.
            body: its EVENT body.
        """
        if seq not in self._seqs:
            self._append(seq, _body(FAILED, f"{source}\n{reason}", body))
            self._seqs.add(seq)

    def add_corrupt(self, corrupt: Corrupt) -> None:
        """Keep bytes of a segment that cannot be read."""
        reason = str(corrupt)
        if _place(reason) not in self._raw:
            self._append(0, _body(RAW, reason, corrupt.data))
            self._raw.add(_place(reason))

    def remove(self, seqs: Collection[int]) -> None:
        """Forget these events, which are in Kafka by now; the file is written anew and changed at once."""
        draft = self._path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(SEGMENT_MAGIC)
            for item in scan(self._path.read_bytes()):
                if isinstance(item, Damage) or (item.kind == FAILED and item.seq in seqs):
                    continue
                for chunk in frame_chunks(item.seq, item.body):
                    file.write(chunk)
            file.flush()
            os.fdatasync(file.fileno())
        draft.replace(self._path)
        self._seqs.difference_update(seqs)
        self.bytes = self._path.stat().st_size

    def __len__(self) -> int:
        return len(self._seqs) + len(self._raw)

    def __iter__(self) -> Iterator[FailedItem]:
        """Everything that is kept, oldest first."""
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
                self._raw.add(_place(read_reason(item.body)[0]))
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


def _place(reason: str) -> str:
    """What of a reason names the damage; the rest is what was known of it then."""
    return reason.partition(" are ")[0]
