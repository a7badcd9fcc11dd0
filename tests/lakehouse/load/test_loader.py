"""A watched folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from lakehouse.contract.lake import Lake
from lakehouse.errors import CommitFailed
from lakehouse.load.commit import Ledger
from lakehouse.load.loader import Inbox, Load, LoaderMetrics, LoaderService
from lakehouse.load.worker import FileReport, LoadJob
from tests.lakehouse.load.offers import bronze, ids, job, offers, write_jsonl


def watch(made: LoadJob, inbox: Inbox, metrics: LoaderMetrics | None = None) -> Iterator[Load]:
    """Loads of the files that are there."""
    service = LoaderService(threading.Event(), once=True)
    service.metrics = metrics or service.metrics
    return service.watch(made, inbox)


def names(inbox: Inbox) -> list[str]:
    return [file.path.name for file in inbox.finished()]


def test_a_file_is_taken_when_it_is_still(tmp_path: Path) -> None:
    clock = [0.0]
    inbox = Inbox(tmp_path, 2.0, now=lambda: clock[0])
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.csv.part").write_text("x")
    (tmp_path / ".c.csv").write_text("x")
    assert names(inbox) == []
    clock[0] = 1.9
    assert names(inbox) == []
    (tmp_path / "a.csv").write_text("xx")
    clock[0] = 2.1
    assert names(inbox) == []  # it has been written to
    clock[0] = 4.2
    (tmp_path / "b.csv.part").rename(tmp_path / "b.csv")
    assert names(inbox) == ["a.csv"]
    clock[0] = 6.3
    assert sorted(names(inbox)) == ["a.csv", "b.csv"]


def test_what_arrives_is_loaded_and_put_away(tmp_path: Path, lake: Lake) -> None:
    folder = tmp_path / "in"
    write_jsonl(folder / "a.jsonl", offers(20, merchant=1))
    write_jsonl(folder / "deep/a.jsonl", offers(20, merchant=2))
    (folder / "bad.parquet").write_bytes(b"no")
    (folder / "more.jsonl.part").write_bytes(b"{")
    made = job(lake)
    (done,) = watch(made, Inbox(folder, 0.0))
    assert sorted(report.state for report in done.reports) == ["failed", "loaded", "loaded"]
    rows = [*offers(20, merchant=1), *offers(20, merchant=2)]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids(rows)
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["more.jsonl.part"]
    assert len(list((folder / "done").iterdir())) == 2
    reason = (folder / "failed" / "bad.parquet.reason.txt").read_text()
    assert reason.startswith("unreadable Parquet")
    # The same content again, under another name: found to be in, and put away.
    write_jsonl(folder / "again.jsonl", offers(20, merchant=1))
    (again,) = watch(made, Inbox(folder, 0.0))
    assert [report.state for report in again.reports] == ["already"]
    assert bronze(made).num_rows == 40


def test_it_ends_when_told(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(LoaderService(stop).watch(job(tmp_path), Inbox(tmp_path, 0.0))) == []


def full_at_first(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """The disk is full when the method is called first, and has room afterwards."""
    real = getattr(owner, method)

    def failing(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, method, real)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, method, failing)


def test_a_disk_that_stays_full_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_jsonl(tmp_path / "in/a.jsonl", offers(5))
    (tmp_path / "in/b.parquet").write_bytes(b"no")
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    monkeypatch.setattr("lakehouse.load.loader.write_deltalake", full)
    with pytest.raises(CommitFailed, match="table offers takes no rows"):
        list(watch(job(tmp_path), Inbox(tmp_path / "in", 0.0)))
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["a.jsonl", "b.parquet"]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(pq.ParquetWriter, "write_table"), (DeltaTable, "create_write_transaction"), (Ledger, "catch_up")],
)
def test_what_bronze_does_not_take_is_not_called_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    folder = tmp_path / "in"
    for merchant in range(3):
        write_jsonl(folder / f"{merchant}.jsonl", offers(5, merchant=merchant))
    write_jsonl(folder / "9.jsonl", offers(5, merchant=0))  # the same content as the first
    made = job(tmp_path, chunk_rows=1)
    full_at_first(monkeypatch, owner, method)
    with pytest.raises(CommitFailed, match=r"offers takes no rows: .*No space left"):
        list(watch(made, Inbox(folder, 0.0)))
    loads = made.lake.table("silver", "loads")
    assert not loads.exists() or not DeltaTable(str(loads.path)).to_pyarrow_table().num_rows
    assert bronze(made).num_rows == 0
    assert sorted(path.name for path in folder.iterdir()) == ["0.jsonl", "1.jsonl", "2.jsonl", "9.jsonl"]
    assert list((made.lake.state / "loads" / "offers" / "ready").iterdir()) == []

    (done,) = watch(made, Inbox(folder, 0.0))
    assert sorted(report.state for report in done.reports) == ["already", "loaded", "loaded", "loaded"]
    rows = [row for merchant in range(3) for row in offers(5, merchant=merchant)]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids(rows)


class Meanwhile(LoaderMetrics):
    """Does something as soon as the first file is reported, before it is put away."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._acts = [act]

    def file(self, source: str, report: FileReport) -> None:
        super().file(source, report)
        while self._acts:
            self._acts.pop()()


def test_a_file_that_replaces_one_being_loaded_is_loaded_too(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "a.jsonl"
    write_jsonl(folder / "a.jsonl", offers(5, version=1))
    write_jsonl(other, offers(5, version=2))
    made = job(tmp_path)
    meanwhile = Meanwhile(lambda: other.rename(folder / "a.jsonl"))
    loads = list(watch(made, Inbox(folder, 0.0), meanwhile))
    assert [[report.state for report in done.reports] for done in loads] == [["loaded"], ["loaded"]]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids([*offers(5, version=1), *offers(5, version=2)])
    (put_away,) = (folder / "done").iterdir()
    assert put_away.read_bytes().count(b'"version": 2') == 5


def test_a_third_file_of_the_name_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = tmp_path / "in", tmp_path / "in/a.jsonl"
    write_jsonl(path, offers(5, version=1))
    write_jsonl(tmp_path / "a.jsonl", offers(5, version=2))
    rename = Path.rename

    def third(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if self == path:
            monkeypatch.setattr(Path, "rename", rename)
            write_jsonl(path, offers(5, version=3))
        return moved

    def second() -> None:
        (tmp_path / "a.jsonl").replace(path)
        monkeypatch.setattr(Path, "rename", third)

    made = job(tmp_path)
    list(watch(made, Inbox(folder, 0.0), Meanwhile(second)))
    list(watch(made, Inbox(folder, 0.0)))
    rows = [row for version in (1, 2, 3) for row in offers(5, version=version)]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids(rows)


def test_once_means_the_files_that_were_there(tmp_path: Path) -> None:
    folder, looks = tmp_path / "in", [0]
    for name in ("first", "slow"):
        write_jsonl(folder / f"{name}.jsonl", offers(5, merchant=len(name)))

    def now() -> float:
        looks[0] += 1
        if looks[0] == 1:
            write_jsonl(folder / "late.jsonl", offers(5, merchant=9))  # ready at the second look, as the first one is
        elif looks[0] == 2:
            write_jsonl(folder / "slow.jsonl", offers(6, merchant=4))  # still being written
        return looks[0] * 10.0

    loads = list(watch(job(tmp_path), Inbox(folder, 2.0, now=now)))
    found = [sorted(Path(report.name).name for report in done.reports) for done in loads]
    assert found == [["first.jsonl", "late.jsonl"], ["slow.jsonl"]]


def test_once_does_not_wait_for_what_is_taken_away(tmp_path: Path) -> None:
    folder, looks = tmp_path / "in", [0]
    for name in ("first", "slow"):
        write_jsonl(folder / f"{name}.jsonl", offers(5, merchant=len(name)))

    def now() -> float:
        looks[0] += 1
        assert looks[0] < 20, "it waits for a file that is gone"
        if looks[0] == 2:
            (folder / "slow.jsonl").unlink()
        return looks[0] * 10.0

    (done,) = watch(job(tmp_path), Inbox(folder, 2.0, now=now))
    assert [Path(report.name).name for report in done.reports] == ["first.jsonl"]
