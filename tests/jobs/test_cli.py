"""The ``millrace`` command, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import pyarrow as pa
import pytest
import typer
from deltalake import write_deltalake
from typer.testing import CliRunner

from jobs.cli import app
from lakehouse.contract.access import KeyFile
from lakehouse.contract.errors import MillraceError
from lakehouse.contract.jvm import jar_paths
from lakehouse.contract.lake import Lake
from serve.access import ReaderKey
from serve.sql.statement import run_sql
from tests.serve.conftest import Spawned
from tests.serve.lakes import top_topics, topics, window

ROOT = Path(__file__).parents[2]


def millrace(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = "/usr/bin:/bin"
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments],
        cwd=ROOT,
        env={"PATH": path, "HOME": str(Path.home()), "COLUMNS": "200", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def commands(command: click.Command, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield above
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*above, name))


@pytest.mark.parametrize("command", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    found = CliRunner().invoke(app, [*command, "--help"])
    assert found.exit_code == 0, found.output
    assert "Usage:" in found.output
    assert found.output.splitlines()[3].strip().endswith((".", "…")) or len(found.output.splitlines()[3]) > 40


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    path = tmp_path / "lake" / "gold" / "tops"
    path.mkdir(parents=True)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = pa.table({"day": pa.array([at], pa.timestamp("us", "UTC")), "item": ["Köln [x]"], "n": [3], "s": [b"\x00"]})
    write_deltalake(str(path), rows)
    return tmp_path / "lake"


def test_sql_as_json(lake: Path) -> None:
    done = millrace("sql", "SELECT day, item, n + 1 AS n FROM tops", "--lake", str(lake), "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"day": "2026-01-01T00:00:00Z", "item": "Köln [x]", "n": 4}]


def test_sql_as_a_table(lake: Path) -> None:
    done = millrace("sql", "SELECT item, n FROM tops", MILLRACE_LAKE=str(lake))
    assert done.returncode == 0, done.stderr
    assert "Köln [x]" in done.stdout
    assert "1 rows" in done.stderr


def test_sql_as_csv(lake: Path) -> None:
    done = millrace("sql", "SELECT day, item, NULL AS none FROM tops", "--lake", str(lake), "--format", "csv")
    assert done.stdout == "day,item,none\n2026-01-01T00:00:00Z,Köln [x],\n"


def test_no_value_is_cut(lake: Path) -> None:
    columns = ", ".join(f"day AS day_{number}" for number in range(8))
    whole = millrace("sql", f"SELECT {columns} FROM tops", "--lake", str(lake)).stdout.splitlines()
    assert whole[1].split() == ["2026-01-01T00:00:00Z"] * 8, "one line a row where no terminal is to be fitted"
    narrow = millrace("sql", f"SELECT {columns} FROM tops", "--lake", str(lake), COLUMNS="80").stdout.splitlines()
    assert narrow[:2] == ["row 1", "day_0  2026-01-01T00:00:00Z"]
    assert max(map(len, narrow)) <= 80


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELECT * FORM tops", "it is not SQL at 'FORM'. Did you mean FROM?"),
        ("SELECT item FROM tops GROUPE BY item", "it is not SQL at 'GROUPE'. Did you mean GROUP?"),
        ("SELECT * FROM top", "no table 'top'; there are: tops"),
    ],
)
def test_an_error_of_sql_names_the_token(lake: Path, query: str, says: str) -> None:
    with pytest.raises(MillraceError, match=re.escape(says)):
        run_sql(Lake(lake), query)


def test_tables(lake: Path) -> None:
    header, row = millrace("tables", "--lake", str(lake), COLUMNS="80").stdout.splitlines()
    assert row.split()[:2] == ["gold/tops", "ok"] and max(len(header), len(row)) <= 80
    done = millrace("tables", "--lake", str(lake), "--json")
    (row,) = json.loads(done.stdout)
    assert (row["layer"], row["table"], row["version"], row["files"]) == ("gold", "tops", 0, 1)
    assert "tops" in millrace("tables", "--lake", str(lake)).stdout
    assert json.loads(millrace("tables", "--lake", str(lake / "none"), "--json").stdout) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sql", "SELECT * FROM absent"], "no table 'absent'; there are: tops"),
        (["sql", "SELECT nothing FROM tops"], "nothing"),
        (["sql", "DROP TABLE tops"], ""),
        (["collect", "--pipeline", "meatup"], "there is no pipeline 'meatup'"),
        (["run"], "millrace kafka start"),
        (["replay"], "no source of pipeline meetup has events in lake"),
    ],
)
def test_an_error_is_one_line_and_status_1(lake: Path, arguments: list[str], says: str) -> None:
    done = millrace(*arguments, "--lake", str(lake))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[-1].startswith("error: ") or lines[0].startswith("error: ")
    assert says in " ".join(lines)
    assert done.stdout == ""


@pytest.mark.parametrize("command", [["collect"], ["kafka", "start"], ["tables"]])
def test_a_lake_that_is_a_file_is_one_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "lake").write_text("")
    done = millrace(*command, "--lake", str(tmp_path / "lake"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "lake") in line


def test_without_java_a_command_that_starts_spark_says_so(tmp_path: Path) -> None:
    done = millrace("test", "clickstream", JAVA_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and "Install a Java 17 runtime" in done.stderr


def test_a_setting_that_is_wrong_names_its_variable() -> None:
    done = millrace("tables", MILLRACE_SERVE_PORT="high")
    assert done.returncode == 1
    assert done.stderr.startswith("error: configuration: MILLRACE_SERVE_PORT: 'high' is not of type int")


def test_a_wrong_option_is_a_matter_of_usage() -> None:
    assert millrace("sql", "--nothing").returncode == 2


def test_subscribe_to_a_server_that_is_not_there_can_be_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "subscribe", "tops", "--url", "http://127.0.0.1:9"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3)  # it goes on trying
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_subscribe_has_a_key_a_filter_and_a_transport_and_ends_on_a_final_answer(tmp_path: Path) -> None:
    root = tmp_path / "lake"
    product = top_topics(root)
    product.overwrite(topics(0, [3, 2]), [window(0)])
    key = KeyFile(Lake(root).state / "readers.toml", ReaderKey).new(ReaderKey("0" * 64))
    server = Spawned(root, poll_ms=5)
    try:
        ask = ("subscribe", "top_topics", "--url", server.url, "--count", "1")
        wanted = ("--where", "count > 2", "--columns", "count")
        for transport in ("auto", "poll"):
            done = millrace(*ask, "--transport", transport, *wanted, MILLRACE_KEY=key)
            assert [row["count"] for row in json.loads(done.stdout)["rows"]] == [3], done.stderr
        done = millrace(*ask, "--select", "SELECT sum(count) AS n", MILLRACE_KEY=key)
        assert json.loads(done.stdout)["rows"] == [{"n": 5}]
        for options, shown, says in (
            ([], {}, "unauthorized"),
            (["--where", "x >"], {"MILLRACE_KEY": key}, "bad_filter"),
        ):
            done = millrace(*ask, *options, **shown)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.splitlines()[-1].startswith(f"error: {says}: ")
    finally:
        server.close()


@pytest.mark.parametrize("form", ["csv", "table"])
def test_subscribe_prints_rows_with_their_change(tmp_path: Path, form: str) -> None:
    product = top_topics(tmp_path / "lake")
    product.overwrite(topics(0, [3, 2]), [window(0)])
    server = Spawned(tmp_path / "lake", poll_ms=5)
    command = ["subscribe", "top_topics", "--url", server.url, "--count", "2", "--columns", "item,count"]
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *command, "--format", form],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "80"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            product.overwrite(topics(0, [3, 4]), [window(0)])
            lines += process.stdout.readlines()
            assert process.wait(60) == 0
    finally:
        server.close()
    assert max(map(len, lines)) <= 80 + len("\n")
    header, one, two, *rest = [line.replace(",", " ").split() for line in lines]
    assert header == ["change", "window_start", "rank", "item", "count"]
    at = "2026-01-01T00:00:00Z"
    assert [one, two] == [["snapshot", at, "1", "topic", "1", "3"], ["snapshot", at, "2", "topic", "2", "2"]]
    changed = ["upsert", at, "2", "topic", "2", "4"]
    assert rest == ([changed] if form == "csv" else [header, changed])


def test_kafka_status_without_a_broker(tmp_path: Path) -> None:
    done = millrace("kafka", "status", "--lake", str(tmp_path), "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["running"] is False
    assert not list(tmp_path.iterdir())


def test_jars_as_spark_submit_takes_them() -> None:
    done = millrace("prepare", "--jars")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n").split(",") == [str(path) for path in jar_paths("spark")]
