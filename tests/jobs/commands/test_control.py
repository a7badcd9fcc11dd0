"""``millrace control``, ``tenant`` and ``key`` against a control plane in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from ingest.border.access import ApiKey
from jobs.cli import app
from jobs.commands.control import ControlRefused
from lakehouse.contract.access import KeyFile, address_file
from lakehouse.contract.errors import ConfigError, EnvironmentProblem
from lakehouse.contract.settings import Settings
from serve.access import ReaderKey

ROOT = Path(__file__).parents[3]
ZERO = "0" * 64


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lake with a control plane that runs."""
    folder = tmp_path_factory.mktemp("lake")
    command = [sys.executable, "-m", "jobs.cli", "control", "--lake", str(folder), "--set", "control.port=0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stderr=log)
    try:
        until = time.monotonic() + 60
        while "control plane at" not in (folder / "log").read_text():
            assert time.monotonic() < until and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield folder
    finally:
        process.terminate()
        process.wait(30)


def call(lake: Path, *words: str) -> Any:
    """What the command prints as JSON; its own error is raised."""
    done = CliRunner().invoke(app, [*words, "--json", "--lake", str(lake)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_tenants_apps_and_keys(lake: Path) -> None:
    call(lake, "tenant", "add", "acme", "--title", "Acme")
    assert [each["name"] for each in call(lake, "tenant", "ls")] == ["acme"]
    with pytest.raises(ControlRefused, match="the name 'acme' is taken"):
        call(lake, "tenant", "add", "acme")
    assert call(lake, "tenant", "add", "acme/shop", "--ends", "2030-12-31")["ends"] == "2030-12-31T00:00:00Z"
    assert [each["name"] for each in call(lake, "tenant", "ls", "acme")] == ["shop"]
    assert call(lake, "tenant", "end", "acme/shop", "--at", "never")["ends"] is None
    made = call(lake, "key", "new", "ada", "--tenant", "acme/shop", "--may", "read", "--rows", "t=a > 1")
    assert (made["actions"], made["rows"], made["app"]) == (["read"], {"t": "a > 1"}, "shop")
    sender = call(lake, "key", "new", "roof", "--source", "rsvps", "--rate", "5")
    assert (sender["actions"], sender["sources"], sender["rate"]) == (["send"], ["rsvps"], 5)
    rotated = call(lake, "key", "rotate", made["id"], "--grace", "60")
    assert rotated["id"] == f"{made['id']}-2"
    assert {each["id"] for each in call(lake, "key", "ls", "--tenant", "acme")} == {made["id"], rotated["id"]}
    call(lake, "key", "revoke", made["id"])
    assert [each["id"] for each in call(lake, "key", "ls", "--tenant", "acme/shop")] == [rotated["id"]]
    assert call(lake, "tenant", "end", "acme/shop")["ends"] < time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60)
    )
    call(lake, "tenant", "rm", "acme/shop")
    call(lake, "tenant", "rm", "acme")
    assert call(lake, "tenant", "ls") == [] == call(lake, "key", "ls", "--tenant", "acme")


def test_manager_and_machine_get_keys_of_their_own(lake: Path, tmp_path: Path) -> None:
    call(lake, "tenant", "add", "globex")
    manager = call(lake, "key", "new", "bo", "--may", "manage", "--tenant", "globex")
    machine = call(lake, "key", "new", "rack-2", "--may", "state")
    assert (manager["actions"], machine["actions"]) == (["manage"], ["state"])
    file = tmp_path / "bo.key"
    file.write_text(manager["key"])
    seen = call(lake, "tenant", "ls", "--set", f"control.key={file}")
    assert [each["name"] for each in seen] == ["globex"]
    with pytest.raises(ControlRefused, match="a key of a tenant may not do this"):
        call(lake, "tenant", "add", "other", "--set", f"control.key={file}")
    url = address_file(Settings(lake=lake)).read_text()
    answer = httpx.get(f"{url}/v1/state", headers={"Authorization": f"Bearer {machine['key']}"}, timeout=60)
    assert answer.json()["tenants"].keys() >= {"globex"}


def test_key_files_are_taken_over(lake: Path) -> None:
    sender = KeyFile(lake / "_millrace" / "keys.toml", ApiKey)
    reader = KeyFile(lake / "_millrace" / "readers.toml", ReaderKey)
    texts = [
        sender.new(ApiKey(ZERO, "gate", tenant="initech", sources=("rsvps",), max_event_bytes=500)),
        reader.new(ReaderKey(ZERO, "screen", tables=("t",), rows={"*": "a = 1"}, connections=3)),
        reader.new(ReaderKey(ZERO, "analyst", queries=True)),
    ]
    for told in ("3 keys are taken over, 0 were there", "0 keys are taken over, 3 were there"):
        assert told in CliRunner().invoke(app, ["control", "import", "--lake", str(lake)]).stderr
    kept = {each["name"]: each for each in call(lake, "key", "ls")}
    assert (kept["gate"]["tenant"], kept["gate"]["max_event_bytes"]) == ("initech", 500)
    assert (kept["screen"]["rows"], kept["screen"]["connections"]) == ({"*": "a = 1"}, 3)
    assert kept["analyst"]["actions"] == ["queries", "read"]
    url = address_file(Settings(lake=lake)).read_text()
    answer = httpx.get(f"{url}/v1/queries", headers={"Authorization": f"Bearer {texts[2]}"}, timeout=60)
    assert answer.status_code == 503, "the key is good; there is no server"


def test_without_a_control_plane_keys_are_in_files_and_the_rest_says_so(tmp_path: Path) -> None:
    made = call(tmp_path, "key", "new", "screen", "--may", "read", "--table", "t")
    assert KeyFile(tmp_path / "_millrace" / "readers.toml", ReaderKey).read()[made["id"]].tables == ("t",)
    sender = call(tmp_path, "key", "new", "gate", "--tenant", "acme")
    assert [each["id"] for each in call(tmp_path, "key", "ls")] == [sender["id"], made["id"]]
    assert [each["name"] for each in call(tmp_path, "key", "ls", "--tenant", "acme")] == ["gate"]
    for ident in (sender["id"], made["id"]):
        call(tmp_path, "key", "revoke", ident)
    assert call(tmp_path, "key", "ls") == []
    for words in (("tenant", "ls"), ("key", "rotate", made["id"])):
        with pytest.raises(ConfigError, match=r"Start one with `millrace control`, or set control\.url"):
            call(tmp_path, *words)
    for wrong in (("--may", "manage"), ("--tenant", "acme/shop")):
        with pytest.raises(ConfigError, match=wrong[0]):
            call(tmp_path, "key", "new", "x", *wrong)
    with pytest.raises(ConfigError, match="--table"):
        call(tmp_path, "key", "new", "x", "--table", "t")


def test_control_plane_that_is_down_is_named(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("mr_x_y")
    with pytest.raises(EnvironmentProblem, match=r"http://127\.0\.0\.1:1 does not answer"):
        call(
            tmp_path,
            "tenant",
            "ls",
            "--set",
            "control.url=http://127.0.0.1:1",
            "--set",
            f"control.key={tmp_path / 'k'}",
        )


def test_migrations_run_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["control", "migrate", "--lake", str(tmp_path)])
    assert done.exit_code == 0 and (tmp_path / "_millrace" / "control" / "control.db").exists()
    assert not (tmp_path / "_millrace" / "control" / "admin.key").exists()
