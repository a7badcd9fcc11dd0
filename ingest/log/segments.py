"""Segment files of the message log: locking, reading, and the writes of the worker thread."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ingest.log.events import LogSegment
from ingest.log.records import SEGMENT_MAGIC, Damage, LogFrame, scan
from lakehouse.contract.errors import EnvironmentProblem

SUFFIX = ".seg"


def lock_folder(folder: Path) -> int:
    """Lock ``folder/lock`` and return its file descriptor. The lock ends with the process.

    Raises:
        EnvironmentProblem: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise EnvironmentProblem(
            f"the message log {folder} is in use{f' by process {owner}' if owner else ''}",
            "Stop that collector, or give this one another node name",
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Bytes to write at ``offset`` of a segment; ``chunks`` grows until the part is written."""

    segment: LogSegment
    offset: int
    chunks: list[bytes]


class SegmentWriter:
    """Writes parts and removes segments. Only one worker thread may call it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}  # segment number to file descriptor
        self._created = False  # a file whose directory entry is not durable yet
        self._newest = 0  # newest segment whose first bytes, and so the earlier state, are durable
        self._kept: list[LogSegment] = []  # removed once a newer one is durable

    def write(self, parts: Sequence[SegmentPart], remove: Sequence[LogSegment]) -> list[int]:
        """Make the parts durable and remove segments. After an error the same parts may be written again.

        A segment is removed only when a newer one, which carries the earlier state, is on disk. So one always does.

        Each part has a fixed offset, so a repeated write makes the same bytes dirty again: after a failed fsync the
        kernel may have dropped them.

        Returns:
            The number of bytes of each part.
        """
        sizes = []
        self._kept += [segment for segment in remove if segment not in self._kept]  # a retried write repeats them
        self._remove_older()  # on a full disk, removing comes before writing
        for number, part in enumerate(parts):
            handle = self._open.get(part.segment.number)
            if handle is None:
                handle = os.open(part.segment.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._open[part.segment.number] = handle
                self._created = True
            sizes.append(_write_all(handle, b"".join(part.chunks), part.offset))
            os.fdatasync(handle)
            if number < len(parts) - 1 and parts[number + 1].segment is not part.segment:
                os.close(self._open.pop(part.segment.number))
        if self._created:
            self._sync_folder()
            self._created = False
        self._newest = max(self._newest, *(part.segment.number for part in parts)) if parts else self._newest
        self._remove_older()
        return sizes

    def _remove_older(self) -> None:
        """Remove segments that are older than a durable one."""
        for segment in self._kept:
            if segment.number < self._newest:
                with suppress(KeyError):
                    os.close(self._open.pop(segment.number))
                segment.path.unlink(missing_ok=True)
        self._kept = [segment for segment in self._kept if segment.number >= self._newest]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_all(handle: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
    return len(data)


def read_frames(segment: LogSegment, offset: int, max_bytes: int) -> Iterator[LogFrame | Damage]:
    """Yield frames of the durable part of a segment from ``offset``: about ``max_bytes``, at least one frame."""
    offset = max(offset, len(SEGMENT_MAGIC))
    end = segment.durable
    handle = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(handle, min(max_bytes, end - offset), offset)
        for item in scan(data, 0):
            if isinstance(item, Damage) and item.tail and offset + len(data) < end:
                if item.offset:
                    return  # the frame continues beyond the bytes read
                data = os.pread(handle, end - offset, offset)
                yield from _shift(scan(data, 0), offset)
                return
            yield from _shift((item,), offset)
    finally:
        os.close(handle)


def _shift(items: Iterator[LogFrame | Damage] | tuple[LogFrame | Damage], by: int) -> Iterator[LogFrame | Damage]:
    for item in items:
        if isinstance(item, Damage):
            yield Damage(item.offset + by, item.end + by, item.tail)
        else:
            yield LogFrame(item.offset + by, item.end + by, item.seq, item.kind, item.body)
