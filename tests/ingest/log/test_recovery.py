"""The failed store keeps each refused event once, and survives an interrupted write."""

from __future__ import annotations

import os
from pathlib import Path

from ingest.log.recovery import Corrupt, FailedStore
from ingest.log.segments import event_head
from tests.ingest.conftest import envelope


def body(number: int) -> bytes:
    payload = f'{{"id":{number}}}'.encode()
    return event_head(0, None, envelope(number, payload), b"key") + payload


def test_events_come_back_with_their_reason(tmp_path: Path) -> None:
    store = FailedStore(tmp_path, "n1")
    assert (list(store), len(store), store.bytes) == ([], 0, 0)
    store.add(5, "rsvps", "too\nlarge", body(5))
    store.add(6, "rsvps", "also", body(6))
    store.add(5, "rsvps", "again", body(5))
    store.add_corrupt(Corrupt("1.seg", 77, b"\0rubbish"))
    again = FailedStore(tmp_path, "n1")
    assert len(again) == 3
    assert again.bytes == store.bytes == (tmp_path / "failed").stat().st_size
    first, second, raw = again
    assert (first.seq, first.reason, first.data) == (5, "too\nlarge", b'{"id":5}')
    assert first.event is not None
    assert first.event.envelope == envelope(5, b'{"id":5}')
    assert first.event.key == b"key"
    assert second.seq == 6
    assert (raw.reason, raw.event, raw.data) == (
        "1.seg: 8 bytes at 77 are corrupt: no event is missing",
        None,
        b"\0rubbish",
    )


def test_a_torn_write_is_cut_off(tmp_path: Path) -> None:
    store = FailedStore(tmp_path, "n1")
    store.add(1, "rsvps", "a", body(1))
    whole = store.bytes
    store.add(2, "rsvps", "b", body(2))
    os.truncate(tmp_path / "failed", store.bytes - 3)
    again = FailedStore(tmp_path, "n1")
    assert again.bytes == whole
    again.add(2, "rsvps", "b", body(2))
    assert [item.seq for item in again] == [1, 2]
