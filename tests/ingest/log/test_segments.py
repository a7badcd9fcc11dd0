"""Frames survive any content, and damage costs only what it hits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingest.log.segments import (
    EVENT,
    SEGMENT_MAGIC,
    Damage,
    LogFrame,
    event_fields,
    event_head,
    frame_chunks,
    read_event,
    scan,
)
from lakehouse.contract.envelope import Envelope, fingerprint

bodies = st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=12)
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


def segment(parts: list[bytes]) -> bytes:
    return SEGMENT_MAGIC + b"".join(b"".join(frame_chunks(n, part)) for n, part in enumerate(parts, 1))


@given(bodies)
def test_frames_come_back(parts: list[bytes]) -> None:
    frames = list(scan(segment(parts)))
    assert all(isinstance(frame, LogFrame) for frame in frames)
    assert [(frame.seq, frame.body) for frame in frames if isinstance(frame, LogFrame)] == list(enumerate(parts, 1))


@given(bodies, st.data())
def test_a_torn_tail_costs_only_the_frame_it_cuts(parts: list[bytes], data: st.DataObject) -> None:
    whole = segment(parts)
    cut = data.draw(st.integers(len(SEGMENT_MAGIC), len(whole) - 1))
    items = list(scan(whole[:cut]))
    frames = [item for item in items if isinstance(item, LogFrame)]
    assert [frame.body for frame in frames] == parts[: len(frames)]
    end = frames[-1].end if frames else len(SEGMENT_MAGIC)
    if end < cut:
        assert items[-1] == Damage(end, cut, tail=True)
    else:
        assert items == frames
    assert all(cut < len(b"".join(frame_chunks(0, part))) + end for part in parts[len(frames) : len(frames) + 1])


@given(bodies, st.data())
def test_a_flipped_bit_costs_one_frame_and_is_named(parts: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(segment(parts))
    at = data.draw(st.integers(len(SEGMENT_MAGIC), len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    items = list(scan(bytes(whole)))
    frames = [item for item in items if isinstance(item, LogFrame)]
    damage = [item for item in items if isinstance(item, Damage)]
    assert len(frames) == len(parts) - 1
    assert len(damage) == 1
    assert damage[0].offset <= at < damage[0].end
    hit = next(n for n, part in enumerate(parts, 1) if n not in {frame.seq for frame in frames})
    assert [frame.body for frame in frames] == parts[: hit - 1] + parts[hit:]


@given(
    names,
    names,
    st.binary(max_size=60),
    st.binary(max_size=300),
    st.none() | st.integers(0, 2**62),
    st.none() | names.filter(bool),
    st.integers(0, 0xFFFF),
)
def test_events_come_back(
    event_id: str, tenant: str, key: bytes, payload: bytes, position: int | None, reject: str | None, lane: int
) -> None:
    envelope = Envelope(event_id, "rsvps", tenant, 1_700_000_000_000_000, "n1", fingerprint(payload), reject=reject)
    body = event_head(lane, position, envelope, key) + payload
    stored = read_event(body, source="rsvps", collector="n1")
    assert body[0] == EVENT
    assert (stored.lane, stored.position, stored.envelope) == (lane, position, envelope)
    assert (stored.key, stored.payload) == (key, payload)
    assert event_fields(body) == (lane, position, envelope.received_at, reject is not None)
