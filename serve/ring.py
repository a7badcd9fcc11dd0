"""The ring: the last messages of one channel in one codec, framed once, read by any number of cursors.

A cursor is a number: the message to be sent next. Numbers are never used twice, so a cursor whose message has been
dropped is recognised. One writer, bounded by frames and by bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from serve.messages import Message
from serve.position import Position


@dataclass(frozen=True, slots=True)
class Frame:
    """One message in its wire form.

    Attributes:
        data: bytes as they go on the wire.
        position: where the message brings a subscriber.
        at: ms on the hub's clock when it came.
        message: what it says, kept where somebody may want it merged with others.
    """

    data: bytes
    position: Position
    at: float
    message: Message | None = None


class Ring:
    """Frames ``first`` to ``next - 1``.

    Args:
        start: the position that the first frame to come starts from.
        max_frames, max_bytes: the bound; the newest frame is kept whatever its size.
    """

    def __init__(self, start: Position, *, max_frames: int, max_bytes: int) -> None:
        self._frames: deque[Frame] = deque()
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._start = start
        self.bytes = 0
        self.first = 0

    @property
    def next(self) -> int:
        """The number that the next frame will have: the cursor of one who has everything."""
        return self.first + len(self._frames)

    @property
    def head(self) -> Position:
        """Position of one who has everything."""
        return self._frames[-1].position if self._frames else self._start

    @property
    def start(self) -> Position:
        """The oldest position that can be served from here."""
        return self._start

    @property
    def full(self) -> bool:
        """Whether nothing can be put before its first frame."""
        return len(self._frames) >= self._max_frames or self.bytes >= self._max_bytes

    def append(self, frame: Frame) -> None:
        """Add the newest frame, and drop old ones beyond the bound."""
        self._frames.append(frame)
        self.bytes += len(frame.data)
        while len(self._frames) > 1 and (len(self._frames) > self._max_frames or self.bytes > self._max_bytes):
            dropped = self._frames.popleft()
            self.bytes -= len(dropped.data)
            self._start = dropped.position
            self.first += 1

    def prepend(self, start: Position, frames: Sequence[Frame]) -> int:
        """Fill up backwards with the frames right before :attr:`start`, as far as the bound allows.

        Args:
            start: the position before the first of ``frames``.
            frames: consecutive, the last one ending at :attr:`start`.

        Returns:
            How many were taken, from the end.
        """
        if not frames or frames[-1].position != self._start:
            return 0
        taken = 0
        for frame in reversed(frames):
            if len(self._frames) >= self._max_frames or self.bytes + len(frame.data) > self._max_bytes:
                break
            self._frames.appendleft(frame)
            self.bytes += len(frame.data)
            self.first -= 1
            taken += 1
        if taken:
            self._start = frames[-taken - 1].position if taken < len(frames) else start
        return taken

    def find(self, position: Position) -> int | None:
        """The cursor of a subscriber at this position; None: it is older than the ring, or ahead of it."""
        if not self._start <= position <= self.head:
            return None
        return self.first + bisect_right(self._frames, position, key=lambda frame: frame.position)

    def holds(self, cursor: int) -> bool:
        """Whether one who is at the cursor can be served on."""
        return cursor >= self.first

    def frame(self, cursor: int) -> Frame:
        """The frame of this number; it must be held."""
        return self._frames[cursor - self.first]

    def frames(self, cursor: int, max_bytes: int, max_frames: int | None = None) -> list[Frame]:
        """Frames from the cursor on, at least one where there is one."""
        found: list[Frame] = []
        size = 0
        start = cursor - self.first
        for frame in islice(self._frames, start, None if max_frames is None else start + max_frames):
            if found and size + len(frame.data) > max_bytes:
                break
            found.append(frame)
            size += len(frame.data)
        return found
