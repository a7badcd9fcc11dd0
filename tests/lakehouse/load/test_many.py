"""As many feeds as a marketplace has merchants, a small file each."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from deltalake import DeltaTable

from ingest.simulate.scenes import MERCHANTS, feed_rows, write_feeds
from lakehouse.load.files import find
from lakehouse.load.loader import load
from lakehouse.load.worker import FileReport, LoadProgress
from tests.lakehouse.load.offers import START_MS, bronze, ids, job

pytestmark = pytest.mark.soak
_OPEN_FILES, _MEMORY_KB = 150, 1_000_000  # of a process


@dataclass
class Watched:
    """The most that this process and its workers have had open, and in memory (KiB), seen at every 200th message."""

    messages: int = 0
    files: int = 0
    memory: int = 0

    def tell(self, _: LoadProgress | FileReport) -> None:
        self.messages += 1
        if self.messages % 200 == 1:
            for pid in (str(os.getpid()), *children()):
                self.files = max(self.files, len(os.listdir(f"/proc/{pid}/fd")))
                status = Path(f"/proc/{pid}/status").read_text()
                self.memory = max(self.memory, int(status.partition("VmRSS:")[2].split()[0]))


def children() -> list[str]:
    found: list[str] = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        found += (task / "children").read_text().split()
    return found


def test_every_merchants_feed_is_in_within_the_hour(tmp_path: Path) -> None:
    written = write_feeds(tmp_path / "in", 7, start_ms=START_MS)
    assert written.files == MERCHANTS
    files, watched = find([tmp_path / "in"]), Watched()
    done = load(job(tmp_path), files, workers=2, allowed_s=3_600, notify=watched.tell)
    assert (done.ok, done.late) == (True, False)
    assert Counter(report.state for report in done.reports) == {"loaded": MERCHANTS}
    assert {report.name for report in done.reports} == {str(file.path) for file in files}
    assert done.new_rows == written.rows
    assert sum(report.rejects for report in done.reports) == written.malformed

    found = bronze(job(tmp_path), ["event_id", "reject", "topic", "offset"])
    good = found.filter(found["reject"].is_null())
    rows = [row for number in range(MERCHANTS) for row in next(feed_rows(7, number, 10, 1, START_MS)) if row]
    assert sorted(good["event_id"].to_pylist()) == ids(rows)
    assert found.group_by(["topic", "offset"]).aggregate([]).num_rows == found.num_rows == written.rows
    table = DeltaTable(str(job(tmp_path).lake.table("silver", "loads").path)).to_pyarrow_table()
    assert set(table["name"].to_pylist()) == {str(file.path) for file in files}
    assert 0 < watched.files < _OPEN_FILES
    assert 0 < watched.memory < _MEMORY_KB

    again = load(job(tmp_path), files, workers=2, allowed_s=3_600)
    assert (again.ok, again.late, again.new_rows) == (True, False, 0)
    assert Counter(report.state for report in again.reports) == {"already": MERCHANTS}
    assert bronze(job(tmp_path), ["offset"]).num_rows == written.rows
