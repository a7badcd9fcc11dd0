"""The player's state, on a clock of the test's; files of lines, and scenes."""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from ingest.simulate.generator import BLOCK, RsvpGenerator
from ingest.simulate.player import FileLines, Lines, Player, SceneLines
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.pipeline import Template


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class ListLines:
    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self.total = len(events)

    def block(self, number: int) -> list[bytes]:
        return self._events[number * 1_024 : (number + 1) * 1_024]


def player(clock: Clock, count: int = 10, rate: float = 2.0) -> Player:
    lines = ListLines([b'{"n":%d}' % n for n in range(count)])
    return Player(lines, rate, event_id=Template("{n}"), clock=clock, wall=lambda: clock.now + 1_000)


def status(sent: int, live: int, total: int, *, done: bool) -> dict[str, object]:
    return {"sent": sent, "live": live, "total": total, "done": done, "rate": 2.0}


def test_clock_starts_with_the_first_client() -> None:
    clock = Clock()
    playing = player(clock)
    clock.now += 60
    assert playing.status() == status(0, 0, 10, done=False)
    assert playing.due_in(0) is None
    assert playing.join() == 0
    assert playing.due_in(0) == 0
    assert playing.take(0, 100) == [b'{"n":0}']
    assert playing.due_in(1) == 0.5
    clock.now += 1.0
    assert playing.join() == 3
    assert playing.take(1, 100) == [b'{"n":1}', b'{"n":2}']
    assert playing.take(1, 1) == [b'{"n":1}']
    assert playing.take(3, 100) == []


def test_ends_and_is_done_when_all_have_been_sent() -> None:
    clock = Clock()
    playing = player(clock)
    playing.join()
    clock.now += 1_000
    assert playing.due_in(9) is not None
    assert playing.due_in(10) is None
    assert playing.status()["live"] == 10
    playing.sent(0, 9)
    assert not playing.status()["done"]
    playing.sent(5, 5)
    assert playing.status() == status(10, 10, 10, done=True)


def test_halting_ends_it_where_it_is() -> None:
    clock = Clock()
    playing = player(clock, count=100)
    playing.join()
    clock.now += 7
    playing.sent(0, 14)
    playing.halt()
    clock.now += 60
    assert playing.status() == status(14, 15, 15, done=False)
    assert playing.take(14, 5) == [b'{"n":14}']
    playing.sent(14, 1)
    assert playing.status()["done"]
    assert playing.due_in(15) is None


def test_times_are_those_of_the_first_send() -> None:
    clock = Clock()
    playing = player(clock, count=200_000, rate=1e6)
    playing.join()
    clock.now += 1
    playing.sent(0, 3)
    clock.now += 1
    playing.sent(1, 4)
    assert playing.times(0, 100) == [1_101_000.0] * 3 + [1_102_000.0] * 2
    assert playing.status()["sent"] == 5
    playing.sent(65_530, 20)  # over a chunk's end
    assert playing.times(65_529, 3) == [None, 1_102_000.0, 1_102_000.0]
    assert len(playing.times(65_530, 1_000)) == 20
    assert playing.status()["sent"] == 25


def test_who_comes_late_and_goes_back_counts_too() -> None:
    clock = Clock()
    playing = player(clock, count=200_000, rate=1e6)
    playing.join()
    clock.now += 1
    playing.sent(150_000, 50_000)
    playing.sent(0, 150_000)
    assert playing.status()["done"]
    assert playing.times(3, 1) == [1_101_000.0]


def test_old_times_are_forgotten_but_counted_once() -> None:
    clock = Clock()
    playing = Player(RsvpGenerator(1, 0), 1e9, clock=clock, wall=lambda: clock.now + 1_000)
    playing.join()
    step = 50_000
    for index in range(0, 6_000_000, step):
        playing.sent(index, step)
    assert playing.status()["sent"] == 6_000_000
    assert playing.times(0, 1) == [None]
    assert playing.times(5_999_999, 1) != [None]
    playing.sent(0, 10)
    assert playing.status()["sent"] == 6_000_000


def test_ids_are_those_of_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'{"a":1,"b":{"c":"x"}}\n{"a":2}\n{"a":3,"b"\n[]\n\xff\n')
    lines = FileLines(path)
    playing = Player(lines, 1.0, event_id=Template("{a}:{b.c}"))
    assert playing.ids(0, 100) == ["1:x", None, None, None, None]
    assert playing.ids(1, 2) == [None, None]
    assert playing.ids(5, 2) == []
    assert Player(lines, 1.0).ids(0, 1) == [None]
    lines.close()


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_a_rate_must_be_one(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        Player(ListLines([]), rate)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "events.jsonl"


def reading(lines: Lines) -> Player:
    """A player all of whose first events are due."""
    clock = Clock()
    playing = Player(lines, 1e6, clock=clock)
    playing.join()
    clock.now += 1
    return playing


def read_all(playing: Player, start: int = 0, step: int = 700) -> list[bytes]:
    found: list[bytes] = []
    while some := playing.take(start + len(found), step):
        found += some
    return found


def test_lines_are_as_they_are(path: Path) -> None:
    path.write_bytes(b'{"a": 1}\n\n  {"b" \xff\r\n\r\nnot json\n{"cut": "of')
    lines = FileLines(path)
    assert lines.total == 4
    assert lines.block(0) == [b'{"a": 1}', b'  {"b" \xff', b"not json", b'{"cut": "of']
    assert lines.block(1) == []
    lines.close()


@pytest.mark.parametrize("packed", [False, True])
def test_reads_from_any_place(path: Path, packed: bool) -> None:
    events = [b'{"n":%d,"x":"%b"}' % (n, b"x" * (n % 50)) for n in range(3 * BLOCK + 17)]
    content = b"\n\n".join(events)
    if packed:
        path = path.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)
    lines = FileLines(path)
    playing = reading(lines)
    assert read_all(playing) == events
    assert read_all(playing, 2 * BLOCK - 1) == events[2 * BLOCK - 1 :]
    lines.close()


def test_cut_gzip_gives_what_is_there(path: Path) -> None:
    path = path.with_suffix(".gz")
    packed = gzip.compress(b"\n".join(b"%d" % (n * 7_919) for n in range(5_000)))
    path.write_bytes(packed[: len(packed) // 2])
    lines = FileLines(path)
    assert 0 < lines.total < 5_000
    assert lines.block(0)[:2] == [b"0", b"7919"]
    lines.close()


def test_generated_lines_never_end() -> None:
    generator = RsvpGenerator(1, 0)
    playing = reading(generator)
    assert playing.take(50 * BLOCK + 3, 2) == generator.block(50)[3:5]


def test_a_scene_in_blocks_from_any_place() -> None:
    def scene(seed: int, start_ms: int) -> Iterator[tuple[str, dict[str, object]]]:
        for number in itertools.count():
            yield ("odd" if number % 2 else "even"), {"n": number, "seed": seed, "at": start_ms}

    lines = SceneLines(scene, "odd", 7, 1_000)
    late = lines.block(90)
    assert orjson.loads(late[0]) == {"n": 2 * 90 * BLOCK + 1, "seed": 7, "at": 1_000}
    assert len(late) == BLOCK
    assert orjson.loads(lines.block(0)[1])["n"] == 3, "an early one that was forgotten is made anew"
    assert lines.block(90) == late
