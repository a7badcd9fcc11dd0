"""``millrace init`` and ``test`` end to end: a sample becomes a pipeline that real parts run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from jobs.local.fixtures import Difference, compare_rows, read_fixtures
from jobs.local.stack import parts
from lakehouse.contract.errors import ConfigError
from lakehouse.contract.lake import Lake
from lakehouse.contract.pipeline import load_pipeline
from lakehouse.contract.settings import conf_dir
from serve.client import SyncSubscription, TableView, Unauthorized, subscribe
from tests.jobs.local.test_guess import flights, sample
from tests.system.worked_case import processes_of

ROOT = Path(__file__).parents[3]


def test_rows_are_compared_in_the_columns_that_are_expected() -> None:
    actual = [{"k": 1, "n": 2.0000000001, "x": b"1"}, {"k": 2, "n": 5, "x": None}, {"k": 3, "n": 1, "x": None}]
    assert list(compare_rows([{"k": 3, "n": 1}, {"k": 1, "n": 2}, {"k": 2, "n": 5}], actual, ["k"])) == []
    assert list(compare_rows([{"k": 1, "n": 2}, {"k": 2, "n": 4}, {"k": 9, "n": 9}], actual, ["k"])) == [
        Difference("different", {"k": 2, "n": 4}, {"n": (4, 5)}),
        Difference("missing", {"k": 9, "n": 9}, {}),
        Difference("unexpected", {"k": 3, "n": 1}, {}),
    ]
    at = "2024-03-01T13:00:00+01:00"
    assert list(compare_rows([{"k": at}], [{"k": "2024-03-01T12:00:00Z"}], [])) == []
    assert [one.problem for one in compare_rows([], [{"k": 1}], ["k"])] == ["unexpected"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("visit.jsonl", "{}", "Did you mean 'visits'"),
        ("visits.jsonl", '{"a": 1}\nno', "visits.jsonl:2: not JSON"),
        ("input.action.jsonl", "{}", "Call it input.SOURCE.jsonl: actions"),
    ],
)
def test_a_wrong_fixture_is_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    for path in conf_dir().glob("pipelines/clickstream/*.*"):
        (tmp_path / path.name).write_text(path.read_text())
    pipeline = load_pipeline(tmp_path)
    with pytest.raises(ConfigError, match="there are no fixtures"):
        read_fixtures(pipeline)
    (tmp_path / "tests" / "one").mkdir(parents=True)
    (tmp_path / "tests" / "one" / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_fixtures(pipeline)


def millrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.spark
def test_the_fixtures_of_a_shipped_pipeline() -> None:
    done = millrace("test", "clickstream")
    assert done.returncode == 0, done.stdout + done.stderr
    tables = {line.split(":")[0] for line in done.stdout.splitlines()}
    assert tables == {f"ok abandoned_cart/{name}" for name in ("coupons", "quarantine", "views_by_hour", "visits")}


@pytest.mark.spark
def test_a_difference_is_shown_cell_by_cell(tmp_path: Path) -> None:
    folder = tmp_path / "flights"
    assert millrace("init", str(folder), "--from", str(sample(tmp_path, flights())), "--yes").returncode == 0
    (wrong,) = folder.glob("tests/sample/flights_by_*.jsonl")
    first, *others = map(json.loads, wrong.read_text().splitlines())
    wrong.write_text("".join(json.dumps(row) + "\n" for row in [{**first, "events": 99}, *others]))
    done = millrace("test", str(folder), "--json")
    assert done.returncode == 1, done.stderr
    found = {result["table"]: result["differences"] for result in json.loads(done.stdout)}
    table = wrong.stem
    assert found.pop(table) == [
        {"problem": "different", "row": {**first, "events": 99}, "cells": {"events": [99, first["events"]]}}
    ]
    assert list(found.values()) == [[], []], "the two others are as expected"
    assert done.stderr == "", "neither Java nor Spark writes to the console"


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.screen = ""
        self._side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        command = ["env", "--default-signal=INT", "setsid", "--ctty", sys.executable, "-m", "jobs.cli", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self._process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, cwd=folder, env=environment)
        os.close(other)

    def until(self, text: str) -> str:
        """What it shows up to this text, which is taken off."""
        ends = time.monotonic() + 60
        while text not in self.screen:
            assert time.monotonic() < ends and self._read(), self.screen
        shown, _, self.screen = self.screen.partition(text)
        return shown

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def end(self) -> int:
        """Its exit status, when it has ended; ``screen`` is what it showed last."""
        while self._read():
            pass
        os.close(self._side)
        return self._process.wait(60)

    def _read(self) -> bool:
        try:
            found = os.read(self._side, 65_536)
        except OSError:  # so Linux says that the other side is closed
            return False
        self.screen += found.decode(errors="replace").replace("\r\n", "\n")
        return bool(found)


def test_init_asks_again_after_a_wrong_answer(tmp_path: Path) -> None:
    sample(tmp_path, flights())
    terminal = Terminal(tmp_path, "init", "flights", "--from", "sample.jsonl")
    shown = terminal.until("event id [")
    assert max(map(len, shown.splitlines())) <= 80
    guesses = [line.split("  ")[0] for line in shown.splitlines()[-4:-1]]
    assert guesses == ["event id", "key", "event time"]
    guess = terminal.until("]: ")
    terminal.type("{nope}\n")
    assert "no: the schema has no field 'nope'" in terminal.until("event id [")
    terminal.type("number\n")
    assert "no: 'number' names no field. Write e.g. '{" in terminal.until("event id [")
    terminal.type("\n")
    terminal.until("key [")
    terminal.type("none\n")
    terminal.until("event time [")
    for wrong, says in (("to_timestampp(x)", "Did you mean 'to_timestamp'"), ("none", "Write received_at")):
        terminal.type(f"{wrong}\n")
        assert says in terminal.until("event time [")
    terminal.type("received_at\n")
    assert terminal.end() == 0, terminal.screen
    assert "millrace check flights" in terminal.screen
    (source,) = load_pipeline(tmp_path / "flights").sources.values()
    assert (source.event_id, source.key, source.event_time) == (guess, "", "received_at")


def test_ctrl_c_at_a_question_leaves_nothing(tmp_path: Path) -> None:
    file = sample(tmp_path, flights(5))
    terminal = Terminal(tmp_path, "init", "flights", "--from", "sample.jsonl")
    terminal.until("event id [")
    terminal.type("\n")
    terminal.until("key [")
    terminal.type("\x03")
    assert terminal.end() != 0
    assert "Aborted" in terminal.screen and "Traceback" not in terminal.screen
    assert list(tmp_path.iterdir()) == [file]


def ask(method: str, url: str, key: str, body: str = "", content_type: str = "application/json") -> tuple[int, Any]:
    """Status and JSON of the answer."""
    headers = {"content-type": content_type} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        request = urllib.request.Request(url, body.encode() or None, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


@pytest.mark.spark
@pytest.mark.broker
def test_a_new_pipeline_runs_on_its_own_sample_below_a_control_plane(tmp_path: Path) -> None:
    """Subscriptions and a source that REST creates are there at once; Ctrl-C leaves no process."""
    rows, lake = flights(), tmp_path / "lake"
    made = millrace("init", str(tmp_path / "flights"), "--from", str(sample(tmp_path, rows)), "--yes")
    assert made.returncode == 0, made.stderr
    arguments = ["--pipeline", str(tmp_path / "flights"), "--lake", str(lake)]
    ports = [f"--set={part}.port=0" for part in ("serve", "collect", "control")]
    command = [sys.executable, "-m", "jobs.cli", "up", "--control", *arguments, *ports]
    with (tmp_path / "up.log").open("wb") as log:
        stack = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 240

        def in_time(*facts: Any) -> None:
            assert stack.poll() is None and time.monotonic() < until, ((tmp_path / "up.log").read_text(), *facts)
            time.sleep(0.2)

        while b"ready: " not in (tmp_path / "up.log").read_bytes():
            in_time()
        where = {part.name: part.address for part in parts(Lake(lake))}
        admin = (lake / "_millrace" / "control" / "admin.key").read_text().strip()

        def manage(method: str, path: str, status: int, body: str = "", content_type: str = "application/json") -> Any:
            answered, answer = ask(method, f"{where['control']}/v1/{path}", admin, body, content_type)
            assert answered == status, answer
            return answer

        def create(kind: str, **body: Any) -> Any:
            return manage("POST", kind, 201, json.dumps(body))

        def collected(source: str, key: str, events: list[Any]) -> int:
            lines = "".join(json.dumps(event) + "\n" for event in events)
            return ask("POST", f"{where['collect']}/v1/{source}", key, lines, "application/x-ndjson")[0]

        def follow(table: str, column: str, total: int) -> None:
            while not Lake(lake).table("gold", table).exists():
                in_time(table)
            key, view = create("subscriptions", **app, table=table)["key"], TableView()
            with SyncSubscription(subscribe(where["serve"], table, key=key)) as messages:
                for message in messages:
                    view.apply(message)
                    if (found := sum(row[column] for row in view.rows.values())) == total:
                        return
                    in_time(found)

        app = {"tenant": "default", "app": "tower"}
        create("tenants", name="default")
        create("tenants/default/apps", name="tower")
        sender = create("keys", **app, actions=["send"], sources=["flights"])["key"]
        assert [collected("flights", key, rows) for key in ("", admin)] == [401, 401]
        assert collected("flights", sender, [*rows, *rows[:20]]) == 202  # some are sent twice
        window, _, distinct = load_pipeline(tmp_path / "flights").products
        follow(window, "events", len(rows))
        follow(distinct, "flights", len(rows))
        with pytest.raises(Unauthorized), SyncSubscription(subscribe(where["serve"], distinct)) as messages:
            next(iter(messages))

        patterns = (ROOT / "docs" / "guide" / "patterns.md").read_text(encoding="utf-8")
        declaration = patterns.partition("```toml\n# lake/_millrace/control/state/sources/visits.toml")[2].partition(
            "```"
        )[0]
        manage("PUT", "sources/visits", 200, f"#{declaration}", "application/toml")
        sender = create("keys", **app, actions=["send"], sources=["visits"])["key"]
        visits = [{"id": number, "at": 1_767_225_600_000 + number, "who": f"w{number % 3}"} for number in range(30)]
        while (status := collected("visits", sender, visits)) != 202:
            in_time(status)
        follow("visits_by_person", "n", len(visits))
        manage("DELETE", "sources/visits", 204)
        while (status := collected("visits", sender, visits)) == 202:
            in_time(status)
    finally:
        stack.send_signal(signal.SIGINT)
        ended = stack.wait(90)
    assert ended == 0, (tmp_path / "up.log").read_text()
    assert processes_of(lake) == []
