"""``millrace status``: what the supervisor's notes say, and whether it is still so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.local.stack import ADDRESSES, DRIVER, PARTS, StackPart, parts, write_note
from lakehouse.contract.lake import Lake

ME = os.getpid()


@pytest.fixture
def ended() -> int:
    """The id of a process that is no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.fixture
def lake(tmp_path: Path, ended: int) -> Lake:
    """A lake whose server and driver run, whose collector ended and whose broker never ran."""
    lake = Lake(tmp_path / "lake")
    run = lake.state / "run"
    run.mkdir(parents=True)
    write_note(run / PARTS, {"lakehouse": ME, "serve": ME, "collect": ended, "broker": None})
    write_note(run / ADDRESSES, {"serve": "http://127.0.0.1:1", "collect": "http://127.0.0.1:2", "broker": "h:3"})
    write_note(run / DRIVER, {"pid": ME, "metrics": "http://127.0.0.1:4/metrics"})
    return lake


def test_parts(lake: Lake) -> None:
    assert parts(lake) == [
        StackPart("lakehouse", ME, "", "http://127.0.0.1:4/metrics"),
        StackPart("serve", ME, "http://127.0.0.1:1", "http://127.0.0.1:1/metrics"),
        StackPart("collect", None, "http://127.0.0.1:2", "http://127.0.0.1:2/metrics"),
        StackPart("broker", None, "h:3"),
    ]


def test_a_driver_that_was_started_again_is_not_ready_yet(lake: Lake, ended: int) -> None:
    write_note(lake.state / "run" / DRIVER, {"pid": ended, "metrics": "http://127.0.0.1:4/metrics"})
    assert parts(lake)[0] == StackPart("lakehouse", ME, remarks="not ready yet")


def test_the_command(lake: Lake, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["status", "--lake", str(lake.root), "--json"])
    assert found.exit_code == 0
    told = {part["name"]: part for part in json.loads(found.output)}
    assert [name for name, part in told.items() if part["running"]] == ["lakehouse", "serve"]
    assert told["lakehouse"]["metrics"] == "http://127.0.0.1:4/metrics"
    assert (
        "does not run" in CliRunner().invoke(app, ["status", "--lake", str(lake.root)], env={"COLUMNS": "200"}).output
    )
    command = [sys.executable, "-m", "jobs.cli", "status", "--lake", str(lake.root)]
    narrow = subprocess.run(command, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=True)
    assert len(narrow.stdout.splitlines()) == 5, "one line a part"
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    nothing = CliRunner().invoke(app, ["status", "--lake", str(tmp_path / "none"), "--json"])
    assert (nothing.exit_code, json.loads(nothing.output)) == (3, [])
