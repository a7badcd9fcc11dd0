"""A watched folder."""

from __future__ import annotations

import threading
from pathlib import Path

from lakehouse.feeds.inbox import Inbox
from lakehouse.feeds.serve import watch_inbox
from tests.lakehouse.feeds.feeds import bronze, ids, job, offers, write_jsonl


def names(inbox: Inbox) -> list[str]:
    return [file.path.name for file in inbox.look()]


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


def test_what_arrives_is_loaded_and_put_away(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_jsonl(folder / "a.jsonl", offers(20, merchant=1))
    write_jsonl(folder / "deep/a.jsonl", offers(20, merchant=2))
    (folder / "bad.parquet").write_bytes(b"no")
    (folder / "more.jsonl.part").write_bytes(b"{")
    made = job(tmp_path)
    (done,) = watch_inbox(made, Inbox(folder, 0.0), threading.Event(), once=True)
    assert sorted(report.state for report in done.reports) == ["failed", "loaded", "loaded"]
    rows = [*offers(20, merchant=1), *offers(20, merchant=2)]
    assert sorted(bronze(made)["event_id"].to_pylist()) == ids(rows)
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["more.jsonl.part"]
    assert len(list((folder / "done").iterdir())) == 2
    reason = (folder / "failed" / "bad.parquet.reason.txt").read_text()
    assert reason.startswith("unreadable Parquet")
    # The same content again, under another name: found to be in, and put away.
    write_jsonl(folder / "again.jsonl", offers(20, merchant=1))
    (again,) = watch_inbox(made, Inbox(folder, 0.0), threading.Event(), once=True)
    assert [report.state for report in again.reports] == ["already"]
    assert bronze(made).num_rows == 40


def test_it_ends_when_told(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(watch_inbox(job(tmp_path), Inbox(tmp_path, 0.0), stop)) == []
