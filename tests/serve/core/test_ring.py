from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.core.position import Position
from serve.core.ring import Outgoing, Ring, RingFrame, Subscriber, deliver
from serve.errors import RequestError
from tests.serve.core.test_hub import CODEC, Socket


def at(version: int) -> Position:
    return Position("t", version)


def read(full: Ring, cursor: int, max_bytes: int) -> tuple[bytes, int]:
    frames = full.frames(cursor, max_bytes)
    return b"".join(each.data for each in frames), cursor + len(frames)


def frame(version: int, size: int = 10) -> RingFrame:
    return RingFrame(f"{version:>{size}}".encode(), at(version), float(version))


def ring(*versions: int, frames: int = 100, bytes: int = 10_000) -> Ring:
    made = Ring(at(versions[0] - 1), max_frames=frames, max_bytes=bytes)
    for version in versions:
        made.append(frame(version))
    return made


def test_a_cursor_is_found_by_position_and_reads_the_rest() -> None:
    full = ring(1, 2, 3)
    cursor = full.find(at(1))
    assert cursor is not None
    data, after = read(full, cursor, 1_000)
    assert data.split() == [b"2", b"3"]
    assert after == full.next
    assert read(full, after, 1_000) == (b"", after)


def test_a_slice_is_bounded_and_has_one_frame_at_least() -> None:
    full = ring(1, 2, 3)
    data, cursor = read(full, 0, 15)
    assert (data.split(), cursor) == ([b"1"], 1)
    assert read(full, 1, 1)[1] == 2


def test_positions_outside_are_not_found() -> None:
    full = ring(5, 6, 7, frames=2)
    assert full.start == at(5)
    assert full.find(at(4)) is None
    assert full.find(at(5)) is not None
    assert full.find(at(7)) == full.next
    assert full.find(at(8)) is None


def test_a_position_inside_of_a_commit_is_found() -> None:
    full = ring(1)
    full.append(RingFrame(b"a", Position("t", 1, 1), 0))
    full.append(RingFrame(b"b", at(2), 0))
    cursor = full.find(Position("t", 1, 1))
    assert cursor is not None
    assert read(full, cursor, 100)[0] == b"b"


def test_a_cursor_that_fell_off_is_known() -> None:
    full = ring(1, 2, frames=2)
    cursor = full.find(at(1))
    assert cursor is not None
    full.append(frame(3))
    assert cursor == full.first
    full.append(frame(4))
    assert cursor < full.first


def test_the_newest_frame_is_kept_whatever_its_size() -> None:
    full = ring(1, bytes=20)
    full.append(frame(2, 100))
    assert (full.first, full.next, full.bytes) == (1, 2, 100)


def test_filling_up_backwards_takes_what_there_is_room_for() -> None:
    full = ring(5, 6, frames=4)
    assert full.prepend(at(1), [frame(2), frame(3)]) == 0, "there is a gap"
    assert full.prepend(at(1), [frame(2), frame(3), frame(4)]) == 2
    assert full.start == at(2)
    cursor = full.find(at(2))
    assert cursor is not None
    assert read(full, cursor, 1_000)[0].split() == [b"3", b"4", b"5", b"6"]
    assert full.find(at(6)) == full.next == 2, "cursors of others still hold"


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 10), st.integers(1, 200))
def test_the_bound_holds_and_bytes_are_counted(sizes: list[int], frames: int, bytes: int) -> None:
    made = Ring(at(0), max_frames=frames, max_bytes=bytes)
    for version, size in enumerate(sizes, 1):
        made.append(RingFrame(b"x" * size, at(version), 0))
        data, cursor = read(made, made.first, 10**9)
        assert len(data) == made.bytes
        assert cursor == made.next == version
        assert made.next - made.first <= frames
        assert made.bytes <= bytes or made.next - made.first == 1


class Broken(Socket):
    """A link that fails."""

    def pump(self) -> None:
        raise OSError("no such socket")


class Counting(Socket):
    """A link that counts how often it was woken."""

    woken = 0

    def pump(self) -> None:
        self.woken += 1


def test_a_link_that_fails_is_closed_and_the_others_are_served() -> None:
    broken, sound = Broken(), Counting()
    deliver([Outgoing((Subscriber(broken, CODEC), Subscriber(sound, CODEC)), wake=True)])
    assert (broken.closed, sound.closed, sound.woken) == (RequestError.FAILED, 0, 1)
