"""Changes from before the ring, rebuilt from the Delta log: how a subscriber goes on where another process stopped.

1. Load the state at the position's version. 2. Read commit after commit and make the same messages that the tail made
of them, as many at a time as the subscriber's socket takes. 3. Hand over to the ring as soon as it holds the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve import deltalog
from serve.errors import PositionExpired, TableGone, TableUnreadable
from serve.messages import Message, change_messages
from serve.position import Position
from serve.reader import TableReader
from serve.state import TableState

CHUNK_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive messages.

    Attributes:
        start: the position before the first.
        messages: in order; each has a position.
    """

    start: Position
    messages: Sequence[Message]


class Replay:
    """Rebuilds what follows a position. Blocking: not for the event loop.

    Args:
        folder: the table's folder.
        position: where the subscriber is.
    """

    def __init__(self, folder: Path, position: Position) -> None:
        self.folder = folder
        self.position = position
        self._reader = TableReader(folder)
        self._state: TableState | None = None

    def next_chunk(self, until: int) -> Chunk:
        """The next messages, up to version ``until`` and about :data:`CHUNK_BYTES`; none when it is there.

        Raises:
            PositionExpired: log or data files have been cleaned up, or the table is another one.
        """
        start = self.position
        messages: list[Message] = []
        size = 0
        try:
            state = self._state = self._state or self._load()
            while state.version < until and size < CHUNK_BYTES:
                change = self._reader.advance(state, deltalog.read_commit(self.folder, state.version + 1))
                for message in change_messages(change):
                    assert message.position is not None
                    if message.position > start:
                        messages.append(message)
                        size += len(message.body)
        except (TableGone, TableUnreadable) as gone:
            raise PositionExpired(self.folder.name, start.version, str(gone)) from gone
        if messages:
            assert messages[-1].position is not None
            self.position = messages[-1].position
        return Chunk(start, messages)

    def _load(self) -> TableState:
        state = self._reader.load(self.position.version)
        if state.table.table_id != self.position.table_id:
            raise TableGone(self.folder.name, "the position is of another table of this name")
        return state
