"""The worker's writes: what is removed, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ingest.log.records import SEGMENT_MAGIC
from ingest.log.segments import LogSegment, SegmentPart, SegmentWriter, segment_path


def part(folder: Path, number: int, offset: int = 0) -> SegmentPart:
    segment = LogSegment(number, segment_path(folder, number))
    return SegmentPart(segment, offset, [SEGMENT_MAGIC, b"x" * 100])


def names(folder: Path) -> list[str]:
    return sorted(path.stem.lstrip("0") for path in folder.glob("*.seg"))


def test_the_last_segment_stays_until_its_successor_is_on_the_disk(tmp_path: Path) -> None:
    writer, one, two = SegmentWriter(tmp_path), part(tmp_path, 1), part(tmp_path, 2)
    writer.write([one], [one.segment])
    assert names(tmp_path) == ["1"], "the state is nowhere else"
    writer.write([], [])
    assert names(tmp_path) == ["1"]
    writer.write([two], [])
    assert names(tmp_path) == ["2"]
    writer.close()


def test_a_write_that_is_repeated_keeps_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has become free meanwhile is brought by the repetition, though its successor is not in that write."""
    writer, one, two, three = SegmentWriter(tmp_path), *(part(tmp_path, number) for number in (1, 2, 3))
    writer.write([one], [])
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError("the disk refuses")))
    with pytest.raises(OSError, match="refuses"):
        writer.write([two], [one.segment])
    assert names(tmp_path) == ["1", "2"]
    monkeypatch.setattr(os, "fdatasync", sync)
    writer.write([two], [one.segment, two.segment])
    assert names(tmp_path) == ["2"]
    writer.write([three], [])
    assert names(tmp_path) == ["3"]
    writer.close()
