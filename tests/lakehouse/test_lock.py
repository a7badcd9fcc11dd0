"""Writers' locks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lakehouse.contract.lake import Lake
from lakehouse.errors import TableBusy
from lakehouse.lock import WriterLocks

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from lakehouse.contract.lake import Lake
from lakehouse.contract.storage import lake_path
from lakehouse.lock import WriterLocks
with WriterLocks(Lake(lake_path(sys.argv[1]), Path("/nowhere")), ["b"]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_writer_a_table(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with WriterLocks(lake, ["b", "a"]):
        with WriterLocks(lake, ["c"]):
            pass
        with pytest.raises(TableBusy) as caught, WriterLocks(lake, ["b"]):
            pytest.fail("two writers")
        assert (caught.value.name, caught.value.lock) == ("b", lake.state / "locks" / "b.lock")
        assert "a table has one writer" in str(caught.value)
    with WriterLocks(lake, ["b"]):
        pass


def test_what_was_taken_is_given_back_when_one_is_busy(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    with WriterLocks(lake, ["b"]):
        with pytest.raises(TableBusy), WriterLocks(lake, ["a", "b", "c"]):
            pytest.fail("two writers")
        with WriterLocks(lake, ["a", "c"]):
            pass


def test_the_lock_of_a_killed_process_is_free(lake: Lake) -> None:
    """In an object store 20 seconds after its last sign of life, for a process that was begun before as well."""
    command = [sys.executable, "-c", SCRIPT, str(lake.root)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        for patience_s in (0.0, 1.0):
            with pytest.raises(TableBusy), WriterLocks(lake, ["b"], patience_s):
                pytest.fail("two writers")
        process.kill()
        process.wait()
    killed_at = time.monotonic()
    with WriterLocks(lake, ["b"], patience_s=1.0):
        assert time.monotonic() - killed_at < 30
