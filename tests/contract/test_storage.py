"""One suite for the places of a lake: a folder of this machine, a prefix on an S3-compatible server, and Azurite."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.fs
import pytest
from deltalake import DeltaTable, write_deltalake

from lakehouse import lock
from lakehouse.contract.deltalog import AddedFile, DeltaLog, LogFollower, TableGone
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.lake import Lake, TableRef
from lakehouse.contract.storage import (
    LakePath,
    create_whole,
    file_rows,
    file_sizes,
    files_in,
    lake_path,
    parquet_file,
    remove_tree,
    shared_secret,
    stamp_of,
    table_rows,
    write_parquet,
    write_whole,
)
from lakehouse.errors import TableBusy
from lakehouse.lock import WriterLocks, lock_at

pytestmark = pytest.mark.s3
ROWS = pa.table({"x": [1, 2]})


@pytest.fixture(params=["folder", "s3", pytest.param("azure", marks=pytest.mark.soak)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> LakePath:
    """An empty place, once of each kind."""
    if request.param == "folder":
        return tmp_path / "lake"
    return lake_path(f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}")


def test_small_files(place: LakePath) -> None:
    file = place / "queries" / "a.toml"
    assert (stamp_of(file), file.exists(), files_in(place / "queries", "*.toml")) == (None, False, [])
    with pytest.raises(FileNotFoundError):
        file.read_bytes()
    write_whole(file, b"1")
    first = stamp_of(file)
    write_whole(file, b"22")
    assert (file.read_bytes(), file.read_text()) == (b"22", "22")
    assert first is not None and stamp_of(file) not in (first, None)
    write_whole(place / "queries" / "b.json", b"")
    assert files_in(place / "queries", "*.toml") == [file]
    write_whole(place / "queries" / "deeper" / "c.toml", b"3")
    assert file_sizes(place / "queries", "*.toml") == {"a.toml": 2}
    assert [found.name for found in place.iterdir()] == ["queries"] and (place / "queries").is_dir()
    file.unlink()
    file.unlink(missing_ok=True)
    assert not file.exists()
    remove_tree(place)
    assert not place.exists()
    remove_tree(place)


def test_of_many_that_create_a_file_one_succeeds(place: LakePath) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        if create_whole(place / "name", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and (place / "name").read_text() == str(won[0])


def test_of_many_that_create_a_table_one_succeeds(place: LakePath) -> None:
    """A second one would give it another id, and what follows the table would begin anew."""
    for number in range(10):
        table = TableRef("silver", f"t{number}", place / f"t{number}")
        start = threading.Barrier(4)

        def created(_: int, table: TableRef = table, start: threading.Barrier = start) -> str:
            start.wait()
            table.create(ROWS.schema, {})
            return str(DeltaTable(str(table.path)).metadata().id)

        with ThreadPoolExecutor(4) as threads:
            ids = set(threads.map(created, range(4)))
        assert len(ids) == 1 and DeltaTable(str(table.path)).version() == 0
        assert [path.name for path in table.path.iterdir()] == ["_delta_log"]


def test_a_secret_is_made_once(place: LakePath) -> None:
    key = shared_secret(place / "key", 32)
    assert len(key) == 32 and shared_secret(place / "key", 32) == key
    with pytest.raises(EnvironmentProblem, match="holds 32 bytes, not 16"):
        shared_secret(place / "key", 16)


def test_parquet(place: LakePath) -> None:
    place.mkdir(exist_ok=True)
    assert write_parquet(place / "a.parquet", ROWS) == file_sizes(place, "*")["a.parquet"]
    assert parquet_file(place / "a.parquet").read() == ROWS
    wider = pa.schema([("x", pa.int64()), ("y", pa.string())])
    assert file_rows([str(place / "a.parquet")], wider).to_table().to_pydict() == {"x": [1, 2], "y": [None, None]}
    assert file_rows([], wider).to_table().num_rows == 0
    with pytest.raises(FileNotFoundError):
        parquet_file(place / "absent.parquet")


def test_a_log(place: LakePath) -> None:
    table = place / "gold" / "t"
    log = DeltaLog(table)
    assert (log.exists(), log.newest(), log.versions(), log.has(0), log.stamp(0)) == (False, -1, [], False, None)
    for _ in range(3):
        write_deltalake(str(table), ROWS, mode="append")
    assert (log.exists(), log.newest(), log.newest(known=1), log.newest(known=2)) == (True, 2, 2, 2)
    assert (log.versions(), log.oldest(), log.has(2), log.has(3)) == ([0, 1, 2], 0, True, False)
    (added,) = log.read(1).added
    assert parquet_file(added.located(table)).read() == ROWS
    assert log.properties() == dict(DeltaTable(str(table)).metadata().configuration)
    with pytest.raises(TableGone):
        log.read(3)
    write_deltalake(str(place / "gold" / "s"), ROWS)
    assert [found.name for found in Lake(place, work=Path("/nowhere")).tables()] == ["s", "t"]


def test_commits_that_are_appended(place: LakePath) -> None:
    table = TableRef("gold", "t", place / "t")
    table.create(ROWS.schema, {})
    log = DeltaLog(table.path)

    def added(name: str, rows: pa.Table) -> AddedFile:
        return AddedFile(name, {}, True, write_parquet(table.path / name, rows), f'{{"numRecords":{rows.num_rows}}}')

    first, second = added("a.parquet", ROWS), added("b.parquet", pa.table({"x": [3]}))
    assert log.append(1, added=[first], info={"a": "1"}, transaction=("app", 7))
    assert not log.append(1, added=[second], info={})  # another writer was quicker
    assert not log.append(3, added=[second], info={})
    assert log.append(2, added=[second], removed=[first], info={}, transaction=("app", 8))
    DeltaTable(str(table.path)).create_checkpoint()
    found = DeltaTable(str(table.path))
    assert found.to_pyarrow_table() == pa.table({"x": [3]})
    assert (found.version(), found.transaction_version("app")) == (2, 8)
    assert DeltaTable(str(table.path), version=1).to_pyarrow_table() == ROWS
    assert (log.info(1)["a"], log.read(2).removed[0].path, log.read(2).added[0].size) == ("1", "a.parquet", second.size)
    assert found.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False) == ["a.parquet"]
    newest = found.version()
    for version in range(newest):
        log.commit_file(version).unlink()
    assert not log.append(1, added=[second], info={})  # free, although there are later ones


def test_a_follower_notices_a_table_that_was_replaced(place: LakePath) -> None:
    table = place / "gold" / "t"
    follower = LogFollower(table)
    assert not follower.open()
    for _ in range(2):
        write_deltalake(str(table), ROWS, mode="append")
    assert follower.open()
    assert follower.read(1).version == 1
    follower.check_gap(2)
    remove_tree(table)
    with pytest.raises(TableGone):
        follower.check()
        follower.check_gap(2)
    for _ in range(3):
        write_deltalake(str(table), ROWS, mode="append")
    with pytest.raises(TableGone, match="replaced"):
        follower.read(2)
    assert follower.open()  # and of the new one it reads nothing before that is replaced in turn
    remove_tree(table)
    for _ in range(4):
        write_deltalake(str(table), ROWS, mode="append")
    with pytest.raises(TableGone, match="replaced"):
        follower.read(3)
    follower.close()


def test_a_lock_has_one_holder_and_keeps_its_value(place: LakePath) -> None:
    lake = Lake(place, work=Path("/nowhere"))
    with WriterLocks(lake, ["a", "b"]), WriterLocks(lake, ["c"]):
        with pytest.raises(TableBusy, match="another process writes b"), WriterLocks(lake, ["b", "d"]):
            pytest.fail("it was taken")
        with WriterLocks(lake, ["d"]):
            pass
    with WriterLocks(lake, ["b"]):
        pass
    first, second = (lock_at(lake.shared / "clocks" / "t") for _ in range(2))
    with first.turn(lambda found: found + b"1") as value:
        assert value == b"1" and second.take() is None
    with second.turn(lambda found: found + b"2") as value:
        assert value == b"12"
    assert first.take() == b"12"
    first.release()


def test_a_lock_that_others_have_had_often_since_is_theirs(place: LakePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_KEPT", 2)
    monkeypatch.setattr(lock, "_STALE_S", 0.0)  # so often within any time
    mine, theirs = (lock_at(place / "_millrace" / "clocks" / "t") for _ in range(2))
    assert mine.take() is not None
    mine.release()
    for _ in range(6):  # what this process left is removed meanwhile
        assert theirs.take() is not None
        theirs.release()
    assert theirs.take() is not None
    assert mine.take() is None
    theirs.release()
    assert mine.take() is not None
    mine.release()


def test_turns_of_many_are_one_after_the_other(place: LakePath) -> None:
    inside: list[int] = []

    def take_turns() -> None:
        lock = lock_at(place / "_millrace" / "clocks" / "t")
        for _ in range(5):
            with lock.turn(lambda found: str(int(found or b"0") + 1).encode()):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = lock_at(place / "_millrace" / "clocks" / "t")
    assert last.take() == b"20"
    last.release()


@pytest.mark.parametrize("text", ["ftp://a/b", "s3:///b", "http://a/b"])
def test_other_urls_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a place for a lake"):
        lake_path(text)


def test_duckdb_reads_a_table_without_a_file_system_in_python(tmp_path: Path) -> None:
    """A scan that begins with the interpreter's lock held waits for reads that need this lock, and for ever."""
    path = tmp_path / "a b" / "table"
    write_deltalake(str(path), pa.table({"n": [1, 2], "city": ["São Paulo", "Ulm/Donau"]}), partition_by=["city"])
    rows = table_rows(DeltaTable(str(path)), path)
    assert not isinstance(rows.filesystem.base_fs, pyarrow.fs.PyFileSystem)
    found = duckdb.connect().register("rows", rows).sql("SELECT city, n FROM rows WHERE n > 0 ORDER BY n")
    assert found.fetchall() == [("São Paulo", 1), ("Ulm/Donau", 2)]
