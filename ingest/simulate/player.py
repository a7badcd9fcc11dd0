"""Plays events as a live upstream would send them: which events are due, which have been sent and when. No I/O.

The clock starts with the first client. From then on event ``i`` is due at ``t0 + i / rate``, whether anybody listens or
not. A client has a place of its own in the sequence, so that a slow one holds up nobody.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import tempfile
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

import orjson

from ingest.simulate.generator import BLOCK, RsvpGenerator
from ingest.simulate.scenes import Scene
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Template

_CHUNK = 65_536
_CHUNKS_KEPT = 64
_CACHED_BLOCKS = 16
_ROUND_STEP = 10**10
_RSVP_ID = re.compile(rb'(?<!\\)"rsvp_id"\s*:\s*(\d+)')
Renew = Callable[[bytes, int], bytes]


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
        renew: gives an event of a later round an id of its own; see :class:`~ingest.simulate.player.Reel`.
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


class Lines(Protocol):
    """A sequence of events as bytes, in blocks."""

    @property
    def total(self) -> int | None:
        """How many there are; None: no end."""

    def block(self, number: int) -> list[bytes]:
        """Events from ``number * BLOCK`` on, :data:`~ingest.simulate.generator.BLOCK` of them or what is left."""


class FileLines:
    """Non-empty lines of a file, also of a gzip file; bytes are not touched, and nothing need be valid.

    The file is read through once to note where each block begins; a gzip file is unpacked into a temporary file for
    that. Memory: 8 bytes a block.

    Args:
        path: the file; it may end in the middle of a line.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("rb") if path.suffix != ".gz" else _unpacked(path)
        self._starts = array("Q")
        self.total: int = 0
        at = 0
        for line in self._file:
            if _content(line):
                if self.total % BLOCK == 0:
                    self._starts.append(at)
                self.total += 1
            at += len(line)

    def block(self, number: int) -> list[bytes]:
        """Lines of this block without their line ends."""
        found: list[bytes] = []
        if number >= len(self._starts):
            return found
        self._file.seek(self._starts[number])
        for line in self._file:
            content = _content(line)
            if content:
                found.append(content)
                if len(found) == BLOCK:
                    break
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class GeneratedLines:
    """The generator's stream.

    Args:
        generator: made with the rate at which it will be played.
    """

    total: None = None

    def __init__(self, generator: RsvpGenerator) -> None:
        self._generator = generator

    def block(self, number: int) -> list[bytes]:
        """Events of this block; made anew each time, always the same."""
        return self._generator.block(number)


class SceneLines:
    """One source's events of a scene, as JSON. A scene is made in order: an early block that was forgotten is had again
    by making the scene anew.

    Args:
        scene: makes the events.
        source: whose events are taken.
        seed: of the scene.
        start_ms: when its first event happens, ms since the epoch.
    """

    total: None = None

    def __init__(self, scene: Scene, source: str, seed: int, start_ms: int) -> None:
        self._scene = scene
        self._seed = seed
        self._start_ms = start_ms
        self._source = source
        self._events = scene(seed, start_ms)
        self._made = 0
        self._kept: OrderedDict[int, list[bytes]] = OrderedDict()

    def block(self, number: int) -> list[bytes]:
        """Events of this block."""
        if number < self._made and number not in self._kept:
            self._events, self._made = self._scene(self._seed, self._start_ms), 0
            self._kept.clear()
        while self._made <= number:
            mine = (payload for source, payload in self._events if source == self._source)
            self._kept[self._made] = [orjson.dumps(payload) for payload in islice(mine, BLOCK)]
            self._made += 1
            if len(self._kept) > 4 * _CACHED_BLOCKS:
                self._kept.popitem(last=False)
        return self._kept[number]


class Reel:
    """Events by index, with the rounds of a loop, from a few blocks in memory.

    Args:
        lines: one round.
        loop: play on after the end, in further rounds.
        renew: makes an event of a later round from one of the first: ``renew(event, round)``, round 1 and up.
            It must give the same result each time. None: rounds are equal.

    Attributes:
        round_total: events of a round; None: no end.
        total: events of all rounds; None: no end.
    """

    def __init__(self, lines: Lines, *, loop: bool = False, renew: Renew | None = None) -> None:
        self._lines = lines
        self._renew = renew
        self._cache: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self.round_total = lines.total
        self.total = None if loop and lines.total else lines.total

    def read(self, start: int, limit: int) -> list[bytes]:
        """Events from ``start`` on: none beyond the end, else at least one and at most ``limit``."""
        if self.total is not None and start >= self.total:
            return []
        turn, index = divmod(start, self.round_total) if self.round_total else (0, start)
        block, offset = divmod(index, BLOCK)
        return self._block(turn, block)[offset : offset + limit]

    def round_of(self, index: int) -> int:
        """Number of the round that an event is in, from 0."""
        return index // self.round_total if self.round_total else 0

    def _block(self, turn: int, number: int) -> list[bytes]:
        key = (turn, number)
        block = self._cache.get(key)
        if block is None:
            block = self._lines.block(number)
            if turn and self._renew is not None:
                block = [self._renew(event, turn) for event in block]
            self._cache[key] = block
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return block


def renew_rsvp(event: bytes, turn: int) -> bytes:
    """An RSVP with an ``rsvp_id`` of its own for this round; what is not a valid RSVP stays as it is."""
    try:
        value = orjson.loads(event)
    except orjson.JSONDecodeError:
        return event
    rsvp_id = value.get("rsvp_id") if isinstance(value, dict) else None
    for match in _RSVP_ID.finditer(event):
        if rsvp_id == int(match[1]):
            return event[: match.start(1)] + b"%d" % (rsvp_id + turn * _ROUND_STEP) + event[match.end(1) :]
    return event


def _content(line: bytes) -> bytes:
    return line.rstrip(b"\r\n")


def _unpacked(path: Path) -> IO[bytes]:
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the reader
    try:
        with gzip.open(path, "rb") as packed, contextlib.suppress(EOFError):  # cut off: what came before is good
            while some := packed.read1(65_536):
                unpacked.write(some)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return unpacked
