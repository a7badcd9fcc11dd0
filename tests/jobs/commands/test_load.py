"""``millrace load`` and ``staging`` as a user calls them, and feed files to try them with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.cli import app
from jobs.commands.load import LATE, worst
from lakehouse.contract.errors import ConfigError

ROOT = Path(__file__).parents[3]
runner = CliRunner()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLRACE_PIPELINE", "offers")
    monkeypatch.setenv("MILLRACE_LAKE", str(tmp_path / "lake"))
    made = runner.invoke(app, ["simulate", "--feeds", str(tmp_path / "in"), "--merchants=3", "--offers=20"])
    assert made.exit_code == 0
    assert json.loads(made.stdout)["files"] == 3
    return tmp_path


def test_a_load_says_what_became_of_each_file(place: Path) -> None:
    first = runner.invoke(app, ["load", str(place / "in"), "--workers=1", "--json", "--sla=1 hour"])
    assert first.exit_code == 0
    found = json.loads(first.stdout)
    assert (found["ok"], found["late"], found["source"]) == (True, False, "offers")
    assert {file["state"] for file in found["files"]} == {"loaded"}
    assert found["rows"] == sum(file["rows"] for file in found["files"]) >= 60
    again = runner.invoke(app, ["load", str(place / "in"), "--workers=1"])
    assert again.exit_code == 0
    assert "already" in again.stdout
    assert "3 files, 0 rows" in again.stdout


def test_the_exit_status(place: Path) -> None:
    (place / "in" / "x.parquet").write_bytes(b"no")
    assert runner.invoke(app, ["load", str(place / "in"), "--workers=1"]).exit_code == 1
    (place / "in" / "x.parquet").unlink()
    assert runner.invoke(app, ["load", str(place / "in"), "--workers=1", "--sla=0 s"]).exit_code == 4
    assert runner.invoke(app, ["load", str(place / "in"), "--dry-run"]).exit_code == 0


def test_a_file_that_is_not_in_counts_more_than_a_deadline() -> None:
    assert [worst(statuses) for statuses in ({0}, {0, LATE}, {0, LATE, 1})] == [0, LATE, 1]


def test_a_watched_folder(place: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "load", "--watch", str(place / "in"), "--once"]
    done = subprocess.run(
        [*command, "--settle=0", "--workers=1", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert len(list((place / "in" / "done").iterdir())) == 3


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["load"], "say what to load"),
        (["load", "x", "--feeds"], "say what to load"),
        (["load", "nothing/*.csv"], "there is no file"),
        (["load", "x", "--source=nobody"], "there is no source 'nobody'"),
        (["load", "x", "--format=xml"], "'xml' is no format"),
        (["load", "x", "--encoding=latin-99"], "is no encoding"),
        (["load", "x", "--delimiter=;;"], "must be one character"),
        (["load", "x", "--sla=soon"], "is not a duration"),
        (["load", "--feeds"], "no source has feeds"),
        (["load", "--watch=/nowhere/at/all"], "there is no folder"),
        (["staging", "rebuild", "nothing"], "there is no staging table 'nothing'"),
        (["staging", "rebuild"], "no table catalogue yet"),
    ],
)
def test_what_is_wrong_is_said(place: Path, arguments: list[str], problem: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exception is not None
    assert problem in str(done.exception)
    assert isinstance(done.exception, ConfigError) or "staging" in arguments
