"""The index of seen events."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.bronze.seen import HorizonIndex, RunIndex, seen_index
from lakehouse.contract.pipeline.source import Source
from tests.crash_points import SEEN_CRASH_POINTS

ROOT = Path(__file__).parents[3]
SCHEMA = pa.schema(
    [
        ("dedupe_key", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("bronze_at", pa.timestamp("us", "UTC")),
    ]
)
Row = tuple[int, int, int, int]  # event, partition, offset, bronze_at


def table(rows: list[Row]) -> pa.Table:
    made = [
        {
            "dedupe_key": hashlib.blake2b(str(event).encode(), digest_size=16).digest(),
            "topic": "t",
            "partition": partition,
            "offset": offset,
            "bronze_at": bronze_at,
        }
        for event, partition, offset, bronze_at in rows
    ]
    return pa.Table.from_pylist(made, schema=SCHEMA)


def bronze(found: list[tuple[int, int, int]]) -> list[list[Row]]:
    """Bronze commits: each takes the next offsets of its partitions, so coordinates are unique."""
    batches: dict[int, list[Row]] = {}
    offsets: dict[int, int] = {}
    for event, partition, commit in sorted(found, key=lambda row: row[2]):
        offset = offsets[partition] = offsets.get(partition, -1) + 1
        batches.setdefault(commit, []).append((event, partition, offset, 1_000 + commit))
    return list(batches.values())


def expected(batches: list[list[Row]]) -> list[list[bool]]:
    """A row counts if no row before it in bronze's order has its event."""
    order = sorted((row[3], row[1], row[2], row[0]) for batch in batches for row in batch)
    first: dict[int, tuple[int, int, int]] = {}
    for bronze_at, partition, offset, event in order:
        first.setdefault(event, (bronze_at, partition, offset))
    return [[first[event] == (at, partition, offset) for event, partition, offset, at in b] for b in batches]


def copies(counts: npt.NDArray[np.bool_]) -> int:
    return int((~counts).sum())


events = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 4)), max_size=60)


@settings(deadline=None, max_examples=50)
@given(events, st.data())
def test_the_first_copy_in_bronze_counts_however_often_and_late_it_is_asked(
    found: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    batches = bronze(found)
    wanted = expected(batches)
    spill = data.draw(st.sampled_from([1, 4, 1_000]))
    with tempfile.TemporaryDirectory() as folder:
        index = RunIndex(Path(folder) / "seen", spill)
        for number, batch in enumerate(batches):
            # Rows of a batch come in any order; a batch is judged once or repeatedly, before or after a restart.
            order = data.draw(st.permutations(range(len(batch))))
            for _ in range(data.draw(st.integers(1, 3))):
                if data.draw(st.booleans()):
                    index.close()
                    index = RunIndex(Path(folder) / "seen", spill)
                counts = index.judge(table([batch[i] for i in order]), str(number))
                assert counts.tolist() == [wanted[number][i] for i in order]
                assert index.position() == str(number)
            assert len(index) == len({row[0] for b in batches[: number + 1] for row in b})
        for number, batch in enumerate(batches):  # all over again
            assert index.judge(table(batch), str(number)).tolist() == wanted[number]
        index.close()
        # Lost and filled again in one go.
        rebuilt = RunIndex(Path(folder) / "again")
        counts = rebuilt.judge(table([row for batch in batches for row in batch]), "all")
        assert counts.tolist() == [first for batch in wanted for first in batch]
        rebuilt.close()


def test_a_new_index(tmp_path: Path) -> None:
    index = RunIndex(tmp_path / "a" / "b")
    assert (index.position(), len(index)) == ("", 0)
    assert copies(index.judge(SCHEMA.empty_table(), "p")) == 0
    assert (index.position(), len(index)) == ("p", 0)
    index.close()


def test_the_same_offset_of_another_topic_is_another_row(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    rows = table([(1, 0, 0, 5)])
    other = rows.set_column(1, "topic", pa.array(["u"]))
    counts = index.judge(pa.concat_tables([rows, other]), "p")
    assert copies(counts) == 1
    assert index.judge(rows, "p").tolist() + index.judge(other, "p").tolist() == counts.tolist()
    index.close()


def some(numbers: range) -> pa.Table:
    return table([(n, 0, n, 1_000 + n) for n in numbers])


def settled(index: RunIndex) -> None:
    if index._merger is not None:
        index._merger.join()


def test_runs_of_one_size_become_one_and_nothing_is_left_over(tmp_path: Path) -> None:
    index = RunIndex(tmp_path, 10)
    for n in range(64):
        assert copies(index.judge(some(range(10 * n, 10 * n + 10)), str(n))) == 0
        settled(index)
    assert [len(run) for run in index._runs] == [640]
    assert sorted(p.name.split("-")[0] for p in tmp_path.iterdir()) == ["index.json", "journal", "run"]
    assert copies(index.judge(some(range(640)), "again")) == 0
    assert copies(index.judge(table([(n, 1, n, 9_999) for n in range(640)]), "copies")) == 640
    index.close()
    again = RunIndex(tmp_path, 10)
    assert (len(again), again.position()) == (640, "copies")
    again.close()


def test_keys_that_are_alike_in_their_first_half_are_told_apart(tmp_path: Path) -> None:
    def alike(numbers: range, partition: int) -> pa.Table:
        keys = pa.array([b"12345678" + n.to_bytes(8, "big") for n in numbers], pa.binary())
        rows = table([(n, partition, n, 1_000 + partition) for n in numbers])
        return rows.set_column(0, "dedupe_key", keys)

    index = RunIndex(tmp_path, 50)
    assert copies(index.judge(alike(range(0, 100, 2), 0), "a")) == 0
    assert index.judge(alike(range(100), 1), "b").tolist() == [False, True] * 50
    assert len(index) == 100
    index.close()


def test_a_torn_end_of_the_journal_is_cut_off(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    for n in range(3):
        index.judge(some(range(10 * n, 10 * n + 10)), str(n))
    index.close()
    [journal] = tmp_path.glob("journal-*")
    whole = journal.read_bytes()
    for data in (whole[:-1], whole[:-300], whole[:-400] + bytes(400)):
        journal.write_bytes(data)
        index = RunIndex(tmp_path)
        assert (index.position(), len(index)) == ("1", 20)
        assert copies(index.judge(some(range(20, 30)), "2")) == 0
        index.close()
        index = RunIndex(tmp_path)
        assert (index.position(), len(index)) == ("2", 30)
        index.close()


def test_a_damaged_index_says_that_it_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(folder: Path) -> Path:
        index = RunIndex(folder, 10)
        for n in range(3):
            index.judge(some(range(10 * n, 10 * n + 10)), str(n))
        settled(index)
        index.close()
        return folder

    for number, hurt in enumerate(("run", "gone", "index")):
        folder = made(tmp_path / hurt)
        [first, *_] = sorted(folder.glob("run-*"))
        if hurt == "run":
            first.write_bytes(first.read_bytes()[:-8])
        elif hurt == "gone":
            first.unlink()
        else:
            (folder / "index.json").write_text("{", encoding="utf-8")
        index = RunIndex(folder)
        assert (index.position(), len(index)) == ("", 0)
        assert caplog.text.count("made anew from bronze") == number + 1
        assert copies(index.judge(some(range(30)), "all")) == 0
        index.close()


def test_a_full_disk_leaves_the_index_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = RunIndex(tmp_path, 25)
    index.judge(some(range(10)), "a")
    whole = os.pwrite

    def half(handle: int, data: memoryview, at: int) -> int:
        if at > 700:
            raise OSError(errno.ENOSPC, "no space left")
        return whole(handle, data[:100], at)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="no space"):
            index.judge(some(range(10, 20)), "b")
    assert (index.position(), len(index)) == ("a", 10)
    assert copies(index.judge(some(range(10, 20)), "b")) == 0

    def no_run(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_run)
        with pytest.raises(OSError, match="no space"):
            index.judge(some(range(20, 30)), "c")
    assert copies(index.judge(some(range(20, 30)), "c")) == 0, "it was entered; now it is a run"
    assert [len(run) for run in index._runs] == [30]
    index.close()
    again = RunIndex(tmp_path)
    assert (again.position(), len(again)) == ("c", 30)
    again.close()


def test_a_copy_is_an_index_of_its_own(tmp_path: Path) -> None:
    index = RunIndex(tmp_path / "index", 10)
    for n in range(5):
        index.judge(some(range(7 * n, 7 * n + 7)), str(n))
    assert index.copy(tmp_path / "copy") == "4"
    index.judge(some(range(35, 80)), "5")
    copy = RunIndex(tmp_path / "copy", 10)
    assert (copy.position(), len(copy)) == ("4", 35)
    copy.judge(some(range(35, 50)), "other")
    settled(copy)
    assert copies(index.judge(some(range(80)), "6")) == 0
    copy.close()
    index.close()


def test_copies_in_two_files_of_one_commit_are_ordered_by_the_files_names(tmp_path: Path) -> None:
    files = [f"file:{hashlib.blake2b(str(n).encode(), digest_size=16).hexdigest()}" for n in range(40)]
    rows = table([(1, 0, 0, 5)] * len(files)).set_column(1, "topic", pa.array(files))
    index = RunIndex(tmp_path)
    counts = index.judge(rows, "p")
    assert [name for name, first in zip(files, counts, strict=True) if first] == [min(files)]
    index.close()


def crash_batches() -> list[list[Row]]:
    """400 batches of 50 events, many of them seen before."""
    made = np.random.default_rng(5)
    found = [(int(made.integers(0, 8_000)), int(made.integers(0, 2)), number // 50) for number in range(20_000)]
    return bronze(found)


SCRIPT = """
import sys
from pathlib import Path
from lakehouse.bronze.seen import RunIndex
from tests.lakehouse.bronze.test_seen import crash_batches, table
index = RunIndex(Path(sys.argv[1]), 200)
for number, batch in enumerate(crash_batches()):
    rows = table(batch)
    print(number, flush=True)
    index.judge(rows, str(number))
sys.stdin.read()
"""


def test_killed_at_any_moment_it_judges_the_same(tmp_path: Path) -> None:
    batches = crash_batches()
    whole = RunIndex(tmp_path / "whole")
    wanted: list[npt.NDArray[np.bool_]] = [whole.judge(table(b), str(n)) for n, b in enumerate(batches)]
    whole.close()
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    for lines in (5, 60, 200):
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdin is not None
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        begun = [lines - 1, *map(int, process.stdout.read().split())]
        process.stdout.close()
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL
        index = RunIndex(folder, 200)
        position = int(index.position())
        assert begun[-1] - 1 <= position <= begun[-1]
        assert len(index) == len({row[0] for b in batches[: max(position, _furthest(index, batches)) + 1] for row in b})
        for number in range(min(position + 2, len(batches))):  # what was in hand is judged again
            assert (index.judge(table(batches[number]), str(number)) == wanted[number]).all()
        index.close()


@pytest.mark.parametrize("point", SEEN_CRASH_POINTS)
def test_killed_between_two_steps_of_a_run_it_judges_the_same(point: str, tmp_path: Path) -> None:
    batches = crash_batches()
    whole = RunIndex(tmp_path / "whole")
    wanted = [whole.judge(table(b), str(n)) for n, b in enumerate(batches)]
    whole.close()
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    environment = {**os.environ, "MILLRACE_CRASH_AT": f"{point}:3"}
    process = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment)
    assert process.returncode == -signal.SIGKILL
    begun = int(process.stdout.split()[-1])
    index = RunIndex(folder, 200)
    assert int(index.position()) == begun, "it was durable before it became a run"
    assert len(index) == len({row[0] for b in batches[: begun + 1] for row in b})
    named = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    there = {path.name for path in folder.iterdir()}
    assert there == {"index.json", named["journal"], *named["runs"]}, "nothing is left over"
    for number in range(len(batches)):
        assert (index.judge(table(batches[number]), str(number)) == wanted[number]).all()
    index.close()


def _furthest(index: RunIndex, batches: list[list[Row]]) -> int:
    """The last batch that the index ever got: an earlier run may have come further than this one."""
    total, seen = len(index), set[int]()
    for number, batch in enumerate(batches):
        seen |= {row[0] for row in batch}
        if len(seen) == total:
            return number
    return len(batches)


HORIZON = 10  # seconds


def counting(rows: list[tuple[int, int]]) -> list[bool]:
    """Which rows, by event and second of bronze_at, have no copy in the horizon before them."""
    last: dict[int, int] = {}
    found = []
    for key, at in rows:
        found.append(key not in last or at - last[key] > HORIZON)
        last[key] = at
    return found


steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=40)


@settings(max_examples=30)
@given(steps, st.lists(st.integers(0, 40), max_size=6), st.data())
def test_batches_judge_as_bronze_does_with_a_horizon(
    found: list[tuple[int, int]], cuts: list[int], data: st.DataObject
) -> None:
    at, rows = 0, []
    for key, step in found:
        at += step
        rows.append((key, at))
    wanted = counting(rows)
    numbered: list[Row] = [(key, 0, offset, at * 1_000_000) for offset, (key, at) in enumerate(rows)]
    places = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    with tempfile.TemporaryDirectory() as folder:
        index = HorizonIndex(Path(folder), HORIZON * 1_000_000)
        for a, b in zip(places, [*places[1:], len(rows)], strict=True):
            for _ in range(data.draw(st.integers(1, 3))):
                batch = data.draw(st.permutations(numbered[a:b]))
                counts = index.judge(table(batch), f"p{b}/{a}")
                assert list(counts) == [wanted[offset] for _, _, offset, _ in batch]
        recent = {key for key, seen in rows if at - seen <= HORIZON}
        assert len(index) == len(recent)
        index.close()
        again = HorizonIndex(Path(folder) / "again", HORIZON * 1_000_000)
        assert list(again.judge(table(numbered), "all")) == wanted
        again.close()


def test_a_source_asks_for_its_index(tmp_path: Path) -> None:
    source = Source("t", "id BIGINT", "now()")
    plain, bounded = (
        seen_index(tmp_path / "a", source),
        seen_index(tmp_path / "b", Source("t", "id BIGINT", "now()", dedupe_horizon="1 day")),
    )
    assert type(plain) is RunIndex
    assert isinstance(bounded, HorizonIndex)
    plain.close()
    bounded.close()
