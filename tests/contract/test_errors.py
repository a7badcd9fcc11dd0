"""Crash points."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import crash_points

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from lakehouse.contract.errors import crash_point
for number in range(3):
    print(number, flush=True)
    crash_point("live.after_judge")
"""


def test_the_list_is_what_the_code_passes() -> None:
    found = [
        name
        for package in ("ingest", "lakehouse", "serve", "jobs")
        for file in (ROOT / package).rglob("*.py")
        for name in re.findall(r'crash_point\("([^"]+)"\)', file.read_text(encoding="utf-8"))
    ]
    lists = [value for name, value in vars(crash_points).items() if name.endswith("CRASH_POINTS")]
    assert sorted(found) == sorted(point for points in lists for point in points)


@pytest.mark.parametrize(
    ("armed", "printed", "code"),
    [
        ("live.after_judge", 1, -signal.SIGKILL),
        ("live.after_judge:3", 3, -signal.SIGKILL),
        ("live.after_judge:4", 3, 0),
        ("live.before_commit", 3, 0),
        ("", 3, 0),
    ],
)
def test_it_kills_at_the_named_point_and_time(armed: str, printed: int, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": str(ROOT), "MILLRACE_CRASH_AT": armed},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.stdout.split(), done.returncode) == ([str(n) for n in range(printed)], code)
