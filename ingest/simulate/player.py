"""Plays events as a live upstream would send them: which events are due, which have been sent and when. No I/O.

The clock starts with the first client. From then on event ``i`` is due at ``t0 + i / rate``, whether anybody listens or
not. A client has a place of its own in the sequence, so that a slow one holds up nobody.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import orjson

from ingest.simulate.lines import Lines, Reel, Renew
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Template

_CHUNK = 65_536
_CHUNKS_KEPT = 64


@dataclass(frozen=True, slots=True)
class PlayerStatus:
    """How far a player is.

    Attributes:
        sent: events that have been sent to somebody.
        live: events that have been due so far; more than ``sent`` while clients are away or slow.
        total: how many there will be; None: no end.
        done: all have been sent.
        rate: events a second.
        rounds: rounds of a loop that have been due in full.
    """

    sent: int
    live: int
    total: int | None
    done: bool
    rate: float
    rounds: int


class Player:
    """The state of one playing.

    Args:
        lines: the events.
        rate: events a second.
        loop: play on after the end, in further rounds.
        renew: gives an event of a later round an id of its own; see :class:`~ingest.simulate.lines.Reel`.
        event_id: template of the pipeline's dedupe key, for :meth:`ids`.
        limit: events at most; None: as many as there are.
        clock: seconds, never going back.
        wall: seconds since the epoch.

    Raises:
        ConfigError: the rate is not a positive number.
    """

    def __init__(
        self,
        lines: Lines,
        rate: float,
        *,
        loop: bool = False,
        renew: Renew | None = None,
        event_id: Template | None = None,
        limit: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"{rate} is not a rate", key="rate", remedy="Give events a second, above 0")
        self._reel = Reel(lines, loop=loop, renew=renew)
        self._rate = rate
        self._template = event_id
        self._clock = clock
        self._wall = wall
        self._end = min((n for n in (self._reel.total, limit) if n is not None), default=None)
        self._started_at: float | None = None
        self._times = _SendTimes()

    def join(self) -> int:
        """The live point, for a client that comes without a place; the first client starts the clock."""
        if self._started_at is None:
            self._started_at = self._clock()
            return 0
        return self._live()

    def due_in(self, index: int) -> float | None:
        """Seconds until the event is due, 0 or less once it is; None beyond the end."""
        if self._started_at is None or (self._end is not None and index >= self._end):
            return None
        return self._started_at + index / self._rate - self._clock()

    def take(self, index: int, limit: int) -> list[bytes]:
        """Events from ``index`` on that are due, ``limit`` at most. The caller sends them and tells :meth:`sent`."""
        return self._reel.read(index, max(0, min(limit, self._live() - index)))

    def sent(self, index: int, count: int) -> None:
        """Note that these events go out now."""
        self._times.note(index, count, self._wall() * 1_000)

    def status(self) -> PlayerStatus:
        """How far it is."""
        live = self._live()
        rounds = self._reel.round_of(live)
        return PlayerStatus(self._times.count, live, self._end, self._times.count == self._end, self._rate, rounds)

    def halt(self) -> None:
        """End here: what is due by now is still sent, nothing after it."""
        self._end = self._live()

    def times(self, index: int, limit: int) -> list[float | None]:
        """When each event was sent first, ms since the epoch; None: never, or too long ago (4 million are kept)."""
        return self._times.read(index, max(0, min(limit, self._times.end - index)))

    def ids(self, index: int, limit: int) -> list[str | None]:
        """Each event's id by the template, up to a few hundred at a time; None: it has none, or is malformed."""
        if self._end is not None:
            limit = min(limit, max(0, self._end - index))
        return [self._id(event) for event in self._reel.read(index, limit)]

    def _live(self) -> int:
        if self._started_at is None:
            return 0
        live = int((self._clock() - self._started_at) * self._rate) + 1
        return live if self._end is None else min(live, self._end)

    def _id(self, event: bytes) -> str | None:
        if self._template is None:
            return None
        try:
            value = orjson.loads(event)
        except orjson.JSONDecodeError:
            return None
        return self._template.render(value) if isinstance(value, dict) else None


class _SendTimes:
    """First times by index, in chunks, the oldest of which are dropped: bounded to 34 MB.

    Attributes:
        count: events that have a time, or had one.
        end: one past the last of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.end = 0
        self._chunks: dict[int, array[float]] = {}

    def note(self, index: int, count: int, at_ms: float) -> None:
        """Give these events this time unless they have one."""
        last = index + count
        while index < last:
            number, offset = divmod(index, _CHUNK)
            here = min(last - index, _CHUNK - offset)
            chunk = self._chunk(number)
            if chunk is not None:
                for place in range(offset, offset + here):
                    if math.isnan(chunk[place]):
                        chunk[place] = at_ms
                        self.count += 1
            index += here
        self.end = max(self.end, last)

    def read(self, index: int, count: int) -> list[float | None]:
        """Times of these events."""
        found: list[float | None] = []
        for place in range(index, index + count):
            chunk: Sequence[float] = self._chunks.get(place // _CHUNK, ())
            at_ms = chunk[place % _CHUNK] if chunk else math.nan
            found.append(None if math.isnan(at_ms) else at_ms)
        return found

    def _chunk(self, number: int) -> array[float] | None:
        chunk = self._chunks.get(number)
        newest = max(self.end // _CHUNK, number)
        if chunk is None and number > newest - _CHUNKS_KEPT:
            chunk = self._chunks[number] = array("d", [math.nan]) * _CHUNK
            for old in [n for n in self._chunks if n <= newest - _CHUNKS_KEPT]:
                del self._chunks[old]
        return chunk
