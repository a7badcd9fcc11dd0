"""Where a player's events come from: a file of JSON lines, or the generator. Both can be read from any place."""

from __future__ import annotations

import contextlib
import gzip
import re
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

import orjson

from ingest.simulate.generator import BLOCK, RsvpGenerator
from ingest.simulate.scenes import Scene

_CACHED_BLOCKS = 16
_ROUND_STEP = 10**10
_RSVP_ID = re.compile(rb'(?<!\\)"rsvp_id"\s*:\s*(\d+)')

Renew = Callable[[bytes, int], bytes]


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
