"""What is played, as a live upstream sends it: which events are due, and which were sent when.

The clock starts with the first client. From then on event ``i`` is due at ``t0 + i / rate``, whether anyone listens or
not. Each client has its own place in the sequence, so a slow one delays no other.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import math
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

import orjson

from ingest.simulate.generator import BLOCK, RsvpGenerator
from ingest.simulate.scenes import SCENES, Scene
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.pipeline import Pipeline, Template

_CHUNK = 65_536
_CHUNKS_KEPT = 64
_CACHED_BLOCKS = 16
_SCENE_BLOCKS = 64  # of a scene, kept
_SAMPLE = 2_000  # events of a scene from which the shares of its sources are estimated


class Player:
    """The state of one playing.

    Args:
        event_id: template of the dedupe key, for :meth:`ids`.
        clock: seconds, monotonic.
        wall: seconds since the epoch.

    Raises:
        ConfigError: the rate is not positive.
    """

    def __init__(
        self,
        lines: Lines,
        rate: float,
        *,
        event_id: Template | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"{rate} is not a rate", key="rate", remedy="Give events a second, above 0")
        self._block = functools.lru_cache(maxsize=_CACHED_BLOCKS)(lines.block)
        self._end = lines.total
        self._rate = rate
        self._template = event_id
        self._clock = clock
        self._wall = wall
        self._started_at: float | None = None
        self._times = _SendTimes()

    def join(self) -> int:
        """The live point, for a client without a place. The first client starts the clock."""
        if self._started_at is None:
            self._started_at = self._clock()
            return 0
        return self._live()

    def due_in(self, index: int) -> float | None:
        """Seconds until the event is due, 0 or less if it is; None beyond the end."""
        if self._started_at is None or (self._end is not None and index >= self._end):
            return None
        return self._started_at + index / self._rate - self._clock()

    def take(self, index: int, limit: int) -> list[bytes]:
        """At most ``limit`` due events from ``index`` on. The caller sends them and calls :meth:`sent`."""
        return self._read(index, max(0, min(limit, self._live() - index)))

    def sent(self, index: int, count: int) -> None:
        """Note that these events are sent now."""
        self._times.note(index, count, self._wall() * 1_000)

    def status(self) -> dict[str, Any]:
        """Its progress.

        ``sent``: events sent to at least one client; ``live``: events due so far, which are more while clients are
        away or slow; ``total``: number of all events, None: endless; ``done``: whether all are sent; ``rate``: events a
        second.
        """
        sent = self._times.count
        return {
            "sent": sent,
            "live": self._live(),
            "total": self._end,
            "done": sent == self._end,
            "rate": self._rate,
        }

    def halt(self) -> None:
        """End at the live point: what is due is still sent."""
        self._end = self._live()

    def times(self, index: int, limit: int) -> list[float | None]:
        """When each event was first sent, ms since the epoch; None if never, or too long ago (4 million are kept)."""
        return self._times.read(index, max(0, min(limit, self._times.end - index)))

    def ids(self, index: int, limit: int) -> list[str | None]:
        """Each event's id by the template, a few hundred at a time; None if it has none or is malformed."""
        if self._end is not None:
            limit = min(limit, max(0, self._end - index))
        return [self._id(event) for event in self._read(index, limit)]

    def _live(self) -> int:
        if self._started_at is None:
            return 0
        live = int((self._clock() - self._started_at) * self._rate) + 1
        return live if self._end is None else min(live, self._end)

    def _read(self, start: int, limit: int) -> list[bytes]:
        """At most ``limit`` events from ``start`` on; fewer at the end of a block."""
        block, offset = divmod(start, BLOCK)
        return self._block(block)[offset : offset + limit]

    def _id(self, event: bytes) -> str | None:
        if self._template is None:
            return None
        try:
            value = orjson.loads(event)
        except orjson.JSONDecodeError:
            return None
        return self._template.render(value) if isinstance(value, dict) else None


class _SendTimes:
    """First send times by index, in chunks of which the oldest are dropped: at most 34 MB.

    Attributes:
        count: events that have or had a time.
        end: index after the last of them.
    """

    def __init__(self) -> None:
        self.count = 0
        self.end = 0
        self._chunks: dict[int, array[float]] = {}

    def note(self, index: int, count: int, at_ms: float) -> None:
        """Set the time of events that have none."""
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


# --- where events come from


class Lines(Protocol):
    """A sequence of events as bytes, in blocks."""

    @property
    def total(self) -> int | None:
        """Number of events; None: endless."""

    def block(self, number: int) -> list[bytes]:
        """The :data:`~ingest.simulate.generator.BLOCK` events from ``number * BLOCK`` on, or fewer at the end."""


class FileLines:
    """Non-empty lines of a file, also of a gzip file, unchanged and unchecked.

    The file is read once to index the blocks, 8 bytes each. A gzip file is unpacked into a temporary file. The file may
    end inside a line.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("rb") if path.suffix != ".gz" else _unpacked(path)
        self._starts = array("Q")
        self.total: int = 0
        at = 0
        for line in self._file:
            if line.rstrip(b"\r\n"):
                if self.total % BLOCK == 0:
                    self._starts.append(at)
                self.total += 1
            at += len(line)

    def block(self, number: int) -> list[bytes]:
        if number >= len(self._starts):
            return []
        self._file.seek(self._starts[number])
        contents = (line.rstrip(b"\r\n") for line in self._file)
        return list(islice(filter(None, contents), BLOCK))

    def close(self) -> None:
        self._file.close()


class SceneLines:
    """One source's events of a scene, as JSON. A scene is made in order; for a dropped block it starts anew.

    Args:
        start_ms: time of its first event, ms since the epoch.
    """

    total: None = None

    def __init__(self, scene: Scene, source: str, seed: int, start_ms: int) -> None:
        self._start = functools.partial(scene, seed, start_ms)
        self._source = source
        self._events = self._start()
        self._made = 0
        self._kept: dict[int, list[bytes]] = {}

    def block(self, number: int) -> list[bytes]:
        if number < self._made and number not in self._kept:
            self._events, self._made = self._start(), 0
            self._kept.clear()
        while self._made <= number:
            mine = (payload for source, payload in self._events if source == self._source)
            self._kept[self._made] = [orjson.dumps(payload) for payload in islice(mine, BLOCK)]
            self._kept.pop(self._made - _SCENE_BLOCKS, None)
            self._made += 1
        return self._kept[number]


def _unpacked(path: Path) -> IO[bytes]:
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the reader
    try:
        with gzip.open(path, "rb") as packed, contextlib.suppress(EOFError):  # truncated: the data before is valid
            while some := packed.read1(65_536):
                unpacked.write(some)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return unpacked


# --- what a pipeline plays


@dataclass(frozen=True, slots=True)
class Play:
    """What is played, and where.

    Attributes:
        input: JSON-lines file, also gzipped; None: endless invented events.
        rate: events a second, of all sources together.
        seed: of invented events.
        port: port of the loopback address to bind; 0: any free one.
    """

    input: Path | None = None
    rate: float = 100.0
    seed: int = 1
    port: int = 8402


def players_of(pipeline: Pipeline, play: Play, held: ExitStack) -> dict[str, Player]:
    """Players by source: of a recording for the first source, or of invented events for all.

    Args:
        held: closes what they read.

    Raises:
        ConfigError: there is neither a recording nor a scene for this pipeline.
        EnvironmentProblem: the file cannot be read.
    """
    source = next(iter(pipeline.sources.values()))
    scene = SCENES.get(pipeline.name)
    lines: Lines
    if play.input is not None:
        try:
            lines = FileLines(play.input)
        except OSError as error:
            problem = f"{play.input} cannot be read: {error.strerror or error}"
            raise EnvironmentProblem(problem, "Check the path") from None
        held.callback(lines.close)
    elif scene is not None:
        return scene_players(scene, pipeline, rate=play.rate, seed=play.seed)
    elif source.name == "rsvps":
        lines = RsvpGenerator(play.seed, rate=play.rate)
    else:
        raise ConfigError(
            f"there is no scene for the pipeline {pipeline.name!r}",
            key="pipeline",
            remedy=f"Give a recording with --input; scenes: {', '.join(sorted([*SCENES, 'meetup']))}",
        )
    return {source.name: Player(lines, play.rate, event_id=source.event_id_template)}


def scene_players(scene: Scene, pipeline: Pipeline, *, rate: float, seed: int) -> dict[str, Player]:
    """A player for each source of the scene, with rates in the proportions of the scene.

    Raises:
        ConfigError: the scene has events of a source that the pipeline lacks.
    """
    start_ms = int(time.time() * 1000)
    mix = Counter(source for source, _ in islice(scene(seed, start_ms), _SAMPLE))
    unknown = mix.keys() - pipeline.sources.keys()
    if unknown:
        raise ConfigError(
            f"the scene has events of {min(unknown)!r}",
            key="sources",
            remedy=f"Sources of {pipeline.name}: {', '.join(pipeline.sources)}",
            file=pipeline.path,
        )
    players = {}
    for name in (name for name in pipeline.sources if name in mix):
        share = mix[name] / mix.total()
        lines = SceneLines(scene, name, seed, start_ms)
        players[name] = Player(lines, rate * share, event_id=pipeline.sources[name].event_id_template)
    return players
