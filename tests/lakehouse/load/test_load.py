"""Whole loads: each file once, each row once, whatever happens in between."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from lakehouse.errors import CommitFailed
from lakehouse.load.files import FeedFile, find
from lakehouse.load.loader import Deadline, load
from lakehouse.load.worker import GROUP_FILES, FileLoader, FileReport, LoadProgress, grouped, load_files
from tests.lakehouse.load.offers import SOURCE, bronze, ids, job, offers, payloads, run, write_jsonl

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from pathlib import Path
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from tests.lakehouse.load.offers import job, run
lake = Lake(lake_path(sys.argv[1]), Path(sys.argv[2]))
for report in run(job(lake, chunk_rows=500), *sys.argv[3:]).values():
    print(report.state, report.from_row, report.rows, flush=True)
"""


def loader(lake: Lake, *paths: Path, crash_at: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MILLRACE_CRASH_AT": crash_at}
    command = [sys.executable, "-c", SCRIPT, str(lake.root), str(lake.state), *map(str, paths)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def large(path: Path, count: int = 45_000) -> list[dict[str, Any]]:
    """A file of several blocks, so that it is committed in several chunks."""
    rows = [{"merchant": "m", "offer": f"o{n}", "version": 1, "title": "x" * 300} for n in range(count)]
    write_jsonl(path, rows)
    return rows


def test_every_format_and_each_content_once(tmp_path: Path, lake: Lake) -> None:
    made = {kind: offers(20, merchant=number) for number, kind in enumerate(("jsonl", "gz", "parquet", "csv"))}
    write_jsonl(tmp_path / "in/a.jsonl", made["jsonl"])
    write_jsonl(tmp_path / "in/b.jsonl.gz", made["gz"], packed=True)
    pq.write_table(pa.Table.from_pylist(made["parquet"]), tmp_path / "in/c.parquet")
    names = list(made["csv"][0])
    lines = [",".join(names)] + [",".join(f'"{row[n]}"'.replace('" ', '"" ') for n in names) for row in made["csv"]]
    lines = [line.replace('and "', 'and ""').replace('", no', '"", no') for line in lines]
    (tmp_path / "in/d.csv").write_text("\n".join(lines))
    write_jsonl(tmp_path / "in/copy/e.jsonl", made["jsonl"])
    reports = run(job(lake), tmp_path / "in")
    states = {name: (report.state, report.rows) for name, report in reports.items()}
    assert sorted(states.values()) == [("already", 20)] + [("loaded", 20)] * 4
    assert {report.rejects for report in reports.values()} == {0}
    assert sorted(bronze(job(lake))["event_id"].to_pylist()) == ids(row for rows in made.values() for row in rows)
    (tmp_path / "in/a.jsonl").rename(tmp_path / "in/z.jsonl")
    again = run(job(lake), tmp_path / "in")
    assert {report.state for report in again.values()} == {"already"}
    assert {report.rows for report in again.values()} == {20}
    assert bronze(job(lake)).num_rows == 80


def test_bad_files_do_not_stop_the_others(tmp_path: Path, lake: Lake) -> None:
    write_jsonl(tmp_path / "in/1.jsonl", offers(10, merchant=1))
    good = write_jsonl(tmp_path / "in/2.jsonl.gz", offers(3_000, merchant=2), packed=True)
    good.write_bytes(good.read_bytes()[:-2_000])
    (tmp_path / "in/3.csv").write_bytes(b'a,b\n1,"x\n')
    (tmp_path / "in/4.parquet").write_bytes(b"no")
    (tmp_path / "in/5.csv").write_bytes("merchant\nBlåbär\n".encode("cp1252"))
    (tmp_path / "in/6.jsonl").write_bytes(b"{broken\n[]\n" + json.dumps(offers(1)[0]).encode())
    (tmp_path / "in/7.csv").write_bytes(b"")
    write_jsonl(tmp_path / "in/8.jsonl", offers(10, merchant=8))
    (tmp_path / "in/9.jsonl").symlink_to(tmp_path / "in/1.jsonl")
    reports = run(job(lake), tmp_path / "in")
    states = {name[0]: report.state for name, report in reports.items()}
    expected = {"1": "loaded", "2": "failed", "3": "failed", "4": "failed", "5": "failed", "6": "loaded"}
    assert states == {**expected, "7": "failed", "8": "loaded", "9": "already"} or states["1"] == "already"
    assert "cut off" in reports["2.jsonl.gz"].reason
    assert (reports["6.jsonl"].rows, reports["6.jsonl"].rejects) == (3, 2)
    found = bronze(job(lake)).to_pylist()
    assert [row["payload"] for row in found if row["reject"]] == [b"{broken", b"[]"]
    assert all(row["origin"].startswith(str(tmp_path)) for row in found)


@pytest.mark.parametrize("crash_at", ["load.before_commit:3", "load.after_commit:3"])
def test_a_killed_load_goes_on_inside_the_file(tmp_path: Path, lake: Lake, crash_at: str) -> None:
    rows = large(tmp_path / "in.jsonl")
    killed = loader(lake, tmp_path / "in.jsonl", crash_at=crash_at)
    assert killed.communicate(timeout=300)[0] == ""
    assert killed.returncode == -signal.SIGKILL
    before = bronze(job(lake)).num_rows
    assert 0 < before < len(rows)
    report = run(job(lake), tmp_path / "in.jsonl")["in.jsonl"]
    assert (report.state, report.rows, report.from_row) == ("loaded", len(rows), before)
    found = bronze(job(lake), ["event_id", "offset", "bronze_at"])
    assert sorted(found["event_id"].to_pylist()) == ids(rows)
    assert sorted(found["offset"].to_pylist()) == list(range(len(rows)))


def on(lake: Lake, machine: Path) -> Lake:
    """The lake, as another machine has it."""
    return Lake(lake.root, machine)


@pytest.mark.s3
@pytest.mark.parametrize("store", ["s3", pytest.param("azure", marks=pytest.mark.soak)])
def test_another_machine_knows_what_is_in(tmp_path: Path, request: pytest.FixtureRequest, store: str) -> None:
    """By bronze alone: it has nothing of the first one's work folder."""
    lake = Lake(lake_path(f"{request.getfixturevalue(store)}/{tmp_path.name}"), tmp_path / "one")
    rows = offers(300)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    path.write_bytes(path.read_bytes() + b"{broken\n")
    first = run(job(lake), path)["a.jsonl"]
    assert (first.state, first.rows, first.rejects) == ("loaded", 301, 1)
    write_jsonl(tmp_path / "b.jsonl", offers(20, merchant=2))
    reports = run(job(on(lake, tmp_path / "other")), path, tmp_path / "b.jsonl")
    assert {name: (report.from_row, report.rows) for name, report in reports.items()} == {
        "a.jsonl": (301, 301),  # that nothing follows, it finds by reading the file
        "b.jsonl": (0, 20),
    }
    found = bronze(job(lake), ["event_id", "reject", "payload"])
    good = found.filter(found["reject"].is_null())
    assert sorted(good["event_id"].to_pylist()) == ids([*rows, *offers(20, merchant=2)])
    assert found.filter(found["reject"].is_valid())["payload"].to_pylist() == [b"{broken"]


@pytest.mark.soak
@pytest.mark.parametrize("crash_at", ["load.before_commit:3", "load.after_commit:3"])
def test_another_machine_goes_on_inside_the_file(tmp_path: Path, lake: Lake, crash_at: str) -> None:
    """Two of them begin while the lock of the loader that died has not run out yet."""
    rows = large(tmp_path / "in.jsonl")
    killed = loader(on(lake, tmp_path / "one"), tmp_path / "in.jsonl", crash_at=crash_at)
    assert killed.communicate(timeout=300)[0] == ""
    assert killed.returncode == -signal.SIGKILL
    before = bronze(job(lake), ["offset"]).num_rows
    others = [loader(on(lake, tmp_path / name), tmp_path / "in.jsonl") for name in ("two", "three")]
    told = [one.communicate(timeout=300)[0].split() for one in others]
    assert [one.returncode for one in others] == [0, 0]
    assert sorted(words[0] for words in told) == ["already", "loaded"]
    assert ["loaded", str(before), str(len(rows))] in told
    found = bronze(job(lake), ["event_id", "offset"])
    assert sorted(found["event_id"].to_pylist()) == ids(rows)
    assert sorted(found["offset"].to_pylist()) == list(range(len(rows)))


def test_several_loaders_share_the_files(tmp_path: Path, lake: Lake) -> None:
    made = [offers(400, merchant=number) for number in range(12)]
    for number, rows in enumerate(made):
        write_jsonl(tmp_path / f"in/{number}.jsonl", rows)
    loaders = [loader(lake, tmp_path / "in") for _ in range(3)]
    told = [one.communicate(timeout=300)[0].split("\n") for one in loaders]
    assert [one.returncode for one in loaders] == [0, 0, 0]
    states = [line.split()[0] for lines in told for line in lines if line]
    assert len(states) == 36
    assert states.count("loaded") == 12
    assert states.count("already") == 24
    assert sorted(bronze(job(lake))["event_id"].to_pylist()) == ids(row for rows in made for row in rows)


def test_worker_processes(tmp_path: Path, lake: Lake) -> None:
    made = [offers(300, merchant=number) for number in range(GROUP_FILES + 5)][: GROUP_FILES + 5]
    for number, rows in enumerate(made[:8]):
        write_jsonl(tmp_path / f"in/{number}.jsonl", rows)
    for number in range(8, GROUP_FILES + 5):
        write_jsonl(tmp_path / f"in/{number}.jsonl", made[number][:2])
    rows = [row for rows in made[:8] for row in rows] + [row for rows in made[8:] for row in rows[:2]]
    told: list[LoadProgress | FileReport] = []
    done = load(job(lake), find([tmp_path / "in"]), workers=2, notify=told.append)
    assert done.ok
    assert done.new_rows == len(rows)
    assert sum(isinstance(one, FileReport) for one in told) == GROUP_FILES + 5
    assert sorted(bronze(job(lake))["event_id"].to_pylist()) == ids(rows)


def test_files_are_shared_out_by_size() -> None:
    files = [FeedFile(Path(f"{n}"), size) for n, size in enumerate([5, 1 << 25, 7, 1 << 24, *[1] * 300])]
    groups = grouped(files)
    assert [len(group) for group in groups] == [1, 1, GROUP_FILES, 302 - GROUP_FILES]
    assert sorted(file.path for group in groups for file in group) == sorted(file.path for file in files)


def test_a_trial_writes_nothing(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", offers(5))
    report = run(job(tmp_path, trial=True), tmp_path / "a.jsonl")["a.jsonl"]
    assert (report.state, report.rows) == ("would load", 5)
    assert not (tmp_path / "lake").exists()


def test_a_copy_of_a_file_that_is_not_in_is_not_in_either(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"in/{name}.jsonl", [{"offer": "of nobody"}])
    reports = run(job(tmp_path, max_rejects=0.5), tmp_path / "in")
    assert {report.state for report in reports.values()} == {"refused"}


def test_a_loader_goes_on_after_a_commit_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker process does, which is given the next files."""
    rows = large(tmp_path / "in.jsonl", 30_000)
    told: list[LoadProgress | FileReport] = []
    real = DeltaTable.create_write_transaction

    def failing(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(DeltaTable, "create_write_transaction", failing)
    with FileLoader(job(tmp_path, chunk_rows=500), told.append) as loader:
        with pytest.raises(CommitFailed) as caught:
            loader.load(find([tmp_path / "in.jsonl"]))
        assert not any(isinstance(one, FileReport) for one in told)
        loader.load(find([tmp_path / "in.jsonl"]))
    (report,) = (one for one in told if isinstance(one, FileReport))
    assert (report.state, report.rows) == ("loaded", len(rows))
    assert sorted(bronze(job(tmp_path), ["event_id"])["event_id"].to_pylist()) == ids(rows)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_file_with_too_many_bad_rows_is_refused(tmp_path: Path, lake: Lake) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"merchant":"m","offer":"o","version":1}\n{}\n{}\n')
    report = run(job(lake, max_rejects=0.5), tmp_path / "a.jsonl")["a.jsonl"]
    assert report.state in ("refused", "loaded")
    made = job(lake, max_rejects=0.5)
    rows = b'{"merchant":"m","offer":"o","version":1}\n' + b"{}\n" * 200
    (tmp_path / "b.jsonl").write_bytes(rows)
    report = run(made, tmp_path / "b.jsonl")["b.jsonl"]
    assert (report.state, report.rows) == ("refused", 0)
    assert report.reason.startswith("99.5% of the first 201 rows are refused, more than the 50.0% allowed")


def test_the_quality_gate_keeps_a_file_out(tmp_path: Path, lake: Lake) -> None:
    checks = {"many": {"expect": "expect_table_row_count_to_be_between", "min_value": 5}}
    source = replace(SOURCE, table_expectations=checks)
    write_jsonl(tmp_path / "in/few.jsonl", offers(3, merchant=1))
    write_jsonl(tmp_path / "in/many.jsonl", offers(8, merchant=2))
    made = job(lake, source=source, gate=True)
    reports = run(made, tmp_path / "in")
    assert {name: report.state for name, report in reports.items()} == {"few.jsonl": "refused", "many.jsonl": "loaded"}
    assert reports["few.jsonl"].reason.startswith("quality gate: offers does not pass: many: 3")
    assert bronze(made).num_rows == 8


def test_rows_without_an_id_get_one_by_their_place(tmp_path: Path) -> None:
    source = replace(SOURCE, event_id="", key="")
    (tmp_path / "a.jsonl").write_bytes(b'{"a":1}\n{"a":1}\n')
    run(job(tmp_path, source=source), tmp_path / "a.jsonl")
    found = bronze(job(tmp_path))
    report = run(job(tmp_path, source=source), tmp_path / "a.jsonl")["a.jsonl"]
    assert report.state == "already"
    assert found["event_id"].to_pylist() == [f"~{report.file}/0", f"~{report.file}/1"]


def refused(root: Path) -> set[tuple[str, str]]:
    """What quarantine tells refused events apart by."""
    rows = bronze(job(root), ["event_id", "fingerprint", "reject"])
    rows = rows.filter(rows["reject"].is_valid())
    return set(zip(rows["event_id"].to_pylist(), rows["fingerprint"].to_pylist(), strict=True))


def test_refused_rows_that_come_another_way_are_the_same_events(tmp_path: Path) -> None:
    good = [json.dumps(one).encode() for one in offers(6)]
    text = b"\n".join([good[0], b"{broken", *good[1:3], b'{"merchant":"m"}', b"{broken", *good[3:]]) + b"\n"
    (tmp_path / "a.jsonl").write_bytes(text)
    assert run(job(tmp_path), tmp_path / "a.jsonl")["a.jsonl"].rejects == 3
    once = refused(tmp_path)
    assert len(once) == 3, "two equal rows of one file are two events"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text))
    (tmp_path / "grown.jsonl").write_bytes(text + b"{broken too\n")
    reports = run(job(tmp_path), tmp_path / "b.jsonl.gz", tmp_path / "grown.jsonl")
    assert [report.rejects for report in reports.values()] == [3, 4]
    assert once < refused(tmp_path) and len(refused(tmp_path)) == 4
    (tmp_path / "other.jsonl").write_bytes(text.replace(good[0], json.dumps(offers(1, merchant=2)[0]).encode()))
    run(job(tmp_path), tmp_path / "other.jsonl")
    assert len(refused(tmp_path)) == 7, "the same rows in the file of another merchant are other events"


def test_refused_rows_after_a_resume_are_the_same_events(tmp_path: Path) -> None:
    large(tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"{broken\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes(), 1))
    lake = Lake(tmp_path / "lake")
    with loader(lake, tmp_path / "a.jsonl", crash_at="load.after_commit:2") as killed:
        assert killed.wait(300) == -signal.SIGKILL
    shutil.rmtree(lake.state / "loads" / "offers" / "ledger")  # bronze's rows say it
    assert run(job(tmp_path), tmp_path / "a.jsonl")["a.jsonl"].from_row > 0
    assert run(job(tmp_path), tmp_path / "b.jsonl.gz")["b.jsonl.gz"].from_row == 0
    assert len(refused(tmp_path)) == 1


def test_a_file_that_grows_while_it_is_read_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    large(path, 30_000)
    reports: list[FileReport] = []

    def tell(message: LoadProgress | FileReport) -> None:
        if isinstance(message, FileReport):
            reports.append(message)
        else:
            with path.open("a") as file:
                file.write('{"merchant":"m","offer":"late","version":1}\n')

    load(job(tmp_path), find([path]), notify=tell)
    assert [report.state for report in reports] == ["failed"]
    assert "written to while it was read" in reports[0].reason
    assert run(job(tmp_path), path)["a.jsonl"].state == "loaded"  # all of it, under its new fingerprint
    assert len(set(bronze(job(tmp_path))["event_id"].to_pylist())) == 30_001


def test_the_table_of_loads_and_the_deadline(tmp_path: Path, lake: Lake) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", offers(5))
    (tmp_path / "in/b.parquet").write_bytes(b"no")
    done = load(job(lake), find([tmp_path / "in"]), allowed_s=3_600)
    assert (done.ok, done.late) == (False, False)
    late = load(job(lake), find([tmp_path / "in/a.jsonl"]), allowed_s=-1)
    assert (late.ok, late.late) == (True, True)
    table = lake.table("silver", "loads")
    rows = DeltaTable(str(table.path)).to_pyarrow_table().sort_by("started_at").to_pylist()
    found = [(row["load"], Path(row["name"]).name, row["state"], row["rows"], row["late"]) for row in rows]
    assert sorted(found) == sorted(
        [
            (done.id, "a.jsonl", "loaded", 5, False),
            (done.id, "b.parquet", "failed", 0, False),
            (late.id, "a.jsonl", "already", 5, True),
        ]
    )
    assert all(row["deadline"] is not None and row["source"] == "offers" for row in rows)
    assert payloads(job(lake)) == sorted(json.dumps(row).encode() for row in offers(5))


def test_a_load_that_will_be_late_is_known_before() -> None:
    clock = [100.0]
    watch = Deadline(100.0, 60.0, 1_000, now=lambda: clock[0])
    assert not watch.in_danger
    clock[0] = 110.0
    watch.read["a"] = 500
    assert (watch.expected(), watch.in_danger) == (120.0, False)
    watch.read["a"] = 100
    assert (watch.expected(), watch.in_danger) == (200.0, True)
    assert not Deadline(100.0, None, 1_000, now=lambda: 10**9).in_danger
    assert watch.is_late(161_000_000)
    assert not watch.is_late(159_000_000)


def test_a_killed_worker_is_told_and_loses_nothing(tmp_path: Path, lake: Lake) -> None:
    rows = large(tmp_path / "in/a.jsonl")
    for number in range(3):
        (tmp_path / f"in/{number}.jsonl").write_bytes((tmp_path / "in/a.jsonl").read_bytes() + b'{"n":%d}\n' % number)
    killer = threading.Event()

    def tell(message: LoadProgress | FileReport) -> None:
        if not killer.is_set():
            killer.set()
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            loaders = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            os.kill(int(loaders[-1]), signal.SIGKILL)

    from lakehouse.errors import LoaderDied

    with pytest.raises(LoaderDied, match="run the same command again"):
        load(job(lake), find([tmp_path / "in"]), workers=2, notify=tell)
    reports = run(job(lake), tmp_path / "in")
    assert {report.state for report in reports.values()} <= {"loaded", "already"}
    assert set(bronze(job(lake))["event_id"].to_pylist()) >= set(ids(rows))
    counted = bronze(job(lake), ["topic", "offset"])
    assert len(set(zip(counted["topic"].to_pylist(), counted["offset"].to_pylist(), strict=True))) == counted.num_rows


def test_a_worker_that_fails_leaves_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others say has no end that a queue of one place could hold, and is heard all the same."""
    monkeypatch.setattr("lakehouse.load.worker._QUEUE_SIZE", 1)
    for number in range(GROUP_FILES):
        write_jsonl(tmp_path / f"in/{number}.jsonl", offers(2, merchant=number))
    no_name = FeedFile(tmp_path / "no\0name", 1 << 30)  # the first group; no system opens such a file
    told: list[LoadProgress | FileReport] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            load_files(job(tmp_path), [no_name, *find([tmp_path / "in"])], workers=2, notify=told.append)
        except ValueError as error:
            raised.append(error)

    loading = threading.Thread(target=work, daemon=True)
    loading.start()
    loading.join(60)
    assert not loading.is_alive()
    assert "null byte" in str(raised[0])
    assert sum(isinstance(one, FileReport) for one in told) == GROUP_FILES


def test_who_listens_badly_is_told_and_ends_the_load(tmp_path: Path) -> None:
    for number in range(2):
        large(tmp_path / f"in/{number}.jsonl", 30_000)
        with (tmp_path / f"in/{number}.jsonl").open("a") as file:
            file.write(f'{{"n":{number}}}\n')

    def tell(_: LoadProgress | FileReport) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        load_files(job(tmp_path), find([tmp_path / "in"]), workers=2, notify=tell)
