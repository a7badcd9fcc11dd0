"""What a checkpoint says. The query itself runs in test_stream.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lakehouse.checkpoint import Checkpoint, offset_of, version_of

OFFSET = '{"sourceVersion":1,"reservoirId":"x","reservoirVersion":%d,"index":%d,"isStartingVersion":false}'


def checkpoint(folder: Path, done: int, planned: int) -> None:
    """A folder as Spark leaves it: batches up to ``planned`` begun, up to ``done`` done."""
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": "q-1"}))
    for batch in range(planned + 1):
        (folder / "offsets" / str(batch)).write_text("v1\n{}\n" + OFFSET % (batch + 2, -1))
        (folder / "offsets" / f".{batch}.crc").write_bytes(b"x")
    for batch in range(done + 1):
        (folder / "commits" / str(batch)).write_text("v1\n{}")
        (folder / "commits" / f".{batch}.crc").write_bytes(b"x")


def test_no_checkpoint(tmp_path: Path) -> None:
    assert Checkpoint.read(tmp_path / "none") == Checkpoint("", -1, "")
    (tmp_path / "metadata").write_text("{")
    assert Checkpoint.read(tmp_path) == Checkpoint("", -1, "")


def test_a_checkpoint_that_never_finished_a_batch(tmp_path: Path) -> None:
    checkpoint(tmp_path, done=-1, planned=0)
    assert Checkpoint.read(tmp_path) == Checkpoint("q-1", -1, "")


def test_the_last_batch_that_is_done_counts(tmp_path: Path) -> None:
    checkpoint(tmp_path, done=10, planned=11)
    assert Checkpoint.read(tmp_path) == Checkpoint("q-1", 10, OFFSET % (12, -1))
    assert version_of(offset_of(tmp_path, 11)) == 12


@pytest.mark.parametrize(("version", "index", "expected"), [(5, -1, 4), (5, -100, 4), (5, 0, None), (5, 3, None)])
def test_an_offset_inside_a_version_is_no_version(version: int, index: int, expected: int | None) -> None:
    assert version_of(OFFSET % (version, index)) == expected


def test_a_position_may_be_a_version() -> None:
    assert version_of("17") == 17
