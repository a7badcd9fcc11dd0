"""``millrace check``, on this machine and on one that lacks things."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.local.machine import MachineCheck, checks
from lakehouse.contract.settings import conf_dir, load_settings


def find(found: list[MachineCheck], name: str) -> MachineCheck:
    return next(check for check in found if check.name == name)


def test_what_the_tests_need_is_there() -> None:
    found = checks()
    names = [check.name for check in found]
    assert len(set(names)) == len(names)
    for name in ("Python", "Java", "packages for ingest", "packages for serve", "packages for lakehouse"):
        assert find(found, name).ok, name
    assert find(found, "settings").ok
    assert find(found, "pipeline meetup").detail.startswith("sources: rsvps; products: ")
    assert all(check.detail for check in found)
    assert all(bool(check.remedy) != check.ok for check in found)


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(conf_dir(), tmp_path / "conf")
    broken = tmp_path / "conf" / "pipelines" / "broken" / "pipeline.toml"
    broken.parent.mkdir()
    broken.write_text("[sources.x]\ntopik = 'x'\n")
    monkeypatch.setenv("MILLRACE_CONF", str(tmp_path / "conf"))
    monkeypatch.setenv("MILLRACE_JARS_DIR", str(tmp_path / "jars"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        monkeypatch.setenv("MILLRACE_SERVE_PORT", str(port))
        found = checks()
    java = find(found, "Java")
    assert not java.ok
    assert "JAVA_HOME" in java.remedy
    assert "topik" in find(found, "pipeline broken").detail
    assert find(found, "pipeline meetup").ok
    jars = find(found, "jars for kafka")
    assert (jars.ok, jars.optional) == (False, True)
    serving = find(found, "port for serving")
    assert not serving.ok
    assert str(port) in serving.detail
    assert not (tmp_path / "jars").exists(), "it changes nothing"


def test_what_the_command_line_says_is_looked_at(tmp_path: Path) -> None:
    lake, own = tmp_path / "lake", tmp_path / "rides"
    lake.write_text("")
    own.mkdir()
    (own / "pipeline.toml").write_text("[sources.x]\ntopik = 'x'\n")
    found = checks(lambda: load_settings({}, lake=lake, pipeline=str(own)))
    assert "is not a folder" in find(found, "disk").detail
    assert "topik" in find(found, "pipeline rides").detail


def test_packages_that_may_be_missing_are_not_imported() -> None:
    code = "import sys, jobs.cli, jobs.local.machine; print({'kafka', 'pyspark', 'lmdb'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_wrong_settings_do_not_stop_the_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SERVE_PORTT", "1")
    found = checks()
    assert "MILLRACE_SERVE_PORTT" in find(found, "settings").detail
    assert find(found, "pipeline meetup").ok
    assert find(found, "port for serving").detail


def test_a_broker_that_is_named_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_KAFKA", "127.0.0.1:9")
    assert not find(checks(), "Kafka").ok
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        monkeypatch.setenv("MILLRACE_KAFKA", f"127.0.0.1:{there.getsockname()[1]}")
        assert find(checks(), "Kafka").ok
