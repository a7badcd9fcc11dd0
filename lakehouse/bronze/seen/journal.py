"""The journal: what was entered since the last run was written, a frame for each batch, durable when it is appended.

A frame: magic, checksum, bytes of the position, number of entries; the position; the entries. One that is torn (the
machine stopped while it was written) ends the journal: its batch was never judged, and will be.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from lakehouse.bronze.seen.entries import ENTRY_BYTES, Entries

_FRAME = struct.Struct("<4sIII")
_MAGIC = b"MRSJ"


class Journal:
    """An open journal, at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._size = 0

    def read(self) -> Iterator[tuple[str, Entries]]:
        """Position and entries of each batch; what is torn is cut off behind the last."""
        data = self.path.read_bytes()
        self._size = 0
        while (frame := _frame(data, self._size)) is not None:
            position, entries, self._size = frame
            yield position, entries
        os.ftruncate(self._handle, self._size)

    def append(self, position: str, entries: Entries) -> None:
        """Make a batch durable. Raises OSError: the disk refuses; the journal is as it was."""
        text = position.encode()
        body = text + entries.to_bytes()
        data = _FRAME.pack(_MAGIC, zlib.crc32(body), len(text), len(entries)) + body
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, memoryview(data)[done:], self._size + done)
            os.fdatasync(self._handle)
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(data)

    def bytes(self) -> bytes:
        return os.pread(self._handle, self._size, 0)

    def close(self) -> None:
        os.close(self._handle)


def _frame(data: bytes, at: int) -> tuple[str, Entries, int] | None:
    """Position and entries of the frame here, and where the next begins; None: no whole frame."""
    if len(data) < at + _FRAME.size:
        return None
    magic, checksum, position_bytes, count = _FRAME.unpack_from(data, at)
    begin = at + _FRAME.size
    end = begin + position_bytes + count * ENTRY_BYTES
    if magic != _MAGIC or len(data) < end or zlib.crc32(memoryview(data)[begin:end]) != checksum:
        return None
    text = data[begin : begin + position_bytes].decode()
    return text, Entries.from_bytes(data[begin + position_bytes : end]), end
