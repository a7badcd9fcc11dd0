"""Commits of files' rows: once each, in turn with the stream, and readable by everybody."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from lakehouse.bronze.table import COLUMNS, BronzeClock, Progress, create, newest_bronze_at, progress
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import remove_tree, write_whole
from lakehouse.errors import CommitFailed, FileTaken
from lakehouse.load.commit import Committer, Ledger, write_rows
from lakehouse.load.rows import FilePosition, SealedSegment, Sealer, Segment, short_digest, write_data_file
from tests.lakehouse.lakes import bronze_rows
from tests.lakehouse.load.offers import SOURCE

ONE, OTHER = "1" * 32, "2" * 32
FIRST = short_digest("m:0:1")


def sealer() -> Sealer:
    return Sealer(SOURCE, tenant="default", node="loader-1")


def part(before: FilePosition, count: int, *, ended: bool = False) -> SealedSegment:
    rows = [b'{"merchant":"m","offer":"%d","version":1}' % (before.rows + i) for i in range(count)]
    return sealer().seal("a.jsonl", before, Segment(rows, offset=before.offset + 10, ended=ended), 1_000_000)


def table_of(lake: Lake) -> pa.Table:
    return DeltaTable(str(lake.bronze("offers").path)).to_pyarrow_table()


def test_a_data_file_is_stamped_in_its_place(tmp_path: Path) -> None:
    made = sealer().rows([part(FilePosition(ONE), 1_000)])
    data = write_data_file(made, tmp_path / "x.parquet")
    before = (tmp_path / "x.parquet").read_bytes()
    data.stamp(1_790_000_000_000_123)
    after = (tmp_path / "x.parquet").read_bytes()
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert set(changed) <= set(range(data.stamp_at, data.stamp_at + 8))
    found = pq.read_table(tmp_path / "x.parquet")
    assert set(found["bronze_at"].cast(pa.int64()).to_pylist()) == {1_790_000_000_000_123}
    assert found.drop_columns("bronze_at").to_pylist() == made.to_pylist()


def test_rows_come_with_the_place_to_go_on_from(lake: Lake) -> None:
    committer = Committer(lake, "offers", sealer())
    first = part(FilePosition(ONE), 3)
    committer.commit([first, part(FilePosition(OTHER), 0, ended=True)])
    second, third = part(first.after, 2), part(FilePosition(ONE, 5, offset=20), 1, ended=True)
    version = committer.commit([second, third])
    assert committer.position(ONE) == FilePosition(ONE, 6, 0, 30, True)
    assert committer.position(OTHER) == FilePosition(OTHER, 0, 0, 10, True)
    found = table_of(lake)
    assert found.schema.names[: len(COLUMNS)] == COLUMNS.names
    assert sorted(found["offset"].to_pylist()) == [0, 1, 2, 3, 4, 5]
    assert len(set(found["bronze_at"].to_pylist())) == 2
    assert {row["bronze_at"].date() for row in found.to_pylist()} == set(found["date"].to_pylist())
    assert version == DeltaTable(str(lake.bronze("offers").path)).version() == 2
    committer.close()


LOADER = """
import sys
from pathlib import Path
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from tests.lakehouse.load.test_commit import ONE, Committer, FilePosition, part, sealer
lake = Lake(lake_path(sys.argv[1]), Path(sys.argv[2]))
Committer(lake, "offers", sealer()).commit([part(FilePosition(ONE), 3, ended=True)])
"""


def test_two_loaders_that_start_together_both_know_what_is_in(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is still looking at the empty table while the other commits a file: it must not set the ledger back."""
    filled = Ledger._filled

    def slowly(ledger: Ledger, delta: DeltaTable) -> list[FilePosition]:
        found = filled(ledger, delta)
        monkeypatch.setattr(Ledger, "_filled", filled)
        subprocess.run(
            [sys.executable, "-c", LOADER, str(lake.root), str(lake.state)], cwd=Path(__file__).parents[3], check=True
        )
        return found

    monkeypatch.setattr(Ledger, "_filled", slowly)
    committer = Committer(lake, "offers", sealer())
    assert committer.position(ONE) == FilePosition(ONE, 3, 0, 10, True, FIRST)
    with pytest.raises(FileTaken):
        committer.commit([part(FilePosition(ONE), 3)])
    assert table_of(lake).num_rows == 3
    committer.close()


def test_what_is_missing_from_the_ledger_is_not_passed_over_by_a_note(lake: Lake) -> None:
    committer = Committer(lake, "offers", sealer())
    committer.commit([part(FilePosition(OTHER), 2, ended=True)])
    stale = DeltaTable(str(lake.bronze("offers").path), version=0)
    with committer.ledger._env.begin(write=True) as txn:  # as if the ledger were behind by that commit
        txn.delete(OTHER.encode())
        txn.put(b"\x00position", f"{stale.metadata().id}/0".encode())
    now = DeltaTable(str(lake.bronze("offers").path))
    write_deltalake(str(lake.bronze("offers").path), table_of(lake).slice(0, 0), mode="append")
    now.update_incremental()
    committer.ledger.note([FilePosition(ONE, 1)], now)
    assert committer.position(OTHER) == FilePosition(OTHER, 2, 0, 10, True, FIRST)
    committer.close()


def test_a_row_is_not_committed_twice(lake: Lake) -> None:
    one, other = Committer(lake, "offers", sealer()), part(FilePosition(ONE), 3)
    one.commit([other])
    with pytest.raises(FileTaken) as caught:
        one.commit([part(FilePosition(OTHER), 2), part(FilePosition(ONE), 3)])
    assert caught.value.fingerprint == ONE
    assert table_of(lake).num_rows == 3
    one.close()


def test_the_ledger_is_what_bronze_says(lake: Lake) -> None:
    committer = Committer(lake, "offers", sealer())
    committer.commit([part(FilePosition(ONE), 4, ended=True)])
    committer.close()
    folder = lake.state / "loads" / "offers" / "ledger"
    kept = shutil.copytree(folder, folder.with_name("older"))
    committer = Committer(lake, "offers", sealer())
    second = part(FilePosition(OTHER), 2, ended=True)
    committer.commit([second])
    committer.close()

    shutil.rmtree(folder)
    shutil.copytree(kept, folder)  # as after a crash between the commit and the ledger
    committer = Committer(lake, "offers", sealer())
    assert committer.position(OTHER) == FilePosition(OTHER, 2, 0, 10, True, FIRST)
    committer.close()

    shutil.rmtree(folder)
    shutil.copytree(kept, folder)  # the same, and the log that named the files has been cleaned up since
    ledger = Ledger(lake, lake.bronze("offers"))
    newest = max(table_of(lake)["bronze_at"].cast(pa.int64()).to_pylist())
    ledger.intend([second.after, FilePosition("4" * 32, 9)], newest)
    ledger.close()
    DeltaTable(str(lake.bronze("offers").path)).create_checkpoint()
    for commit in (lake.bronze("offers").path / "_delta_log").glob("*.json"):
        commit.unlink()
    committer = Committer(lake, "offers", sealer())
    assert committer.position(ONE) == FilePosition(ONE, 4, 0, 10, True, FIRST)
    assert committer.position(OTHER) == second.after
    assert committer.position("4" * 32) == FilePosition("4" * 32)
    committer.close()

    shutil.rmtree(folder)  # lost: the rows say it
    committer = Committer(lake, "offers", sealer())
    assert committer.position(ONE) == FilePosition(ONE, 4, 0, -1, False, FIRST)
    assert committer.position(OTHER) == FilePosition(OTHER, 2, 0, -1, False, FIRST)
    committer.close()

    remove_tree(lake.bronze("offers").path)  # another table: nothing of the old one counts
    committer = Committer(lake, "offers", sealer())
    assert committer.position(ONE) == FilePosition(ONE)
    assert committer.position(OTHER) == FilePosition(OTHER)
    committer.close()


def test_a_load_does_not_hide_how_far_the_stream_is(lake: Lake) -> None:
    table = lake.bronze("offers")
    create(table)
    clock = BronzeClock(lake, table)
    with clock.turn() as at:
        reached = Progress({"offers/0": 3}, at)
        rows = bronze_rows([b"a", b"b", b"c"], bronze_at=[pa.scalar(at, pa.timestamp("us", "UTC")).as_py()] * 3)
        properties = CommitProperties(custom_metadata={"userMetadata": reached.to_metadata()})
        write_deltalake(str(table.path), rows, mode="append", commit_properties=properties)
    committer = Committer(lake, "offers", sealer())
    committer.commit([part(FilePosition(ONE), 2)])
    committer.close()
    assert progress(table) == reached
    newest = max(table_of(lake)["bronze_at"].cast(pa.int64()).to_pylist())
    assert newest > at
    assert newest_bronze_at(table) == newest


def test_time_never_goes_back_whoever_commits(lake: Lake) -> None:
    table = lake.bronze("offers")
    create(table)
    clocks = [BronzeClock(lake, table, now=lambda: 1_000.0), BronzeClock(lake, table, now=lambda: 900.0)]
    given: list[int] = []

    def work(clock: BronzeClock) -> None:
        for _ in range(50):
            with clock.turn() as at:
                given.append(at)

    threads = [threading.Thread(target=work, args=(clock,)) for clock in clocks for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert given == sorted(set(given))
    clock = lake.shared / "clocks" / "offers"
    clock.unlink() if clock.is_file() else remove_tree(clock)  # lost: the rows say how far it was
    last = given[-1]
    rows = bronze_rows([b"a"], bronze_at=[pa.scalar(last, pa.timestamp("us", "UTC")).as_py()])
    write_deltalake(str(table.path), rows, mode="append")
    with BronzeClock(lake, table, now=lambda: 1.0).turn() as at:
        assert at == last + 1


def test_a_turn_that_failed_frees_the_table(lake: Lake) -> None:
    clock = BronzeClock(lake, lake.bronze("offers"))
    with pytest.raises(RuntimeError), clock.turn():
        raise RuntimeError
    with clock.turn() as at:
        assert at > 0


def test_rows_written_directly_are_in_once(lake: Lake) -> None:
    rows = [b'{"merchant":"m","offer":"1","version":1}', b"{broken"]
    version = write_rows(lake, SOURCE, "job of today", rows, node="job-1")
    assert DeltaTable(str(lake.bronze("offers").path)).version() == version
    assert write_rows(lake, SOURCE, "job of today", rows) == -1
    shutil.rmtree(lake.state / "loads" / "offers" / "ledger")  # lost: the rows say it
    assert write_rows(lake, SOURCE, "job of today", rows) == -1
    found = table_of(lake).sort_by("offset").to_pylist()
    assert [row["payload"] for row in found] == rows
    assert found[0]["event_id"] == "m:1:1"
    assert (found[0]["origin"], found[0]["collector"]) == ("job of today", "job-1")
    assert found[1]["reject"].startswith("not JSON")
    write_whole(lake.bronze("offers").path / "_delta_log" / f"{version + 1:020d}.json", b"no commit")
    with pytest.raises(CommitFailed, match="offers takes no rows"):
        write_rows(lake, SOURCE, "another", rows)
