"""Changes from before the ring, rebuilt from the Delta log: how a subscriber goes on where another process stopped.

1. Load the state at the position's version, and look at it through the subscriber's view. 2. Read commit after commit
and make the same messages that the feed made of them, as many at a time as the subscriber's socket takes. 3. Hand over
to the ring as soon as it holds the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lakehouse.contract.deltalog import DeltaLog, TableGone, TableUnreadable
from serve.channel import live_view
from serve.errors import FilterError, PositionExpired
from serve.filters.view import LiveView, View, faults_of
from serve.live import AggregateView
from serve.messages import Message, change_messages
from serve.position import Position, Seal
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
        view: what of the table it sees.
        seal: writes positions.
    """

    def __init__(self, folder: Path, position: Position, view: View, seal: Seal) -> None:
        self.folder = folder
        self.position = position
        self._view = view
        self._seal = seal
        self._reader = TableReader(folder)
        self._log = DeltaLog(folder)
        self._state: TableState | None = None
        self._live: LiveView | None = None

    def next_chunk(self, until: int) -> Chunk:
        """The next messages, up to version ``until`` and about :data:`CHUNK_BYTES`; none when it is there.

        Raises:
            PositionExpired: log or data files have been cleaned up, the table is another one, or the view did not fit
                it then.
        """
        start = self.position
        messages: list[Message] = []
        size = 0
        try:
            state, live = self._opened()
            while state.version < until and size < CHUNK_BYTES:
                change = self._reader.advance(state, self._log.read(state.version + 1))
                with faults_of(self._view):
                    made = change_messages(live.advance(change), self._seal, self._view.id)
                for message in made:
                    assert message.position is not None
                    if message.position > start:
                        messages.append(message)
                        size += len(message.body)
        except (TableGone, TableUnreadable, FilterError) as gone:
            raise PositionExpired(self.folder.name, start.version, str(gone)) from gone
        if messages:
            assert messages[-1].position is not None
            self.position = messages[-1].position
        return Chunk(start, messages)

    def _opened(self) -> tuple[TableState, LiveView]:
        if self._state is None or self._live is None:
            self._state = self._load()
            self._live = live_view(self._view, self._state)
            if isinstance(self._live, AggregateView):
                with faults_of(self._view):
                    for _ in self._live.opening(self._state.rows.values()):
                        pass
        return self._state, self._live

    def _load(self) -> TableState:
        state = self._reader.load(self.position.version)
        if state.table.table_id != self.position.table_id:
            raise TableGone(self.folder.name, "the position is of another table of this name")
        return state
