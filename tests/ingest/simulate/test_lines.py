"""Files of lines and the reel."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.simulate.generator import BLOCK, RsvpGenerator
from ingest.simulate.player import FileLines, Reel, SceneLines, renew_rsvp


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "events.jsonl"


def read_all(reel: Reel, start: int = 0, step: int = 700) -> list[bytes]:
    found: list[bytes] = []
    while some := reel.read(start + len(found), step):
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
    reel = Reel(lines)
    assert reel.total == len(events)
    assert read_all(reel) == events
    assert read_all(reel, 2 * BLOCK - 1) == events[2 * BLOCK - 1 :]
    lines.close()


def test_cut_gzip_gives_what_is_there(path: Path) -> None:
    path = path.with_suffix(".gz")
    packed = gzip.compress(b"\n".join(b"%d" % (n * 7_919) for n in range(5_000)))
    path.write_bytes(packed[: len(packed) // 2])
    lines = FileLines(path)
    assert 0 < lines.total < 5_000
    assert lines.block(0)[:2] == [b"0", b"7919"]
    lines.close()


def test_empty_file_has_no_rounds(path: Path) -> None:
    path.write_bytes(b"\n\n")
    lines = FileLines(path)
    reel = Reel(lines, loop=True)
    assert (reel.total, reel.read(0, 10)) == (0, [])
    lines.close()


def test_rounds_are_renewed_and_repeatable(path: Path) -> None:
    events = [b'{"rsvp_id":%d,"mtime":1}' % n for n in range(10, 15)]
    path.write_bytes(b"\n".join([*events, b"{broken"]))
    lines = FileLines(path)
    reel = Reel(lines, loop=True, renew=renew_rsvp)
    assert reel.total is None
    played = [reel.read(index, 1)[0] for index in range(18)]
    assert played[:5] == events
    assert [played[5], played[11], played[17]] == [b"{broken"] * 3
    ids = [orjson.loads(event)["rsvp_id"] for event in played if event != b"{broken"]
    assert ids == [n + turn * 10**10 for turn in range(3) for n in range(10, 15)]
    again = Reel(lines, loop=True, renew=renew_rsvp)
    assert again.read(13, 5) == played[13:18]
    assert again.round_of(13) == 2
    lines.close()


def test_generated_lines_never_end() -> None:
    generator = RsvpGenerator(1, 0)
    reel = Reel(generator)
    assert reel.total is None
    assert reel.read(50 * BLOCK + 3, 2) == generator.block(50)[3:5]


@given(st.integers(0, 10**9), st.integers(1, 50), st.text(max_size=20))
def test_renewing_changes_the_id_alone(rsvp_id: int, turn: int, name: str) -> None:
    before = {"name": f'"rsvp_id":{rsvp_id} {name}', "rsvp_id": rsvp_id, "list": [1, None]}
    after = orjson.loads(renew_rsvp(orjson.dumps(before), turn))
    assert after == before | {"rsvp_id": rsvp_id + turn * 10**10}


@pytest.mark.parametrize("event", [b"", b"{", b"[1]", b"{}", b'{"rsvp_id":"x"}', b'{"rsvp_id":null}', b"\xff"])
def test_renewing_leaves_what_is_no_rsvp(event: bytes) -> None:
    assert renew_rsvp(event, 3) == event


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
