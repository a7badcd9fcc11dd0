"""The index of seen events."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lakehouse.bronze.seen import SeenIndex

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


events = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2), st.integers(0, 4)), max_size=60)


@settings(deadline=None, max_examples=50)
@given(events, st.data())
def test_the_first_copy_in_bronze_counts_however_often_and_late_it_is_asked(
    found: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    batches = bronze(found)
    wanted = expected(batches)
    with tempfile.TemporaryDirectory() as folder:
        index = SeenIndex(Path(folder) / "seen")
        for number, batch in enumerate(batches):
            # Rows of a batch come in any order; a batch is judged once or repeatedly, before or after a restart.
            order = data.draw(st.permutations(range(len(batch))))
            for _ in range(data.draw(st.integers(1, 3))):
                if data.draw(st.booleans()):
                    index.close()
                    index = SeenIndex(Path(folder) / "seen")
                verdict = index.judge(table([batch[i] for i in order]), str(number))
                assert verdict.first.tolist() == [wanted[number][i] for i in order]
                assert verdict.duplicates == len(batch) - sum(wanted[number])
                assert index.position() == str(number)
            assert len(index) == len({row[0] for b in batches[: number + 1] for row in b})
        for number, batch in enumerate(batches):  # all over again
            assert index.judge(table(batch), str(number)).first.tolist() == wanted[number]
        index.close()
        # Lost and filled again in one go.
        rebuilt = SeenIndex(Path(folder) / "again")
        verdict = rebuilt.judge(table([row for batch in batches for row in batch]), "all")
        assert verdict.first.tolist() == [first for batch in wanted for first in batch]
        rebuilt.close()


def test_a_new_index(tmp_path: Path) -> None:
    index = SeenIndex(tmp_path / "a" / "b")
    assert (index.position(), len(index)) == ("", 0)
    assert index.judge(SCHEMA.empty_table(), "p").duplicates == 0
    assert (index.position(), len(index)) == ("p", 0)
    index.close()


def test_the_same_offset_of_another_topic_is_another_row(tmp_path: Path) -> None:
    index = SeenIndex(tmp_path)
    rows = table([(1, 0, 0, 5)])
    other = rows.set_column(1, "topic", pa.array(["u"]))
    verdict = index.judge(pa.concat_tables([rows, other]), "p")
    assert verdict.duplicates == 1
    assert index.judge(rows, "p").first.tolist() + index.judge(other, "p").first.tolist() == verdict.first.tolist()
    index.close()


def crash_batches() -> list[list[Row]]:
    """400 batches of 50 events, many of them seen before."""
    made = np.random.default_rng(5)
    found = [(int(made.integers(0, 8_000)), int(made.integers(0, 2)), number // 50) for number in range(20_000)]
    return bronze(found)


SCRIPT = """
import sys
from pathlib import Path
from lakehouse.bronze.seen import SeenIndex
from tests.lakehouse.bronze.test_seen import crash_batches, table
index = SeenIndex(Path(sys.argv[1]))
for number, batch in enumerate(crash_batches()):
    rows = table(batch)
    print(number, flush=True)
    index.judge(rows, str(number))
sys.stdin.read()
"""


def test_killed_at_any_moment_it_judges_the_same(tmp_path: Path) -> None:
    batches = crash_batches()
    whole = SeenIndex(tmp_path / "whole")
    wanted: list[npt.NDArray[np.bool_]] = [whole.judge(table(b), str(n)).first for n, b in enumerate(batches)]
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
        index = SeenIndex(folder)
        position = int(index.position())
        assert begun[-1] - 1 <= position <= begun[-1]
        assert len(index) == len({row[0] for b in batches[: max(position, _furthest(index, batches)) + 1] for row in b})
        for number in range(min(position + 2, len(batches))):  # what was in hand is judged again
            assert (index.judge(table(batches[number]), str(number)).first == wanted[number]).all()
        index.close()


def _furthest(index: SeenIndex, batches: list[list[Row]]) -> int:
    """The last batch that the index ever got: an earlier run may have come further than this one."""
    total, seen = len(index), set[int]()
    for number, batch in enumerate(batches):
        seen |= {row[0] for row in batch}
        if len(seen) == total:
            return number
    return len(batches)
